"""The account of processor time: whose each of py-spy's samples is."""

from __future__ import annotations

import sysconfig

import pytest

from benchmarks.accounting import ROOT, is_runtimes, shares

MAIN = f"_run_module_as_main (<frozen runpy>:198);<module> ({ROOT}/stage_runtime/__main__.py:30)"
STAGE = f"run ({ROOT}/stage_runtime/stage/stage.py:133)"
ENGINE = f"step ({ROOT}/stage_runtime/engines/autoregressive/core/engine_core.py:168)"
TORCH = "linear (/somewhere/lib/python3.11/site-packages/torch/nn/functional.py:20)"
AUTHOR = "chat (/home/me/my stages.py:4)"
SEND = f"emit ({ROOT}/stage_runtime/stage/outputs/stage_output.py:76)"


@pytest.mark.parametrize(
    ("stack", "runtimes"),
    [
        pytest.param(MAIN, True, id="the process itself"),
        pytest.param(f"{MAIN};select ({sysconfig.get_path('stdlib')}/selectors.py:468)", True, id="called by it"),
        pytest.param(f"{STAGE};{ENGINE}", False, id="the engine"),
        pytest.param(f"{STAGE};{ENGINE};{TORCH}", False, id="the engine's model"),
        pytest.param(f"{STAGE};{ENGINE};{SEND}", True, id="a chunk that the engine hands on"),
        pytest.param(f"{STAGE};{AUTHOR};{TORCH}", False, id="an author's model"),
        pytest.param(f"{STAGE};{AUTHOR};{SEND}", True, id="a chunk of an author's generator"),
        pytest.param(TORCH, None, id="a library's thread"),
    ],
)
def test_a_sample_belongs_to_the_innermost_file_of_runtime_or_stage(stack: str, runtimes: bool | None) -> None:
    assert is_runtimes(stack.split(";")) is runtimes


def test_a_threads_share_is_that_of_its_samples() -> None:
    raw = "\n".join(
        [
            f"thread (12): chat;{STAGE};{ENGINE} 30",
            f"thread (12): chat;{STAGE};{ENGINE};{SEND} 10",
            f"thread (9);{TORCH} 5",
            f"thread (8): MainThread;{MAIN} 2",
        ]
    )
    assert shares(raw) == {12: ("chat", 0.25), 9: ("native", 0.0), 8: ("MainThread", 1.0)}
