"""Two pods move 1 GiB by NIXL, and by Mooncake: checksummed, and counters of relay and library say who carried it.

A relay that does not start in the image fails its test: the pods never become ready.
"""

from __future__ import annotations

import json
import re

import httpx
import pytest

from omnipipeline_spec.types.pods import PROBE_PORT
from tests import cluster_images
from tests.cluster.installing import Installed, pipeline, url, wait_for, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900, func_only=True)]

GIB = 1 << 30
CHUNK = 64 << 20
SMALL = 1 << 20  #: Bytes that other relays may carry meanwhile.
ROUNDING = 1 << 20  #: Rounding of a log's figures.
CODE = f"""
import hashlib

import numpy as np
import stage_runtime as omni

def front():
    def run(payload):
        for number in range({GIB // CHUNK}):
            data = np.random.default_rng(number).integers(0, 256, {CHUNK}, np.uint8)
            yield omni.Chunk({{"data": data, "sha": hashlib.sha256(data).hexdigest()}})
        yield omni.Result({{}})
    return run

def back():
    async def run(session):
        whole = 0
        async for chunk in session.chunks():
            data = chunk.data["data"]
            if hashlib.sha256(data).hexdigest() != chunk.data["sha"]:
                raise RuntimeError("chunk " + str(chunk.index) + " arrived with other bytes")
            whole += data.nbytes
            del chunk, data
        await session.payload()
        yield omni.Chunk(omni.Text(str(whole)))
    return omni.Streaming(run)
"""
STAGES: list[dict[str, object]] = [
    {"name": "front", "process": "a", "factory": "made:front", "next": ["back"], "streamTo": ["back"]},
    {"name": "back", "process": "b", "factory": "made:back", "terminal": True},
]
MEMORY = {"requests": {"memory": "512Mi"}, "limits": {"memory": "3Gi"}}
#: Mooncake logs its throughput of each second in which it has moved something; its MB are MiB.
METRICS = {"MC_TE_METRIC": "1", "MC_TE_METRIC_INTERVAL_SECONDS": "1", "MC_LOG_LEVEL": "INFO"}
THROUGHPUT = re.compile(r"Transfer Engine Stats \(over last (\S+)s\):? *Throughput: (\S+) MB/s")


@pytest.fixture(scope="module")
def image(installed: Installed) -> str:
    return cluster_images.relays()


@pytest.mark.parametrize(
    "relay",
    ["nixl", pytest.param("mooncake", marks=pytest.mark.nightly)],  # between processes: relays/test_mooncake.py
)
def test_a_gibibyte_between_pods_goes_by_the_relay_that_is_named(installed: Installed, image: str, relay: str) -> None:
    name = f"by-{relay}"
    groups = [{"name": group, "resources": MEMORY} for group in "ab"]
    env = [{"name": key, "value": value} for key, value in METRICS.items()]
    desired = pipeline(name, STAGES, code=CODE, image=image, relayBackend=relay, processGroups=groups, env=env)
    installed.apply(desired)
    try:
        wait_ready(installed.cluster, installed.namespace, name, timeout_s=240)
        body = {"model": "any", "messages": [{"role": "user", "content": "move it"}]}
        address = url(installed.cluster, installed.namespace, name)
        wait_for("the Service leads to the pod", lambda: serves(address), timeout_s=60)
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=400)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == str(GIB)
        # A pod serves the numbers of its process's last beat.
        wait_for(
            "the receiver's count of all bytes",
            lambda: by_relay(installed, name, "b", "omnipipeline_relay_received_bytes_total").get(relay, 0) >= GIB,
            timeout_s=60,
        )
        wait_for(
            "the sender's count of all bytes",
            lambda: by_relay(installed, name, "a", "omnipipeline_relay_sent_bytes_total").get(relay, 0) >= GIB,
            timeout_s=60,
        )
        sent = by_relay(installed, name, "a", "omnipipeline_relay_sent_bytes_total")
        received = by_relay(installed, name, "b", "omnipipeline_relay_received_bytes_total")
        assert all(sent.get(other, 0) + received.get(other, 0) < SMALL for other in {*sent, *received} - {relay})
        ways = series(installed, name, "a", "omnipipeline_edge_instances")
        assert [(way["relay"], way["medium"]) for way, _ in ways if way["target"] == "back"] == [(relay, "tcp")]
        wait_for(
            "the library's own count", lambda: library_bytes(installed, name, relay) >= GIB - ROUNDING, timeout_s=60
        )
    finally:
        installed.kubectl("delete", "omnipipeline", name, "--timeout=60s")


def serves(address: str) -> bool:
    """A pipeline is Ready before kube-proxy has its Service; until then something else may answer, or nothing."""
    try:
        return "data" in httpx.get(f"{address}/v1/models", timeout=10).json()
    except (httpx.HTTPError, ValueError):
        return False


def library_bytes(installed: Installed, name: str, relay: str) -> float:
    """Bytes that the library itself counted: NIXL where they are written from, Mooncake in its log, where it reads."""
    if relay == "nixl":
        return by_relay(installed, name, "a", "omnipipeline_relay_library_bytes_total")[relay]
    [pod] = installed.pods(name, "b")
    log = installed.kubectl("logs", pod["metadata"]["name"])
    return sum(float(seconds) * float(rate) * (1 << 20) for seconds, rate in THROUGHPUT.findall(log))


def by_relay(installed: Installed, name: str, unit: str, metric: str) -> dict[str, float]:
    return {labels["relay"]: value for labels, value in series(installed, name, unit, metric)}


def series(installed: Installed, name: str, unit: str, metric: str) -> list[tuple[dict[str, str], float]]:
    [pod] = installed.pods(name, unit)
    text = httpx.get(f"http://{pod['status']['podIP']}:{PROBE_PORT}/metrics", timeout=30).text
    found = []
    for line in text.splitlines():
        if line.startswith(f"{metric}{{"):
            labels, _, value = line.removeprefix(metric).rpartition(" ")
            pairs = (pair.partition("=") for pair in labels.strip("{}").split(","))
            found.append(({key: json.loads(quoted) for key, _, quoted in pairs}, float(value)))
    return found
