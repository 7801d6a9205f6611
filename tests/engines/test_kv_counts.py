"""Counts and events of prompts that another engine computes, and the share of them that is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stage_runtime.kv_transfer.interface import Room
from stage_runtime.metrics import catalog
from tests.engines.generation_kit import alone
from tests.engines.kv_pair_kit import Pair, prompts

LONG = prompts(1, 60)[0]


@pytest.mark.parametrize(("late", "share"), [(False, 1.0), (True, 0.0)])
def test_bytes_that_come_while_prefill_computes_are_counted(late: bool, share: float) -> None:
    """Each step takes a second, so prefill does for each piece. The last one cannot come before it is computed."""
    pair = Pair()
    pieces: list[tuple[Room, bytes, Sequence[Any]]] = []

    def ship(room: Room, header: bytes, tensors: Sequence[Any]) -> None:
        pieces.append((room, header, [one.clone() for one in tensors]))
        if not late:
            pair.deliver(*pieces.pop())

    pair.shipping = ship
    pair.d.ask("r", LONG)
    for _ in range(40):
        pair.turn()
        pair.now += 1
    for one in pieces:
        pair.deliver(*one)
    pair.run()
    assert pair.d.tokens["r"] == alone("llama", LONG, 12)
    nbytes = [tensors[0].numel() for _room, _header, tensors in pair.pieces]
    assert len(nbytes) > 2
    assert pair.counts["received_bytes"] == sum(nbytes)
    assert pair.counts["hidden_bytes"] == share * sum(nbytes[:-1])
    pair.close()


@pytest.mark.parametrize("length", [21, 32, 33, 41, 53, 64, 97, 107])
def test_four_fifths_of_prompts_of_two_chunks_or_more_come_before_their_last_chunk(length: int) -> None:
    """Chunks have 16 tokens, blocks 4. The end of a prompt is a chunk of its own: an eighth of it."""
    pair = Pair()
    prompt = prompts(1, length)[0]
    pair.d.ask("r", prompt)
    for _ in range(20):
        pair.turn()
        pair.now += 1
    pair.run()
    assert pair.d.tokens["r"] == alone("llama", prompt, 12)
    assert pair.counts["received_blocks"] == (length - 1) // 4
    assert pair.counts["hidden_bytes"] >= 0.8 * pair.counts["received_bytes"]
    assert len(pair.pieces) <= -(-length // 16) + 1  # one chunk more, at most
    pair.close()


@pytest.mark.parametrize(("cached", "sizes"), [(24, [6, 1, 1]), (32, [8, 3, 1]), (4, [1, 4, 2, 1])])
def test_blocks_that_prefill_has_cached_cross_while_it_computes_the_rest(cached: int, sizes: list[int]) -> None:
    """sizes: of the pieces, in blocks. The end of a prompt is a chunk of its own."""
    blocks = sum(sizes)
    prompt = prompts(1, 4 * blocks + 1)[0]
    pair = Pair()
    pair.p.ask("before", prompt[:cached])
    while pair.p.turn():
        pass
    pair.d.ask("r", prompt)
    for _ in range(20):
        pair.turn()
        pair.now += 1
    pair.run()
    assert pair.d.tokens["r"] == alone("llama", prompt, 12)
    assert [tensors[0].numel() * blocks // pair.counts["received_bytes"] for *_, tensors in pair.pieces] == sizes
    assert pair.counts["hidden_bytes"] * blocks == pair.counts["received_bytes"] * (blocks - sizes[-1])
    assert pair.leaked == [0, 0]
    pair.close()


def test_a_prompt_of_one_chunk_is_computed_at_once() -> None:
    pair = Pair()
    pair.d.ask("r", prompts(1, 17)[0])
    pair.run()
    assert [tensors[0].numel() for _room, _header, tensors in pair.pieces] == [pair.counts["received_bytes"]]
    assert pair.counts["received_blocks"] == 4
    pair.close()


def test_events_say_what_was_asked_for_what_has_come_and_what_was_computed_here() -> None:
    pair = Pair(least=20)
    told: list[tuple[str, str, dict[str, Any]]] = []
    for side, engine in (("d", pair.d.engine), ("p", pair.p.engine)):
        assert engine.kv is not None
        engine.kv.notice = lambda event, name, side=side, **metadata: told.append((side, event, metadata))
    pair.d.ask("r", prompts(1)[0])
    pair.run()
    pair.d.ask("s", prompts(1, 12, first=30)[0])
    pair.run()
    assert told == [
        ("d", "kv_load_start", {"blocks": 7}),
        ("p", "kv_prefill_start", {"blocks": 7}),
        ("p", "kv_prefill_end", {"complete": True}),
        ("d", "kv_load_end", {"blocks": 7, "complete": True}),
        ("d", "kv_local", {"reason": "short"}),
    ]
    pair.close()


def test_every_number_of_an_engine_has_a_metric_with_each_of_its_reasons() -> None:
    pair = Pair()
    assert pair.d.engine.kv is not None
    found = {name.partition(".")[::2] for name in pair.d.engine.kv.gauges()}
    reasons: dict[str, set[str]] = {}
    for name, reason in found:
        reasons.setdefault(name, set()).update({reason} - {""})
    assert reasons.keys() | {name for name in catalog.KV if name.startswith("kv_leases")} == catalog.KV.keys()
    for name, metric in catalog.KV.items():
        assert all(reason in metric.help for reason in reasons.get(name, ())), name
        assert bool(reasons.get(name)) == ("reason" in metric.labels)
    pair.close()
