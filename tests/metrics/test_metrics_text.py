"""Prometheus reads the text of samples as what they are."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from omnipipeline_spec.types.metrics import Metric
from stage_runtime.metrics import exposition
from stage_runtime.metrics.samples import Counter, Histogram, Samples, merged
from tests.thoroughness import examples

GAUGE = Metric(name="held_bytes", kind="gauge", help='of "all" \\ and\nmore', labels=("one", "two"))
TIME = Metric(name="run_seconds", kind="histogram", help="h", labels=("stage",), buckets=(0.5, 1, 30))
COUNT = Metric(name="ended_total", kind="counter", help="h")


def read(samples: Samples) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(exposition.render(samples))
    return {(each.name, tuple(each.labels.items())): each.value for family in families for each in family.samples}


@settings(max_examples=examples(60))
@given(st.tuples(st.text(), st.text()), st.floats(allow_nan=False))
def test_any_label_and_value_is_read_as_it_was_written(labels: tuple[str, str], value: float) -> None:
    assert read({GAUGE: {labels: value}}) == {("held_bytes", (("one", labels[0]), ("two", labels[1]))): value}


def test_observations_are_counted_up_to_each_bound() -> None:
    times = Histogram(TIME)
    for seconds in (0.5, 0.6, 29, 1000):
        times.observe(seconds, "talk")
    assert read(times.samples()) == {
        ("run_seconds_bucket", (("stage", "talk"), ("le", "0.5"))): 1,
        ("run_seconds_bucket", (("stage", "talk"), ("le", "1.0"))): 2,
        ("run_seconds_bucket", (("stage", "talk"), ("le", "30.0"))): 3,
        ("run_seconds_bucket", (("stage", "talk"), ("le", "+Inf"))): 4,
        ("run_seconds_sum", (("stage", "talk"),)): 1030.1,
        ("run_seconds_count", (("stage", "talk"),)): 4,
    }


def test_samples_of_one_metric_from_two_places_are_one_block() -> None:
    ended = Counter(COUNT)
    ended.add(amount=2)
    parts: list[Samples] = [{GAUGE: {("a", "b"): 1}}, ended.samples(), {GAUGE: {("c", "d"): math.inf}}]
    text = exposition.render(merged(parts))
    assert text.count("# TYPE") == 2
    assert text.splitlines()[2:4] == ['held_bytes{one="a",two="b"} 1.0', 'held_bytes{one="c",two="d"} +Inf']


def test_a_metric_without_values_is_left_out() -> None:
    assert exposition.render({GAUGE: {}, COUNT: {(): 0}}).splitlines() == [
        "# HELP ended_total h",
        "# TYPE ended_total counter",
        "ended_total 0.0",
    ]
