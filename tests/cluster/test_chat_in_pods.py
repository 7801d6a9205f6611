"""The chat example on a cluster: the file as it is, with the stage image that docs/install.md builds for it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.installing import Installed, url, wait_ready
from tests.cluster_kit import REPOSITORY

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900, func_only=True)]

EXAMPLE = REPOSITORY / "examples" / "chat" / "pipeline.yaml"
LOADING_S = 400  # the weights are converted first, on the machine's two processors


@pytest.fixture
def chat(installed: Installed) -> Iterator[str]:
    """URL of the example."""
    installed.kubectl("apply", "--validate=strict", "-f", str(EXAMPLE))
    try:
        wait_ready(installed.cluster, installed.namespace, "chat", timeout_s=LOADING_S)
        yield url(installed.cluster, installed.namespace, "chat")
    finally:
        installed.kubectl("delete", "omnipipeline", "chat", "--ignore-not-found", "--timeout=60s")


def test_the_file_as_it_is_generates_an_answer(chat: str) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12}
    answer = httpx.post(f"{chat}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"].strip()
    assert 0 < answer.json()["usage"]["completion_tokens"] <= 12
