"""docs/scaling.md: what it says beside its tables is what the last benchmark measured, and which targets it misses."""

from __future__ import annotations

import re

import msgspec
import pytest

from benchmarks.scale import Figures
from benchmarks.scalelab.streams import Streams
from docs.pictures import scaling_tables
from docs.pictures.scaling import FILE

FIGURES = msgspec.json.decode(FILE.read_bytes(), type=Figures)
PAGE = " ".join(scaling_tables.PAGE.read_text().split())


@pytest.mark.parametrize("statement", scaling_tables.statements(FIGURES))
def test_a_number_in_the_text_is_that_of_the_last_benchmark(statement: str) -> None:
    assert statement in PAGE


def test_the_page_explains_all_targets_that_the_last_benchmark_missed() -> None:
    explained = re.findall(r"^- \*\*([\d.]+ \w+ for a \w+)\.\*\*", scaling_tables.PAGE.read_text(), re.MULTILINE)
    assert explained == ["64 KiB for a link", "1.2 times for a request"]
    assert FIGURES.broken == []
    known = re.compile("instances: a request costs|a link takes .* at an end that sends and receives")
    others = [one for one in FIGURES.beyond() if not known.search(one)]
    assert others == []


GOOD = Streams(
    streams=10_000,
    bytes_per_stream=20_000,
    idle_processor=0.04,
    request_processor_us=600,
    first_byte_ms=1.0,
    first_byte_idle_ms=1.4,
    first_byte_slow_ms=1.4,
    bytes_per_slow_reader=1000,
    slow_reader_bound=1000,
)


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"bytes_per_stream": 200 << 10}, ["an idle stream takes 200 KiB"]),
        (
            {"first_byte_idle_ms": 1.6},
            ["with 10000 idle streams the first byte takes 1.6 ms, without them 1.0 ms"],
        ),
        (
            {"bytes_per_slow_reader": 3 << 20, "slow_reader_bound": 2 << 20},
            ["a client that does not read takes 3.0 MiB, not at most 2.0 MiB"],
        ),
    ],
)
def test_the_benchmark_checks_each_target_of_idle_streams(changed: dict[str, float], missed: list[str]) -> None:
    figures = Figures("", streams=[msgspec.structs.replace(GOOD, **changed)])
    assert list(figures.beyond()) == missed
