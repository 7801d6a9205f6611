"""The voice example on a cluster: the same file, with an image made of the example's own Dockerfile."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import wave
from collections.abc import Iterator

import httpx
import pytest

from tests import cluster_images
from tests.cluster.installing import Installed, url, wait_ready
from tests.cluster_kit import REPOSITORY

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200, func_only=True)]

EXAMPLE = REPOSITORY / "examples" / "voice"
LOADING_S = 300  # five units load their models on the machine's two processors


@pytest.fixture(scope="module")
def voice(installed: Installed) -> Iterator[str]:
    """URL of the example."""
    cluster_images.voice(installed.images.stage)
    installed.kubectl("apply", "--validate=strict", "-f", "-", stdin=resource())
    try:
        wait_ready(installed.cluster, installed.namespace, "voice", timeout_s=LOADING_S)
        yield url(installed.cluster, installed.namespace, "voice")
    finally:
        installed.kubectl("delete", "omnipipeline", "voice", "--ignore-not-found", "--timeout=60s")


def resource() -> str:
    """The example's file, by the command that the documentation names; the image is the only difference."""
    command = [
        sys.executable,
        "-m",
        "stage_runtime",
        "convert",
        str(EXAMPLE / "pipeline.yaml"),
        "--set",
        f"image={cluster_images.VOICE}",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_example_hears_answers_and_speaks(voice: str) -> None:
    question = (EXAMPLE / "question.wav").read_bytes()
    with httpx.Client(base_url=voice, timeout=120) as client:
        transcription = client.post(
            "/v1/audio/transcriptions", data={"model": "voice"}, files={"file": ("q.wav", question)}
        )
        assert transcription.status_code == 200, transcription.text
        assert "lighthouse" in transcription.json()["text"].lower()
        body = {"model": "voice", "voice": "joe", "response_format": "wav", "input": "Hello. How are you?"}
        spoken = client.post("/v1/audio/speech", json=body)
        assert spoken.status_code == 200, spoken.text
        with wave.open(io.BytesIO(spoken.content)) as sound:
            assert sound.getnframes() / sound.getframerate() > 0.5
        chat = {"model": "voice", "messages": [{"role": "user", "content": "What is for lunch?"}]}
        answered = client.post("/v1/chat/completions", json=chat)
        assert answered.status_code == 200, answered.text
        assert answered.json()["choices"][0]["message"]["content"].strip()


def test_its_image_keeps_the_torch_of_the_stage_image(voice: str, installed: Installed) -> None:
    [pod] = installed.pods("voice", "memory")
    code = "import torch, transformers; print(torch.__version__, torch.version.cuda)"
    version, cuda = installed.kubectl(
        "exec", pod["metadata"]["name"], "--", "python", "-W", "ignore", "-c", code
    ).split()
    [pinned] = re.findall(r"^torch==(.*)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert (version.partition("+")[0], cuda) == (pinned, "None")
