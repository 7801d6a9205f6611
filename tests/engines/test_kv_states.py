"""A side that dies, is cut off or stops at each state of a room: right tokens, and no block is lost on either side.

The transport's half of it, with real processes and signals, is in tests/stage/test_kv_rooms.py and
tests/e2e/test_prefill_apart.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from stage_runtime.engines.autoregressive.connectors.decode import PATIENCE_S
from stage_runtime.rules.handover import KVPoll
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
