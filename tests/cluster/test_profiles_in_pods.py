"""``kubectl omni profile`` of pods on a cluster: every hop between pods is paired, nothing restarts."""

from __future__ import annotations

import base64
import json
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.cluster.installing import Installed, pipeline, url, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]

NAME = "profiled"
CODE = """
import stage_runtime as omni

def front():
    def run(payload):
        for word in ("one", "two", "three"):
            yield omni.Chunk({"word": word})
        yield omni.Result({"words": 3})
    return run

def back():
    async def run(session):
        async for chunk in session.chunks():
            yield omni.Chunk(omni.Text(chunk.data["word"]))
        await session.payload()
    return omni.Streaming(run)
"""
STAGES: list[dict[str, object]] = [
    {"name": "front", "process": "a", "factory": "made:front", "next": ["back"], "streamTo": ["back"]},
    {"name": "back", "process": "b", "factory": "made:back", "terminal": True},
]


def test_pods_are_profiled_without_a_restart(installed: Installed, tmp_path: Path) -> None:
    data = {"keys": base64.b64encode(b"opener\n").decode()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "profiled-keys"}, "data": data}
    installed.kubectl("apply", "-f", "-", stdin=json.dumps(secret))
    http = {"apiKeySecretRef": {"name": "profiled-keys", "key": "keys"}}
    installed.apply(pipeline(NAME, STAGES, code=CODE, coordinator={"http": http}))
    wait_ready(installed.cluster, installed.namespace, NAME)
    before, over, answers = installed.uids(NAME), threading.Event(), Counter[int]()
    address = url(installed.cluster, installed.namespace, NAME)

    def load() -> None:
        body = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
        with httpx.Client(base_url=address, timeout=60, headers={"authorization": "Bearer opener"}) as client:
            while not over.is_set():
                answers[client.post("/v1/chat/completions", json=body).status_code] += 1

    client = threading.Thread(target=load)
    client.start()
    try:
        done = installed.plugin("profile", NAME, "--seconds", "3", "--out", str(tmp_path))
    finally:
        over.set()
        client.join()
    assert done.returncode == 0, done.stderr
    assert set(answers) == {200}
    report = json.loads((tmp_path / "report.json").read_text())
    whole = [each for each in report["timeline"] if _is_whole(each)]
    hops = {(each["source"], each["destination"], each["kind"]): each["count"] for each in report["hop_breakdown"]}
    assert len(whole) > 10
    assert set(hops) == {("front", "back", "payload"), ("front", "back", "stream"), ("back", "coordinator", "stream")}
    assert hops["front", "back", "stream"] >= 3 * len(whole)
    assert len({each["host"] for each in report["processes"]}) == 3, "three pods"
    assert installed.uids(NAME) == before
    installed.kubectl("delete", "omnipipeline", NAME, "--timeout=60s")
    installed.kubectl("delete", "secret", "profiled-keys")
    gone = installed.plugin("profile", NAME)
    assert gone.returncode == 1 and "not found" in gone.stderr


def _is_whole(request: dict[str, object]) -> bool:
    events = request["events"]
    assert isinstance(events, list)
    names = {each["event_name"] for each in events}
    return {"request_admission", "terminal_response"} <= names
