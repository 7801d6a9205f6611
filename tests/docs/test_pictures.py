"""docs/pictures: each file is what its script draws, and the recorded terminal is what `omni up` shows today."""

from __future__ import annotations

import io
import os
import re
import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.text import Text

from docs.pictures import draw, rooms, scaling_tables
from stage_runtime import cli
from stage_runtime.cli.serving import screens
from stage_runtime.processes.supervision.instances import ProcessView
from tests.docs.blocks import ROOT, blocks

FOLDER = ROOT / "docs/pictures"
RECORDED = Text.from_ansi((FOLDER / "omni-up.ansi").read_text()).plain


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    current = (FOLDER / name).read_text() == draw.PICTURES[name]()
    assert current, f"{name} is not what the code says now: run `make pictures`"


def test_the_imports_that_are_drawn_imply_all_imports() -> None:
    """And those that are left out are the ones that follow from others."""
    imports = {"a": frozenset("bcd"), "b": frozenset("c"), "c": frozenset("d"), "d": frozenset[str]()}
    assert list(rooms.reduced(imports)) == [("a", "b"), ("b", "c"), ("c", "d")]


def test_the_rooms_are_those_of_the_code() -> None:
    found = rooms.imports_of(rooms.RUNTIME)
    assert {"wire", "errors", "api"} <= found.keys()
    assert "errors" in found["wire"]
    assert not found["errors"]


def test_the_engine_s_page_lists_the_rooms_of_the_engine() -> None:
    lines = (ROOT / "docs/engine.md").read_text().partition("## ")[0].splitlines()
    listed = [line.split("`")[1].rstrip("/") for line in lines if line.startswith("| `")]
    assert sorted(listed) == sorted(rooms.imports_of(rooms.ENGINE))


def test_the_picture_of_the_example_is_what_omni_plan_draws() -> None:
    """`make pictures` draws it anew."""
    drawn = CliRunner().invoke(cli.main, ["plan", "-f", str(ROOT / "examples/voice/pipeline.yaml"), "-o", "svg"])
    assert drawn.exit_code == 0, drawn.output
    assert (FOLDER / "voice.svg").read_text() == drawn.output


def test_every_picture_is_read_by_a_dark_reader_and_by_one_who_cannot_see() -> None:
    for file in FOLDER.glob("*.svg"):
        text = file.read_text()
        assert "prefers-color-scheme: dark" in text, file.name
        assert ElementTree.fromstring(text).attrib["aria-label"], file.name
    assert {file.name for file in FOLDER.glob("*.svg")} == {*draw.PICTURES, "voice.svg"}


def view(process: str, stages: tuple[str, ...], message: str = "") -> ProcessView:
    return ProcessView(
        process=process, instance=process, stages=stages, state="ready", message=message, pid=os.getpid()
    )


def test_the_recorded_table_is_the_one_that_omni_up_shows() -> None:
    shown = io.StringIO()
    views = [
        view("coordinator", (), "http://127.0.0.1:8000"),
        view("front", ("split",)),
        view("voice", ("shout",)),
    ]
    Console(file=shown, width=100).print(screens.table(views))
    now, then = (re.sub(r"[\d.]+ [MG]iB|\b\d{2,}\b", "N", text) for text in (shown.getvalue(), RECORDED))
    for line in now.splitlines():
        assert " ".join(line.split()) in " ".join(then.split()), line


def test_the_recorded_run_is_of_the_readme_s_pipeline() -> None:
    [pipeline] = blocks("README.md", "yaml")
    stages = re.findall(r"name: (\w+), process: (\w+)", pipeline)
    assert stages
    for stage, process in stages:
        assert re.search(rf"^{process}\s+{stage}\s+ready", RECORDED, re.MULTILINE)


def test_the_tables_of_scaling_are_those_of_the_last_benchmark() -> None:
    assert scaling_tables.PAGE.read_text() == scaling_tables.page(), "run `make pictures`"
