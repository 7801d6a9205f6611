"""The tiny checkpoint, and what transformers' whole model answers with it: made once for all tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stage_models.qwen3_omni import tiny

REPOSITORY = Path(__file__).parents[2]
ORACLE_S = 280.0


@pytest.fixture(scope="session")
def tiny_omni(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.make(tmp_path_factory.mktemp("omni") / "tiny"))


@pytest.fixture(scope="session")
def oracle(tiny_omni: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By ``NAME.tokens``, ``NAME.codes`` and ``NAME.wave``."""
    out = tmp_path_factory.mktemp("oracle") / "answers.npz"
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "tests.qwen3_omni.oracle", tiny_omni, str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=ORACLE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as found:
        return dict(found)
