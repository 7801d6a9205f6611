"""What is counted and recorded of prompts that another engine computes: the share that is hidden, and events."""

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
