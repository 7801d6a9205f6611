"""A realtime session whose instance's pod drains goes on at another one; `kubectl omni ui` shows a pipeline's page."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from websockets.sync.client import ClientConnection, connect

from tests.cluster.conftest import CHOIR
from tests.cluster.installing import Installed, url, wait_for, wait_ready
from tests.cluster_kit import REPOSITORY

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600, func_only=True),
    # Each run has the same in processes: tests/web (sessions and their bindings), tests/operator (the page's command).
    pytest.mark.nightly,
]

NAME = "live"


@pytest.fixture(scope="module")
def live(installed: Installed) -> Iterator[str]:
    """URL of `choir` as a pipeline of its own that serves realtime."""
    made: dict[str, Any] = yaml.safe_load(CHOIR.read_text())
    made["metadata"]["name"] = NAME
    made["spec"]["serves"] = ["chat", "realtime"]
    installed.apply(made)
    try:
        wait_ready(installed.cluster, installed.namespace, NAME, timeout_s=240)
        wait_for("both voices are ready", lambda: len(voices(installed)) == 2 or None, timeout_s=120)
        yield url(installed.cluster, installed.namespace, NAME)
    finally:
        installed.kubectl("delete", "omnipipeline", NAME, "--ignore-not-found", "--timeout=60s")


def voices(installed: Installed) -> set[str]:
    """Names of the pods of `voices` that are ready and stay."""
    found = set()
    for pod in installed.pods(NAME, "voices"):
        conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", ())}
        if conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]:
            found.add(str(pod["metadata"]["name"]))
    return found


class Session:
    """A text session. All events of the server are kept."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self.types: list[str] = []
        self.send("session.update", session={"type": "realtime", "output_modalities": ["text"]})
        self.until("session.updated")

    def send(self, type: str, **fields: Any) -> None:
        self._socket.send(json.dumps({"type": type, **fields}))

    def until(self, type: str) -> dict[str, Any]:
        while True:
            event: dict[str, Any] = json.loads(self._socket.recv(timeout=60))
            self.types.append(event["type"])
            if event["type"] == type:
                return event

    def say(self, text: str) -> None:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        self.send("conversation.item.create", item=item)
        self.send("response.create")

    def answer(self) -> tuple[str, str]:
        """The words of the response, and the pod that sang them."""
        response = self.until("response.done")["response"]
        assert response["status"] == "completed", response
        [content] = response["output"][0]["content"]
        words, _, singer = content["text"].partition("-- ")
        return words.strip(), singer


def test_a_session_goes_on_at_another_pod_when_its_own_drains(installed: Installed, live: str) -> None:
    with connect(f"{live.replace('http', 'ws', 1)}/v1/realtime?model={NAME}") as socket:
        session = Session(socket)
        session.say("one")
        words, first = session.answer()
        assert (words, first in voices(installed)) == ("ONE", True)
        session.say("two")
        assert session.answer() == ("TWO", first)  # it has the session's caches
        session.say("slow " * 20)  # six seconds, begun before the pod is told to end
        session.until("response.output_text.delta")
        installed.kubectl("delete", "pod", first, "--wait=false")
        assert session.answer() == (" ".join(["SLOW"] * 20), first)
        session.say("three")
        words, second = session.answer()
        assert words == "THREE"
        assert second != first
        session.say("four")
        assert session.answer() == ("FOUR", second)
        assert "error" not in session.types
        assert session.types.count("response.done") == 5


def test_the_plugin_shows_the_page_until_it_is_interrupted(installed: Installed, live: str) -> None:
    command = [sys.executable, "-u", "-m", "omnipipeline_operator.kubectl.cli", "-n", installed.namespace]
    with subprocess.Popen(
        [*command, "ui", NAME, "--no-browser"],
        env=installed.cluster.environment,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as plugin:
        try:
            assert plugin.stdout is not None
            found = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/ until Ctrl\+C\n", plugin.stdout.readline())
            assert found is not None
            page = httpx.get(f"{found[1]}/", timeout=30)
            assert (page.status_code, page.headers["content-type"].partition(";")[0]) == (200, "text/html")
            assert "<title>" in page.text
            with httpx.stream("GET", f"{found[1]}/page/events", timeout=30) as events:
                view = next(line for line in events.iter_lines() if line.startswith("data: "))
            assert all(stage in view for stage in ("split", "sing", "sign"))
        finally:
            plugin.send_signal(signal.SIGINT)
            _, said = plugin.communicate(timeout=30)
    assert (plugin.returncode, said) == (0, "")
