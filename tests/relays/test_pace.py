"""How much moves at once between peers of any speed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from stage_runtime.relays.base import Peer
from stage_runtime.relays.mooncake import reading
from stage_runtime.relays.moving import pace
from stage_runtime.relays.moving.pace import Pace
from stage_runtime.relays.nccl import nccl_messages
from stage_runtime.relays.nixl import worker
from stage_runtime.transfers.receiving import STALLED_S

MIB = 1 << 20
MOST = 16 * MIB


def test_a_peer_of_unknown_speed_is_asked_for_a_little_and_a_fast_one_for_much() -> None:
    peer = Pace(MOST)
    assert peer.next_nbytes() == pace.FIRST_NBYTES
    peer.took(48, 3.0)  # a slot's header
    assert peer.next_nbytes() == pace.FIRST_NBYTES
    peer.took(pace.FIRST_NBYTES, 0.002)
    assert peer.next_nbytes() == MOST


@pytest.mark.parametrize("per_s", [30_000, 100_000, 1_000_000, 5 * MIB, 100 * MIB])
@pytest.mark.parametrize(
    ("most", "late_s"),
    [(reading.MOST_NBYTES, reading.LATE_S), (nccl_messages.MOST_NBYTES, STALLED_S), (worker.MOST_NBYTES, STALLED_S)],
)
def test_a_peer_that_is_slow_all_the_time_is_late_once_at_most(per_s: int, most: int, late_s: float) -> None:
    peer, late = Pace(most), 0
    for _ in range(10):
        nbytes = peer.next_nbytes()
        if nbytes / per_s > late_s:
            late += 1
            peer.gave_up()
        else:
            peer.took(nbytes, nbytes / per_s)
    assert late <= (per_s < pace.FIRST_NBYTES / late_s)
    assert peer.next_nbytes() / per_s < late_s


class SlowAgent:
    """An agent of nixl that moves so many bytes a second. Its clock is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_s: int) -> None:
        self.now, self.per_s = 100.0, per_s
        self.pieces: list[int] = []
        self.here_at: list[float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def load(self, peer: str, metadata: bytes) -> None: ...

    def notifications(self) -> dict[str, list[bytes]]:
        return {}

    def begin(self, *, nbytes: int, **_others: Any) -> int:
        self.pieces.append(nbytes)
        self.here_at.append(max([self.now, *self.here_at[-1:]]) + nbytes / self.per_s)
        return len(self.pieces) - 1

    def done(self, handle: int) -> bool:
        return self.now >= self.here_at[handle]


@pytest.mark.parametrize(("per_s", "most"), [(200_000, 250_000), (3_000_000_000, worker.MOST_NBYTES)])
def test_nixl_moves_pieces_of_a_second_at_most(monkeypatch: pytest.MonkeyPatch, per_s: int, most: int) -> None:
    agent, ended = SlowAgent(monkeypatch, per_s), list[str | None]()
    thread = worker.Worker(agent, noticed=lambda *_: None, expects=lambda: False)  # type: ignore[arg-type]
    route = worker.NixlRoute(Peer("slow"), None, b"", b"", reads=False)  # type: ignore[arg-type]
    thread.move(worker.Move(route, 0, 0, 20 * MIB, write=True, over=lambda _move, why: ended.append(why)))
    while not ended:
        agent.now = min(at for at in agent.here_at if at > agent.now)
        thread._turn()
    assert ended == [None] and sum(agent.pieces) == 20 * MIB
    assert most / 2 < max(agent.pieces) <= most


def test_a_peer_that_was_slow_for_a_while_is_asked_for_much_again() -> None:
    peer = Pace(MOST)
    peer.took(16 * MIB, 4.0)
    assert peer.next_nbytes() == 4 * MIB
    peer.took(4 * MIB, 0.004)
    assert peer.next_nbytes() == 16 * MIB
