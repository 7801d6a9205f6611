"""The tiny checkpoint, and what transformers' whole model answers with it: made once for all tests of this folder."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stage_models.qwen3_omni import tiny
from tests.qwen3_omni import oracle as whole_model


@pytest.fixture(scope="session")
def tiny_omni(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.make(tmp_path_factory.mktemp("omni") / "tiny"))


@pytest.fixture(scope="session")
def oracle(tiny_omni: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers by ``NAME.tokens``, ``NAME.codes`` and ``NAME.wave``, once for all workers: checkpoints are equal."""
    base = tmp_path_factory.getbasetemp()
    return whole_model.answers(tiny_omni, base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
