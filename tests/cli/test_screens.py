"""The screens of `omni up` while it starts, at the width and the height of real terminals."""

from __future__ import annotations

import re

import msgspec
import pytest
from rich.console import Console

from stage_runtime.cli.serving import screens
from stage_runtime.processes.supervision.instances import ProcessState, ProcessView
from stage_runtime.processes.supervision.progress import LoadedShare


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


def loading(message: str, done: float, total: float, unit: str = "it") -> ProcessView:
    share = LoadedShare(done, total, unit)
    return msgspec.structs.replace(view("voice", "loading", message), share=share)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (LoadedShare(126, 290, "it"), "43 % (126 of 290)"),
        (LoadedShare(1.2e9, 2.8e9, "B"), "42 % of 2.8 GB"),
        (LoadedShare(1.2e9, 0, "B"), "1.2 GB"),
        (LoadedShare(999, 0, "B"), "999 B"),
        (LoadedShare(7, 0), "7"),
        (LoadedShare(12, 10), "100 % (12 of 10)"),
        (LoadedShare(-1, 10), "0 % (-1 of 10)"),
        (LoadedShare(1e308, 1e-300), "100 % (1e+308 of 1e-300)"),
    ],
)
def test_a_share_in_words(share: LoadedShare, words: str) -> None:
    assert str(share) == words


def test_a_process_that_says_how_much_is_done_has_a_bar() -> None:
    def row(done: float) -> str:
        console = Console(width=100, color_system="truecolor", force_terminal=True)
        with console.capture() as capture:
            console.print(screens.table([loading("s: Loading weights", done, 290)], {"voice": "a line of its own"}))
        return capture.get().splitlines()[1]

    plain = [re.sub("\x1b[^m]*m", "", row(done)) for done in (0, 145, 290)]
    assert all("s: Loading weights" in one and "a line of its own" not in one for one in plain)
    assert [re.findall(r"\d+ % \(\d+ of 290\)", one) for one in plain] == [
        ["0 % (0 of 290)"],
        ["50 % (145 of 290)"],
        ["100 % (290 of 290)"],
    ]
    assert all("━" * (screens.BAR_COLUMNS // 2 - 1) in one for one in plain)
    assert len({row(0), row(145), row(290)}) == 3


def test_a_bar_of_an_unknown_whole_is_its_amount() -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(screens.table([loading("s: model.safetensors", 1.2e9, 0, "B")]))
    [_heading, line] = capture.get().splitlines()
    assert "1.2 GB s: model.safetensors" in line and "━" not in line


def test_a_narrow_terminal_cuts_what_is_loaded_and_neither_its_bar_nor_its_share() -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(screens.table([loading("thinker: model-00001-of-00015.safetensors", 1.2e9, 2.8e9, "B")]))
    [_heading, line] = capture.get().splitlines()
    assert len(line) <= 80
    assert "━" * screens.BAR_COLUMNS not in line  # it is not whole
    assert re.search("━ +42 % of 2.8 GB thinke", line) and line.endswith("0 MiB")


def test_plain_lines_show_every_ten_per_cent_of_each_thing_once() -> None:
    console = Console(width=100, color_system=None)
    screen = screens.LineScreen(console)
    with console.capture() as capture:
        for done in range(0, 201):
            screen.changed(loading("s: Loading weights", done, 200))
        screen.changed(view("voice", "loading", "s: warming up"))
        screen.changed(loading("s: a.safetensors", 1, 2, "B"))
        screen.changed(loading("s: b.safetensors", 1, 2, "B"))
    assert capture.get().splitlines() == [
        *(f"voice loading: s: Loading weights {10 * each} % ({20 * each} of 200)" for each in range(11)),
        "voice loading: s: warming up",
        "voice loading: s: a.safetensors 50 % of 2 B",
        "voice loading: s: b.safetensors 50 % of 2 B",
    ]


def test_a_line_with_a_colour_that_no_terminal_has_is_shown_and_so_is_the_next_one() -> None:
    absurd = f"\x1b[{'1' * 5000}mloading"
    console = Console(width=9000, color_system=None)
    with console.capture() as capture:
        screen = screens.LineScreen(console)
        screen.printed("voice", absurd)
        screen.printed("voice", "ready")
        console.print(screens.table([view("voice", "loading")], {"voice": absurd}))
    first, second, *table = capture.get().splitlines()
    assert first.startswith("voice | ") and first.endswith("mloading") and "\x1b" not in first
    assert second == "voice | ready" and table[-1].startswith("voice")
