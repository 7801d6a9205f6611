"""Qwen3-Omni's example in pods: three answers are those of transformers' whole model, which a process here computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from stage_models.qwen3_omni import tiny
from tests.cluster.installing import Installed, url, wait_ready
from tests.cluster_kit import REPOSITORY
from tests.qwen3_omni import oracle
from tests.qwen3_omni.omni_cases import CASES, FRAMES
from tests.qwen3_omni.test_omni_answers import ask, check

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,  # six processes of one machine answer the same each time: qwen3_omni/test_omni_answers.py
    pytest.mark.timeout(900, func_only=True),
]

EXAMPLE = REPOSITORY / "examples" / "qwen3_omni" / "pipeline.yaml"
LOADING_S = 400  # six pods load torch and transformers on the machine's two processors
CHOSEN = [case for case in CASES if case.name in ("text", "picture-and-sound", "long-prompt")]


@pytest.fixture
def omni(installed: Installed) -> Iterator[str]:
    """URL of the example: the file as it is, but for the length of speech, which the oracle's has, too."""
    command = [sys.executable, "-m", "stage_runtime", "convert", str(EXAMPLE)]
    command += ["--set", f"stages.talker.factoryArgs.params.max_tokens={FRAMES}"]
    resource = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    installed.kubectl("apply", "--validate=strict", "-f", "-", stdin=resource)
    try:
        wait_ready(installed.cluster, installed.namespace, "qwen3-omni", timeout_s=LOADING_S)
        yield url(installed.cluster, installed.namespace, "qwen3-omni")
    finally:
        installed.kubectl("delete", "omnipipeline", "qwen3-omni", "--ignore-not-found", "--timeout=60s")


async def test_answers_of_pods_are_those_of_the_whole_model(omni: str, tmp_path: Path) -> None:
    """Each pod makes the tiny checkpoint for itself: its weights are the same everywhere."""
    checkpoint = str(tiny.make(tmp_path / "tiny"))
    expected = oracle.answers(checkpoint, tmp_path, CHOSEN)
    async with httpx.AsyncClient(base_url=omni, timeout=250) as client:
        for case in CHOSEN:
            check(checkpoint, expected, case, await ask(client, case))
