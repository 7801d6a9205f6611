"""Stages' and hops' start and end, from stamps of processes whose clocks are apart."""

from __future__ import annotations

from typing import Final

import pytest

from stage_runtime.coordinator.answering import waterfall
from stage_runtime.coordinator.answering.waterfall import Observed
from stage_runtime.coordinator.events import HopTiming, StageTiming
from stage_runtime.coordinator.questions.clocks import Clocks
from stage_runtime.wire.parts import Timing

ADMITTED: Final = 1_717_000_000_000_000
EDGES: Final = (("a", "b", "normal"), ("a", "c", "stream"), ("b", "c", "normal"))


def observed(edges: tuple[tuple[str, str, str], ...] = EDGES, **clocks_us: int) -> Observed:
    found = Observed(admitted_us=ADMITTED, clocks_us=clocks_us)
    found.begin("a", edges, ADMITTED + 100)
    return found


def test_each_stage_and_hop_has_a_start_and_an_end_on_the_coordinators_clock() -> None:
    found = observed(there=-5_000_000)
    found.received("c", ADMITTED + 9000, stream=True)
    found.received("c", ADMITTED + 9500, stream=True)  # a later chunk
    found.received("c", ADMITTED + 12_000, stream=False)
    late = ADMITTED + 5_000_000  # the clock of `there` is five seconds ahead
    timings = {
        "a": Timing("a", 200, 3000, ADMITTED + 4000, streamed=(("c", 1500),)),
        "b": Timing("b", 0, 1000, late + 6000),
        "c": Timing("c", 500, 6000, late + 11_000, (("a", True, 0), ("b", False, 2500)), (("coordinator", 2600),)),
    }
    stages, hops = waterfall.draw(found, timings, {"a": "here", "b": "there", "c": "there"})
    assert stages == {
        "a": StageTiming(queue_ms=0.2, run_ms=3.0, start_ms=0.8, end_ms=4.0),
        "b": StageTiming(queue_ms=0.0, run_ms=1.0, start_ms=5.0, end_ms=6.0),
        "c": StageTiming(queue_ms=0.5, run_ms=6.0, start_ms=4.5, end_ms=11.0),
    }
    assert hops == (
        HopTiming(source="coordinator", target="a", kind="payload", start_ms=0.1, end_ms=0.8),
        HopTiming(source="a", target="c", kind="stream", start_ms=2.5, end_ms=4.5),
        HopTiming(source="a", target="b", kind="payload", start_ms=4.0, end_ms=5.0),
        HopTiming(source="b", target="c", kind="payload", start_ms=6.0, end_ms=7.0),
        HopTiming(source="c", target="coordinator", kind="stream", start_ms=8.4, end_ms=9.0),
        HopTiming(source="c", target="coordinator", kind="payload", start_ms=11.0, end_ms=12.0),
    )


def test_a_stage_that_has_not_reported_has_no_hops_and_one_of_an_older_process_no_times() -> None:
    timings = {"a": Timing("a", 200, 3000, ADMITTED + 4000), "b": Timing("b", 100, 1000)}
    stages, hops = waterfall.draw(observed(), timings, {})
    assert stages["b"] == StageTiming(queue_ms=0.1, run_ms=1.0)
    assert [(hop.source, hop.target) for hop in hops] == [("coordinator", "a")]


def test_of_alternative_sources_the_one_that_has_sent_is_drawn() -> None:
    edges = (("a", "b", "normal"), ("a", "c", "normal"), ("b", "d", "normal"), ("c", "d", "normal"))
    timings = {
        "a": Timing("a", 0, 1000, ADMITTED + 2000),
        "c": Timing("c", 0, 1000, ADMITTED + 3500),
        "d": Timing("d", 0, 1000, ADMITTED + 5000, (("c", False, 0),)),
    }
    _, hops = waterfall.draw(observed(edges), timings, {})
    assert [(hop.source, hop.target) for hop in hops] == [("coordinator", "a"), ("a", "c"), ("c", "d")]


def test_no_hop_ends_before_it_begins() -> None:
    timings = {"a": Timing("a", 0, 1000, ADMITTED + 2000), "b": Timing("b", 0, 1000, ADMITTED + 2900)}
    _, hops = waterfall.draw(observed((("a", "b", "normal"),)), timings, {})
    assert (hops[1].start_ms, hops[1].end_ms) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("ahead_ns", "offset_us"),
    [(0, 0), (400_000, 0), (-3_000_000_000, 3_000_000), (7_000_000_000, -7_000_000)],
    ids=["equal", "explained by the way", "behind", "ahead"],
)
def test_a_clock_is_as_far_as_the_question_and_the_answer_say(ahead_ns: int, offset_us: int) -> None:
    clocks = Clocks()
    there = 1_000_500_000 + ahead_ns  # half a millisecond each way
    clocks.measured(
        "one", sent_ns=1_000_000_000, there_received_ns=there, there_sent_ns=there + 9, received_ns=1_001_000_009
    )
    assert clocks.offsets_us == {"one": offset_us}


def test_of_two_measurements_the_more_certain_one_counts() -> None:
    clocks = Clocks()
    for way_ns, ahead_ns in ((100_000, 5_000_000_000), (90_000_000, 5_040_000_000), (50_000, 5_000_010_000)):
        clocks.measured(
            "one",
            sent_ns=0,
            there_received_ns=way_ns + ahead_ns,
            there_sent_ns=way_ns + ahead_ns,
            received_ns=2 * way_ns,
        )
    assert clocks.offsets_us == {"one": -5_000_010}


def test_a_measurement_during_which_a_clock_was_set_does_not_count() -> None:
    clocks = Clocks()
    ahead_ns, way_ns = 5_000_000_000, 100_000
    for received_ns, there_sent_ns in (
        (2 * way_ns, way_ns),
        (2 * way_ns - 1_000_000_000, way_ns),  # ours was set back
        (2 * way_ns, way_ns + 1_000_000_000),  # theirs was set forward
    ):
        clocks.measured(
            "one",
            sent_ns=0,
            there_received_ns=way_ns + ahead_ns,
            there_sent_ns=there_sent_ns + ahead_ns,
            received_ns=received_ns,
        )
    assert clocks.offsets_us == {"one": -5_000_000}
