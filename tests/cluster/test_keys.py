"""API keys and a certificate in pods: Secrets that change while requests come in."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from urllib.parse import urlsplit

import httpx
import pytest

from stage_runtime.web.listening.certificates import CertificatePair
from tests.cluster.installing import Installed, pipeline, url, wait_ready
from tests.web.certificate_authority import Authority, shown

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]

CODE = """
import stage_runtime as omni

def echo():
    return lambda payload: omni.Text(payload.request.last_text())
"""
NAME = "keyed"
CA = Authority()


def secret(*keys: str) -> dict[str, object]:
    data = {"keys": base64.b64encode("\n".join(keys).encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "openers"}, "data": data}


def door(pair: CertificatePair) -> dict[str, object]:
    data = {name: base64.b64encode(part).decode() for name, part in (("tls.crt", pair.chain), ("tls.key", pair.key))}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "door"},
        "type": "kubernetes.io/tls",
        "data": data,
    }


def trusted() -> ssl.SSLContext:
    """The Service's address is in no certificate."""
    made = CA.trusted()
    made.check_hostname = False
    return made


async def certificate(at: str) -> str:
    """The subject of the certificate that a new connection is shown."""
    where = urlsplit(at)
    _, writer = await asyncio.open_connection(where.hostname, where.port, ssl=trusted())
    name = shown(writer)
    writer.close()
    return name


@pytest.mark.proves("certificate-replaced")
async def test_other_keys_and_another_certificate_in_their_secrets_fail_no_request(installed: Installed) -> None:
    for one in (secret("old"), door(CA.issue("first"))):
        installed.kubectl("apply", "-f", "-", stdin=json.dumps(one))
    stages: list[dict[str, object]] = [{"name": "echo", "process": "echo", "factory": "made:echo", "terminal": True}]
    doors = {"apiKeySecretRef": {"name": "openers", "key": "keys"}, "tls": {"secretName": "door"}}
    installed.apply(pipeline(NAME, stages, code=CODE, coordinator={"http": doors}))
    wait_ready(installed.cluster, installed.namespace, NAME)
    assert installed.status(NAME)["endpoint"]["url"].startswith("https://")
    using, codes, ended = "old", [], asyncio.Event()
    at = url(installed.cluster, installed.namespace, NAME).replace("http:", "https:")
    async with httpx.AsyncClient(base_url=at, timeout=60, verify=trusted()) as http:

        async def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await http.post("/v1/pipeline", json={"inputs": "hello"}, headers=headers)).status_code

        async def load() -> None:
            while not ended.is_set():
                codes.append(await status(using))

        async def changed(one: dict[str, object], mark: str) -> None:
            await asyncio.to_thread(installed.kubectl, "apply", "-f", "-", stdin=json.dumps(one))
            # A kubelet mounts a changed Secret within a minute or so, and at once when the pod itself has changed.
            [pod] = [one["metadata"]["name"] for one in installed.pods(NAME, "coordinator")]
            await asyncio.to_thread(installed.kubectl, "annotate", "--overwrite", "pod", pod, f"rotation={mark}")

        async def rotated(*keys: str, until: tuple[str, int]) -> None:
            await changed(secret(*keys), keys[0])
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
            assert await certificate(at) == "first"
            await changed(door(CA.issue("second")), "second")
            async with asyncio.timeout(240):
                while await certificate(at) != "second":
                    await asyncio.sleep(0.2)
            ended.set()
    assert len(codes) > 20
    assert set(codes) == {200}
    installed.kubectl("delete", "omnipipeline", NAME, "--timeout=60s")
    installed.kubectl("delete", "secret", "openers", "door")
