"""The end of a program that runs authors' code, in programs that end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: A program whose first exit handler, which runs last, says whether a collection would look through all modules.
PROGRAM = """
import atexit, gc, sys
from stage_runtime import __main__
from stage_runtime.engines.autoregressive.process import program
from stage_runtime.engines.threads import ending

class Made:
    def __del__(self):
        print("freed")

def say(when):
    print(f"{when}: {'nothing' if gc.get_freeze_count() > 1000 else 'all'} is looked through")

atexit.register(say, "at the end")
"""
WRITER = """
from stage_runtime.engines.threads import ending
ending.prepare()

class Writer:
    def __init__(self, file):
        self.own, self.file = self, file

writer = Writer(open({path!r}, {mode!r}))
writer.file.write({text!r})
"""


def ran(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "run",
    [
        "sys.argv[1:] = ['stage']; sys.exit(__main__.main())",  # without settings: it ends at once
        "sys.argv[1:] = ['coordinator']; sys.exit(__main__.main())",
        "sys.argv[1:] = []; program.main(None)",
    ],
)
def test_a_program_that_ends_looks_through_nothing_that_is_in_use(run: str) -> None:
    ended = ran(PROGRAM + run)
    assert (ended.returncode, ended.stdout) == (1, "at the end: nothing is looked through\n"), ended.stderr


def test_exit_handlers_of_authors_run_before_that() -> None:
    ended = ran(PROGRAM + "ending.prepare(); atexit.register(say, 'in a handler')")
    assert ended.stdout.splitlines() == [
        "in a handler: all is looked through",
        "at the end: nothing is looked through",
    ], ended.stderr


def test_what_a_stage_has_made_is_freed_at_the_end() -> None:
    ended = ran(PROGRAM + "ending.prepare(); made = Made(); made.own = made; del made")
    assert ended.stdout.splitlines() == ["freed", "at the end: nothing is looked through"], ended.stderr


@pytest.mark.parametrize("still", ["", "del writer"])
@pytest.mark.parametrize(
    ("mode", "text"), [("w", "the last line"), ("wb", b"the last line"), ("w+b", b"the last line")]
)
def test_a_file_in_a_cycle_is_written_at_the_end(mode: str, text: str | bytes, still: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    ended = ran(WRITER.format(path=str(path), mode=mode, text=text) + still)
    assert ended.returncode == 0, ended.stderr
    assert path.read_bytes() == b"the last line"
