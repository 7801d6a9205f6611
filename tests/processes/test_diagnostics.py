"""Stacks and last words come out, whatever authors' code has done to the standard streams."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Changes of authors' code to its outputs, most of them for a noisy library.
REPLACED = {
    "redirected": "sys.stderr = sys.__stderr__ = io.StringIO()",
    "none": "sys.stderr = sys.__stderr__ = None",
    "closed": "sys.stderr.close()",
    "descriptor closed": "os.close(2)",
    "descriptor elsewhere": "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)",
}
WATCHED = """
import asyncio, io, os, sys
from stage_runtime import diagnostics
from stage_runtime.processes.stages.watchdog import Watchdog

class Stuck:
    computing, steps = True, 7

async def main():
    stuck = []
    watchdog = Watchdog({"voice": Stuck()}, stuck_after_s=1.0, stuck=lambda *what: stuck.append(what))
    watchdog.arm()
    await watchdog.run()
    assert [name for name, _ in stuck] == ["voice"]

diagnostics.enable()
%s
asyncio.run(main())
"""
ENDING = """
import io, os, sys, threading
from stage_runtime import diagnostics
from stage_runtime.engines.threads import ending
diagnostics.enable()
threading.Thread(target=threading.Event().wait).start()
%s
ending.exit_soon(3)
"""


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    file = folder / "program.py"
    file.write_text(program)
    return subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("replaced", REPLACED)
def test_the_watchdog_prints_the_stacks_of_a_stage_that_is_stuck(replaced: str, tmp_path: Path) -> None:
    done = run(tmp_path, WATCHED % REPLACED[replaced])
    assert "(most recent call first):" in done.stderr, done
    assert "in run" in done.stderr


@pytest.mark.parametrize("replaced", REPLACED)
def test_a_program_that_threads_keep_from_ending_ends_with_its_code_and_its_stacks(
    replaced: str, tmp_path: Path
) -> None:
    done = run(tmp_path, ENDING % REPLACED[replaced])
    assert done.returncode == 3
    assert "exiting with code 3: threads or child processes of the stages' code did not end" in done.stderr
    assert "(most recent call first):" in done.stderr


def test_programs_that_a_process_starts_do_not_inherit_its_output(tmp_path: Path) -> None:
    program = "import os\nfrom stage_runtime import diagnostics\nprint(os.get_inheritable(diagnostics.descriptor()))"
    assert run(tmp_path, program).stdout == "False\n"


def test_a_process_that_is_started_without_an_error_output_starts(tmp_path: Path) -> None:
    program = "import os\nos.close(2)\nfrom stage_runtime import diagnostics\ndiagnostics.enable()\nprint('on')"
    assert run(tmp_path, program).stdout == "on\n"
