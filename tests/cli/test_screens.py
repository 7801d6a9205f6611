"""What `omni up` shows while it starts, at the width and the height of real terminals."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from stage_runtime.cli import screens
from stage_runtime.processes.supervision.instances import ProcessState, ProcessView


def view(process: str, state: ProcessState, message: str = "", *, stages: tuple[str, ...] = ("s",)) -> ProcessView:
    return ProcessView(process=process, instance=process, stages=stages, state=state, message=message, pid=4194304)


LONG = "thinker_with_a_name_as_long_as_a_name_may_be"
VIEWS = [
    view("coordinator", "ready", "http://127.0.0.1:8000", stages=()),
    view("front", "loading", "audio_encoder: weights 3/14", stages=("preprocess", "audio_encoder", "image_encoder")),
    view(f"{LONG}_tp0", "registering", f"{LONG}: loading shard 12 of 99", stages=(LONG,)),
    view(f"{LONG}_tp1", "loading", stages=(LONG,)),
    view("voice.12", "restarting", "RuntimeError: CUDA error: out of memory, and a long explanation of it " * 3),
]
NEWEST = {f"{LONG}_tp1": "Loading shards:\t 57%|█████▋    | 8/14 [00:12<00:09,  1.52s/it]\x07" * 3}


def drawn(width: int, **more: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(screens.table(VIEWS, NEWEST, **more))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 72, 100, 200])
def test_no_width_cuts_a_state_a_pid_or_an_amount_of_memory_or_makes_two_names_one(width: int) -> None:
    heading, *lines = drawn(width)
    assert heading.split() == ["PROCESS", "STAGES", "STATE", "PID", "MEMORY"]
    assert len(lines) == len(VIEWS)
    assert all(len(line) <= width for line in [heading, *lines])
    for line, shown in zip(lines, VIEWS, strict=True):
        assert line.startswith(screens.shortened(shown.process))
        assert re.search(rf" {shown.state} .* {shown.pid} +\d+ MiB$", line), line
    assert len({line.split()[0] for line in lines}) == len(VIEWS)


def test_a_long_name_keeps_its_end() -> None:
    assert screens.shortened("voice.1") == "voice.1"
    assert screens.shortened(f"{LONG}_tp1") == "thinker_with_…y_be_tp1"
    assert len(screens.shortened("x" * 500)) == screens.WIDEST_NAME


def test_what_does_not_fit_the_height_is_counted_and_what_waits_is_shown_first() -> None:
    lines = drawn(80, rows=4)
    assert len(lines) == 1 + 3 + 1
    assert [line.split()[0] for line in lines[1:4]] == [
        "front",
        *map(screens.shortened, (f"{LONG}_tp0", f"{LONG}_tp1")),
    ]
    assert lines[-1] == "and 1 restarting, 1 ready"
    assert len(drawn(80, rows=5)) == 1 + 5
