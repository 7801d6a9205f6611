"""Payloads of random sizes by one relay for ten minutes: it holds no more at the end (`make nightly`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stage_runtime.relays.registry import RELAYS

SOAK_S = 600


@pytest.mark.timeout(3 * SOAK_S)
@pytest.mark.nightly
@pytest.mark.parametrize("relay", [name for name, entry in RELAYS.items() if entry.needs != "gpu"])
def test_a_relay_that_moves_payloads_for_ten_minutes_holds_no_more_at_the_end(relay: str) -> None:
    command = [sys.executable, "-m", "benchmarks.relays", "--relay", relay, "--soak", str(SOAK_S)]
    found = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
