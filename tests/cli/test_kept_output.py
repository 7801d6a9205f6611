"""The output of processes is kept for `omni logs`, up to a bound; a whole pipeline is run and asked in a test."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import stage_runtime as omni
from stage_runtime.cli.running import logs
from stage_runtime.errors import RequestError
from stage_runtime.processes.one_machine.kept_output import EARLIER, OUTPUT, KeptOutput, Reader

HELLO = Path(__file__).parents[2] / "examples/hello/pipeline.yaml"


def test_lines_are_kept_and_followed_also_into_a_new_file(tmp_path: Path) -> None:
    kept, reader = KeptOutput(tmp_path, most=100), Reader(tmp_path)
    kept.add("a", "one\ttwo")
    assert list(reader.all()) == [("a", "one\ttwo")]
    found = []
    for number in range(20):
        kept.add("b.1", f"line {number}")
        found += list(reader.new())
    assert found == [("b.1", f"line {number}") for number in range(20)]
    second = Reader(tmp_path)
    later = list(second.all())
    second.close()
    assert 5 < len(later) < 20 and later == found[-len(later) :]
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 300
    kept.close()
    kept.add("a", "nothing")
    reader.close()


def test_between_two_files_the_run_goes_on(tmp_path: Path) -> None:
    """The writer has moved the file that is full away, and has not made the next one: a disk may be full as well."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / OUTPUT).write_text("a\tone\n")
    reader, second = Reader(folder), Reader(folder)
    assert list(reader.all()) == [("a", "one")]
    with (folder / OUTPUT).open("a") as written:
        written.write("a\ttwo\n")
    (folder / OUTPUT).rename(folder / EARLIER)
    assert list(reader.new()) == [("a", "two")]
    assert list(second.all()) == [("a", "one"), ("a", "two")]
    assert [*reader.new(), *second.new()] == []
    (folder / OUTPUT).write_text("a\tthree\n")
    assert list(reader.new()) == list(second.new()) == [("a", "three")]
    shutil.rmtree(folder)
    for one in (reader, second):
        with pytest.raises(FileNotFoundError):
            list(one.new())
        one.close()


def test_lines_are_kept_again_once_their_file_can_be_made(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    kept = KeptOutput(folder, most=20)
    kept.add("a", "no folder")
    folder.mkdir()
    (folder / EARLIER).mkdir()
    kept.add("a", "a file that is full")
    kept.add("a", "later")
    reader = Reader(folder)
    assert [*reader._split((folder / OUTPUT).read_bytes())] == [("a", "later")]
    (folder / EARLIER).rmdir()
    kept.add("a", "a file that is full")
    kept.add("a", "last")
    assert list(reader.all())[-1] == ("a", "last")
    reader.close()
    kept.close()


def test_a_run_shows_its_lines_and_is_asked_in_a_test() -> None:
    """One start of examples/hello for all of it."""
    this = ("--pid", str(os.getpid()))  # another one may run here
    testing: Any = omni.testing
    with testing.run_pipeline(HELLO) as running:
        answer = running.chat("hello there")
        assert "HELLO" in answer.text and answer.finish == "stop"
        assert running.chat([{"role": "user", "content": "one"}]).text
        assert list(running.ask({"text": "a b"})) == ["shout"]
        with pytest.raises(RequestError, match="messages"):
            running.chat([])
        whole = CliRunner().invoke(logs.command, [*this])
        assert whole.exit_code == 0, whole.output
        lines = whole.output.splitlines()
        assert any(line.startswith("coordinator | ") for line in lines)
        some = CliRunner().invoke(logs.command, [*this, "--tail", "1", "coordinator"])
        assert len(some.output.splitlines()) == 1 and some.output.startswith("coordinator | ")
        typo = CliRunner().invoke(logs.command, [*this, "voice", "vioce"])
        assert typo.exit_code == 1 and "\nvoice | " in f"\n{typo.stdout}"
        assert typo.stderr == ("error: nothing is kept of vioce; these have written: coordinator, front, voice\n")
        many = CliRunner().invoke(logs.command, [*this, "--tail", str(10**20)])
        assert set(lines) <= set(many.output.splitlines())
        assert set(lines) <= set(running.logs)
    assert CliRunner().invoke(logs.command, [*this]).exit_code == 1
