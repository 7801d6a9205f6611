"""A side that dies, is cut off or stops at each state of a room: right tokens, and no block is lost on either side.

The transport's half of it, with real processes and signals, is in tests/stage/test_kv_rooms.py and
tests/e2e/test_prefill_apart.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from stage_runtime.engines.autoregressive.connectors.decode import PATIENCE_S
from stage_runtime.kv_transfer.interface import Room
from stage_runtime.rules.kv.handover import KVPoll, LoadStatus
from tests.engines.generation_kit import alone
from tests.engines.kv_pair_kit import Pair, prompts

LENGTH = 60  # four chunks
POINTS = range(9)  # turns: before the ask, and until decode has begun to answer


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(max_inflight=1)  # what is sent waits for what was sent before
    yield made
    made.close()


def killed_or_cut(pair: Pair) -> None:
    pair.cut("its process is gone")


def prefill_stops(pair: Pair) -> None:
    """It goes on when decode has given it up."""
    pair.stopped = pair.p
    for _ in range(6):
        pair.turn()
    pair.now += PATIENCE_S + 1
    pair.decoder.look()
    for _ in range(6):
        pair.turn()
    pair.stopped = None


def decode_stops(pair: Pair) -> None:
    """Its leases end meanwhile; it learns that when it goes on."""
    pair.stopped = pair.d
    assert pair.prefill.sink is not None
    gone = list(pair.opened)
    for room in gone:
        pair.opened.discard(room)
        pair.prefill.sink.closed(room, "its lease is over")
    for _ in range(6):
        pair.turn()
    assert pair.leaked[1] == 0
    pair.stopped = None
    for room in gone:
        assert pair.decode.sink is not None
        pair.decode.sink.closed(room, "the room is not open at the other side")


def states(pair: Pair) -> set[tuple[str, KVPoll]]:
    receivers = [receiver for _name, receiver in pair.decoder._rooms.values()]
    senders = [sender for _name, sender in pair.prefiller._names.values()]
    return {("decode", one.poll()) for one in receivers} | {("prefill", one.poll()) for one in senders}


@pytest.mark.parametrize("event", [killed_or_cut, prefill_stops, decode_stops], ids=lambda one: one.__name__)
def test_whatever_happens_at_any_state_answers_are_right_and_all_blocks_are_freed(
    pair: Pair, event: Callable[[Pair], None]
) -> None:
    seen: set[tuple[str, KVPoll]] = set()
    asked = {f"r{turns}": prompts(1, LENGTH, first=3 + turns)[0] for turns in POINTS}
    for turns, (name, prompt) in zip(POINTS, asked.items(), strict=True):
        pair.d.ask(name, prompt)
        for _ in range(turns):
            pair.turn()
        seen |= states(pair)
        event(pair)
        pair.run()  # and other requests go on
        assert pair.leaked == [0, 0]
        assert not pair.opened and not pair.prefiller._names and not pair.decoder._rooms
    assert pair.d.tokens == {name: alone("llama", prompt, 12) for name, prompt in asked.items()}
    assert pair.counts.get("refused", 0) == 0
    sides = {side for side, _state in seen}
    assert sides == {"decode", "prefill"}
    assert seen >= {
        ("decode", KVPoll.WaitingForInput),
        ("decode", KVPoll.Transferring),
        ("prefill", KVPoll.Transferring),
        ("prefill", KVPoll.Success),
    }


# --- aborts: nothing that frees blocks waits for a clock ----------------------------------------------------------

AT_ONCE = 3  # turns, of at most one step of each engine


def receiving(pair: Pair) -> KVPoll | None:
    """The state of decode's end. None: it has none."""
    return next((receiver.poll() for _name, receiver in pair.decoder._rooms.values()), None)


def sending(pair: Pair) -> KVPoll | None:
    """The state of prefill's last end. None: it has none."""
    return next((sender.poll() for _name, sender in reversed(pair.prefiller._names.values())), None)


def as_usual(pair: Pair) -> None: ...


def prefill_does_nothing(pair: Pair) -> None:
    pair.stopped = pair.p


def another_prompt_has_the_room(pair: Pair) -> None:
    prefill_does_nothing(pair)
    pair.d.ask("other", prompts(1, 100, first=90)[0])


