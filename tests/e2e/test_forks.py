"""A process that a stage has forked and that comes back to the runtime ends there, as Python ends a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import stage_runtime as omni

STAGES: Final = """\
import os

import stage_runtime as omni


def forked(child):
    pid = os.fork()
    if pid == 0:
        return child()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fail():
    raise ValueError("child")


def create():
    made = forked(fail)
    return lambda payload: {"made": made, "failed": forked(fail), "returned": forked(lambda: "child")}


def stream():
    def run(payload):
        if os.fork() == 0:
            yield omni.Chunk({"child": True})
        yield omni.Chunk({**payload.data, "exit": os.waitstatus_to_exitcode(os.wait()[1])})

    return run
"""

PIPELINE: Final = """\
stages:
- {name: a, process: a, factory: "forking_stages:create", next: [b]}
- {name: b, process: b, factory: "forking_stages:stream", terminal: true}
"""


def test_a_forked_process_that_raises_or_returns_ends_and_its_parent_goes_on(tmp_path: Path) -> None:
    testing: Any = omni.testing
    (tmp_path / "forking_stages.py").write_text(STAGES)
    file = tmp_path / "pipeline.yaml"
    file.write_text(PIPELINE)
    with testing.run_pipeline(file) as running:
        assert running.ask("x") == {"b": [{"made": 1, "failed": 1, "returned": 0, "exit": 0}]}
        assert running.ask("x")
    said = [line for line in running.logs if "a process that the stage a has forked ends: ValueError: child" in line]
    assert len(said) == 3
