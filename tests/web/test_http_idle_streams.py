"""Many idle streams at one coordinator: a small version of what `benchmarks/scale.py --streams` measures."""

from __future__ import annotations

import pytest

from benchmarks.scalelab import streams

COUNT = 600


@pytest.mark.long
@pytest.mark.proves("idle-streams")
async def test_an_idle_stream_takes_less_than_100_kib_and_a_slow_reader_its_own_buffer_only() -> None:
    found = await streams.measure(COUNT)
    assert found.bytes_per_stream <= 100 << 10
    assert found.bytes_per_slow_reader <= found.slow_reader_bound
