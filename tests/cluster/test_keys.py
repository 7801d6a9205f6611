"""API keys in pods: a Secret with two of them, rotated while requests come in."""

from __future__ import annotations

import asyncio
import base64
import json

import httpx
import pytest

from tests.cluster.installing import Installed, pipeline, url, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]

CODE = """
import stage_runtime as omni

def echo():
    return lambda payload: omni.Text(payload.request.last_text())
"""
NAME = "keyed"


def secret(*keys: str) -> dict[str, object]:
    data = {"keys": base64.b64encode("\n".join(keys).encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "openers"}, "data": data}


async def test_a_rotation_in_a_secret_fails_no_request(installed: Installed) -> None:
    installed.kubectl("apply", "-f", "-", stdin=json.dumps(secret("old")))
    stages: list[dict[str, object]] = [{"name": "echo", "process": "echo", "factory": "made:echo", "terminal": True}]
    reference = {"apiKeySecretRef": {"name": "openers", "key": "keys"}}
    installed.apply(pipeline(NAME, stages, code=CODE, coordinator={"http": reference}))
    wait_ready(installed.cluster, installed.namespace, NAME)
    using, codes, ended = "old", [], asyncio.Event()
    async with httpx.AsyncClient(base_url=url(installed.cluster, installed.namespace, NAME), timeout=60) as http:

        async def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await http.post("/v1/pipeline", json={"inputs": "hello"}, headers=headers)).status_code

        async def load() -> None:
            while not ended.is_set():
                codes.append(await status(using))

        async def rotated(*keys: str, until: tuple[str, int]) -> None:
            await asyncio.to_thread(installed.kubectl, "apply", "-f", "-", stdin=json.dumps(secret(*keys)))
            # A kubelet mounts a changed Secret within a minute or so, and at once when the pod itself has changed.
            [pod] = [one["metadata"]["name"] for one in installed.pods(NAME, "coordinator")]
            await asyncio.to_thread(installed.kubectl, "annotate", "--overwrite", "pod", pod, f"rotation={keys[0]}")
            key, code = until
            async with asyncio.timeout(240):
                while await status(key) != code:
                    await asyncio.sleep(0.2)

        async with asyncio.TaskGroup() as clients:
            for _ in range(3):
                clients.create_task(load())
            await rotated("old", "new", until=("new", 200))
            using = "new"
            await rotated("new", until=("old", 401))
            ended.set()
    assert len(codes) > 20
    assert set(codes) == {200}
    installed.kubectl("delete", "omnipipeline", NAME, "--timeout=60s")
    installed.kubectl("delete", "secret", "openers")
