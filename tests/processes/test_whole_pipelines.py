"""`omni.testing.run_pipeline`: what an author's test is told when something is wrong, and what is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

import stage_runtime as omni
from tests.patience import patience

PATIENCE_S: Final = patience(100.0)

STAGES: Final = """\
import pathlib
import time

import numpy as np
import stage_runtime as omni


def speak():
    def run(payload):
        if payload.request.inputs == "refuse":
            raise omni.InvalidRequest("no speech", param="audio")
        yield omni.Chunk(omni.Audio(np.zeros(1600, np.float32), 16000))

    return run


def fail():
    raise ValueError("no weights")


def hang():
    pathlib.Path(__file__).with_name("hangs").touch()
    time.sleep(1000)
"""

PIPELINE: Final = """\
serves: [chat, speech]
stages:
- {name: speak, process: voice, factory: "whole_stages:%s", terminal: true}
"""


def written(folder: Path, factory: str) -> Path:
    (folder / "whole_stages.py").write_text(STAGES)
    file = folder / "pipeline.yaml"
    file.write_text(PIPELINE % factory)
    return file


def test_a_request_that_fails_raises_what_its_client_is_told(tmp_path: Path) -> None:
    testing: Any = omni.testing
    with testing.run_pipeline(written(tmp_path, "speak")) as running:
        with pytest.raises(testing.RequestError) as refused:
            running.ask("refuse")
        error = refused.value
        assert (error.code, error.message, error.stage, error.hook, error.param) == (
            *("invalid_request", "no speech", "speak", "run"),
            "audio",
        )
        assert error.request_id.startswith("pipeline-")
        with pytest.raises(TypeError, match=r"POST /v1/audio/speech answers with audio/wav: send it to http://"):
            running.post("/v1/audio/speech", {"input": "hello", "response_format": "wav"})
        with pytest.raises(TypeError, match=r"answers with text/event-stream"):
            running.chat("hello", modalities=["audio"], stream=True)


def test_a_factory_that_raises_is_told_with_its_traceback(tmp_path: Path) -> None:
    testing: Any = omni.testing
    with (
        pytest.raises(testing.StartupFailed, match="voice: ValueError: no weights") as failed,
        testing.run_pipeline(written(tmp_path, "fail")),
    ):
        pytest.fail("it is not up")
    (note,) = failed.value.__notes__
    assert 'whole_stages.py", line 18, in fail' in note


def test_an_interrupted_start_leaves_nothing_and_says_nothing_else(tmp_path: Path) -> None:
    # A shell that starts the tests in the background has them, and all that they start, ignore the interrupt.
    program = (
        "import signal, sys, stage_runtime as omni\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with omni.testing.run_pipeline(sys.argv[1]): pass"
    )
    folder = tmp_path / "t"
    folder.mkdir()
    command = [sys.executable, "-c", program, str(written(tmp_path, "hang"))]
    environ = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as run:
        try:
            end = time.monotonic() + PATIENCE_S
            while not (tmp_path / "hangs").exists():
                assert run.poll() is None and time.monotonic() < end
                time.sleep(0.02)
            run.send_signal(signal.SIGINT)
            _, errors = run.communicate(timeout=PATIENCE_S)
        finally:
            run.kill()
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert "destroyed" not in errors
    assert list(folder.glob("omni-*")) == []
