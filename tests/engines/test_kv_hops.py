"""Prefill is asked for prompts from a length on that is measured over the link, by a probe and by each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stage_runtime.engines.autoregressive.connectors import hops
from stage_runtime.engines.autoregressive.connectors.hops import Hops
from stage_runtime.kv_transfer.interface import Room
from tests.engines.generation_kit import alone
from tests.engines.kv_pair_kit import Pair, prompts

SHORT = prompts(1, 9)[0]


def test_the_threshold_follows_the_median_of_the_last_hops() -> None:
    measured = Hops(1000)
    assert measured.least_tokens == 10  # 10 ms, before anything was measured
    for _ in range(3):
        measured.note(0.05)
    assert measured.least_tokens == 50
    measured.note(9.0)  # one that was slow
    assert measured.least_tokens == 50
    for _ in range(32):
        measured.note(-0.001)  # clocks of two machines
    assert measured.least_tokens == 1


def test_an_instance_is_met_once_and_not_remembered_for_ever() -> None:
    met = Hops(1000)
    assert [met.meet(peer) for peer in ("a", "a", "b", "a")] == [True, False, True, False]
    assert all(met.meet(str(number)) for number in range(hops.MET_MOST))
    assert met.meet("a")


@pytest.mark.parametrize(("hop_s", "asks"), [(0.001, 3), (0.5, 1)])
def test_an_instance_is_probed_once_and_prompts_are_asked_for_by_what_it_took(hop_s: float, asks: int) -> None:
    """8 tokens of 9 may come, at 1,000 tokens a second: worth more than a millisecond, less than a half second."""
    asked = {name: prompts(1, 9, first=ord(name))[0] for name in "abc"}
    expected = {name: alone("llama", prompt, 12) for name, prompt in asked.items()}  # before an engine has the model
    pair = Pair(hops=Hops(1000))

    def ship(room: Room, header: bytes, tensors: Sequence[Any]) -> None:
        pair.now += hop_s
        pair.deliver(room, header, tensors)

    pair.shipping = ship
    for name, prompt in asked.items():
        pair.d.ask(name, prompt)
        pair.run()
    assert pair.d.tokens == expected
    assert len(pair.asks) == asks  # the probe, and those of b and c
    assert pair.counts["short"] == 4 - asks
    assert pair.leaked == [0, 0] and not pair.opened
    pair.close()


def silent(pair: Pair) -> None:
    pair.asking = lambda room: False


def forged(pair: Pair) -> None:
    pair.shipping = pair.forge(key=b"\0" * 16)


def cut(pair: Pair) -> None:
    pair.shipping = lambda room, header, tensors: pair.cut("it is gone")


@pytest.mark.parametrize("fault", [silent, forged, cut])
def test_a_probe_that_fails_costs_nothing(fault: Any) -> None:
    pair = Pair(hops=Hops(1000))
    fault(pair)
    pair.d.ask("r", SHORT)
    pair.run()
    assert pair.d.tokens["r"] == alone("llama", SHORT, 12)
    pair.now += 31
    pair.decoder.look()
    pair.settle()
    assert pair.leaked == [0, 0] and not pair.opened
    assert not any(pair.counts.get(why) for why in ("refused", "lost", "silent"))
    assert pair.d.engine.kv is not None and pair.d.engine.kv.gauges()["kv_least_tokens"] == 10
    pair.close()