def another_prompt_is_computed_first(pair: Pair) -> None:
    pair.d.ask("other", prompts(1, LENGTH, first=90)[0])


def pieces_are_lost(pair: Pair) -> None:
    """All but the first."""

    def ship(room: Room, header: bytes, tensors: Sequence[Any]) -> None:
        if len(pair.pieces) == 1:
            pair.deliver(room, header, tensors)

    pair.shipping = ship


def pieces_are_not_released(pair: Pair) -> None:
    """Those behind the first wait with their blocks."""
    pair.takes = False


def a_piece_is_refused(pair: Pair) -> None:
    pair.shipping = pair.forge(layout=b"")


#: State of one side -> what happens to the pair, and whether that side is in the state.
ABORTED: dict[tuple[str, KVPoll], tuple[Callable[[Pair], None], Callable[[Pair], bool]]] = {
    ("decode", KVPoll.Bootstrapping): (another_prompt_has_the_room, lambda pair: len(pair.asks) == 1),
    ("decode", KVPoll.WaitingForInput): (as_usual, lambda pair: receiving(pair) is KVPoll.WaitingForInput),
    ("decode", KVPoll.Transferring): (pieces_are_lost, lambda pair: receiving(pair) is KVPoll.Transferring),
    ("decode", KVPoll.Success): (as_usual, lambda pair: bool(pair.d.tokens["r"])),
    ("decode", KVPoll.Failed): (a_piece_is_refused, lambda pair: pair.counts.get("refused") == 1),
    ("prefill", KVPoll.Bootstrapping): (prefill_does_nothing, lambda pair: bool(pair.asks)),
    ("prefill", KVPoll.WaitingForInput): (
        another_prompt_is_computed_first,
        lambda pair: sending(pair) is KVPoll.WaitingForInput,
    ),
    ("prefill", KVPoll.Transferring): (
        pieces_are_not_released,
        lambda pair: sending(pair) is KVPoll.Transferring and pair.prefiller.kept_blocks > 0,
    ),
    ("prefill", KVPoll.Success): (
        pieces_are_not_released,
        lambda pair: sending(pair) is KVPoll.Success and pair.prefiller.kept_blocks > 0,
    ),
    ("prefill", KVPoll.Failed): (a_piece_is_refused, lambda pair: pair.counts.get("refused") == 1),
}


def reached(pair: Pair, prepare: Callable[[Pair], None], there: Callable[[Pair], bool]) -> None:
    prepare(pair)
    pair.d.ask("r", prompts(1, LENGTH)[0])
    for _ in range(40):
        if there(pair):
            return
        pair.turn()
    raise AssertionError(pair.waiting())


def ended_by_prefill(pair: Pair) -> None:
    """Each room is closed as `StageKVTransport.stop` closes it."""
    assert pair.prefill.sink is not None
    for room in [*pair.opened]:
        pair.prefill.close(room, "this instance ends")
        pair.prefill.sink.closed(room, "this instance ends")


@pytest.mark.parametrize("aborter", ["decode", "prefill"])
@pytest.mark.parametrize(("side", "state"), ABORTED, ids=str)
def test_an_abort_at_any_state_frees_both_sides_before_any_time_has_passed(
    side: str, state: KVPoll, aborter: str
) -> None:
    pair = Pair(max_inflight=1, blocks=36, prefilling={"max_requests": 1})
    reached(pair, *ABORTED[side, state])
    if aborter == "decode":
        pair.d.engine.abort_requests([*pair.d.tokens])
    else:
        ended_by_prefill(pair)
    pair.stopped = None
    for _ in range(AT_ONCE):
        pair.turn()
    assert pair.now == 0.0
    assert not pair.opened and not pair.prefiller._names and not pair.decoder._rooms
    assert pair.leaked[1] == 0
    assert all(one.status is not LoadStatus.LOADING for one in pair.d.engine.scheduler.loads)
    if aborter == "prefill":  # decode's requests go on, with what has come
        pair.run()
        assert pair.d.tokens["r"] == alone("llama", prompts(1, LENGTH)[0], 12)
    assert pair.leaked == [0, 0]
    pair.close()
