"""examples/disaggregated in two pods for prompts and two for tokens, over NIXL and over Mooncake, beside examples/chat.

The answers are those of the chat example, token for token, also while a pod of each kind is killed under load.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from omnipipeline_spec.types.pods import PROBE_PORT
from tests import cluster_images
from tests.cluster.installing import Installed, url, wait_for, wait_ready
from tests.cluster_kit import REPOSITORY

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1200, func_only=True),
    # Five pods convert and load a model on two processors. Each run has the processes of the same pipelines
    # (tests/e2e/test_language_apart.py, tests/engines/test_disaggregated_example.py).
    pytest.mark.nightly,
]

LOADING_S = 600
CLIENTS = 4
TOKENS = 12
QUESTIONS = [f"{number}. What does a person need who wants to sail around {place}?" for number, place in enumerate(
    ("Africa", "an island in the north", "the whole world", "Lake Constance", "Cape Horn", "the bay")
)]  # fmt: skip


class Asked(msgspec.Struct, frozen=True):
    """One request, ended. outcome: ``ok``, ``wrong`` or why not. begun: the client had something of the answer."""

    outcome: str
    streamed: bool
    begun: bool
    kill: int  #: How many pods were killed before it was sent.


@pytest.fixture(scope="module")
def image(installed: Installed) -> str:
    return cluster_images.apart()


def example(name: str, image: str, **spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples" / name / "pipeline.yaml").read_text())
    made["spec"] |= {"image": image, "coordinator": {"replicas": 1}, **spec}
    return made


def disaggregated(image: str, relay: str) -> dict[str, Any]:
    """Clients give each request a salt, so that no prompt is in a cache; every prompt of a block is asked for."""
    groups = [{"name": group, "replicas": 2} for group in ("language", "prompts")]
    made = example("disaggregated", image, relayBackend=relay, processGroups=groups)
    made["spec"]["accepts"].append("cache_salt")
    made["spec"]["stages"][0]["factoryArgs"] = {"remote_prefill_tokens": 1}
    return made


@pytest.fixture(scope="module")
def expected(installed: Installed, image: str) -> Iterator[dict[str, str]]:
    """The chat example's answers."""
    installed.kubectl("apply", "--validate=strict", "-f", "-", stdin=json.dumps(example("chat", image)))
    try:
        wait_ready(installed.cluster, installed.namespace, "chat", timeout_s=LOADING_S)
        address = url(installed.cluster, installed.namespace, "chat")
        with httpx.Client(base_url=address, timeout=200) as client:
            answers = {}
            for question in QUESTIONS:
                answer = client.post("/v1/chat/completions", json=body(question))
                assert answer.status_code == 200, answer.text
                answers[question] = str(answer.json()["choices"][0]["message"]["content"])
    finally:
        installed.kubectl("delete", "omnipipeline", "chat", "--ignore-not-found", "--timeout=60s")
    yield answers


def body(question: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "any",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        **fields,
    }


class Load:
    """Clients that retry nothing, every second request streamed, until `stop`."""

    def __init__(self, address: str, expected: dict[str, str]) -> None:
        self.asked: list[Asked] = []
        self.kills = 0
        self._expected = expected
        self._http = httpx.AsyncClient(base_url=address, timeout=200)
        self._numbers = itertools.count()
        self._over = asyncio.Event()
        self._tasks = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]

    async def some(self, count: int) -> None:
        """Wait until so many more have ended."""
        goal = len(self.asked) + count
        async with asyncio.timeout(400):
            while len(self.asked) < goal:
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def _client(self) -> None:
        while not self._over.is_set():
            number, kill = next(self._numbers), self.kills
            question, streamed = QUESTIONS[number % len(QUESTIONS)], number // len(QUESTIONS) % 2 == 1
            parts: list[str] = []
            try:
                await self._ask(body(question, stream=streamed, cache_salt=f"{number}"), parts)
                outcome = "ok" if "".join(parts) == self._expected[question] else "wrong"
            except (httpx.HTTPError, RuntimeError) as error:
                torn = self._expected[question].startswith("".join(parts))
                outcome = f"{type(error).__name__}: {error}" if torn else "wrong"
            self.asked.append(Asked(outcome, streamed, bool(parts), kill))

    async def _ask(self, wanted: dict[str, Any], parts: list[str]) -> None:
        async with self._http.stream("POST", "/v1/chat/completions", json=wanted) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code} {(await answer.aread()).decode()}")
            if not wanted["stream"]:
                parts.append(json.loads(await answer.aread())["choices"][0]["message"]["content"])
                return
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(json.dumps(event["error"]))
                    parts += [text for one in event["choices"] if (text := one["delta"].get("content"))]
        raise RuntimeError("the stream ended without [DONE]")


def summed(installed: Installed, name: str, unit: str, metric: str, label: str) -> Counter[str]:
    """A counter of all pods of a unit, by one of its labels."""
    found: Counter[str] = Counter()
    for pod in installed.pods(name, unit):
        text = httpx.get(f"http://{pod['status']['podIP']}:{PROBE_PORT}/metrics", timeout=30).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == metric:
                    found[sample.labels[label]] += int(sample.value)
    return found


def kill(installed: Installed, name: str, unit: str) -> None:
    victim = installed.pods(name, unit)[0]["metadata"]["name"]
    installed.kubectl("delete", "pod", victim, "--grace-period=0", "--force")


@pytest.mark.parametrize("relay", ["nixl", "mooncake"])
async def test_answers_are_the_chat_example_s_also_while_a_pod_of_each_kind_is_killed(
    installed: Installed, image: str, expected: dict[str, str], relay: str
) -> None:
    name = "disaggregated"
    installed.kubectl("apply", "--validate=strict", "-f", "-", stdin=json.dumps(disaggregated(image, relay)))
    try:
        await asyncio.to_thread(wait_ready, installed.cluster, installed.namespace, name, timeout_s=LOADING_S)
        address = url(installed.cluster, installed.namespace, name)
        begun = time.monotonic()
        load = Load(address, expected)
        try:
            await load.some(2 * len(QUESTIONS))
            # This is read before a pod is killed, and its numbers with it; what a pod serves is as of its process's
            # last beat.
            await asyncio.to_thread(
                wait_for, "prompts come from prefill", lambda: crossed(installed, name, relay), timeout_s=60
            )
            for unit in ("prompts", "language"):
                await asyncio.to_thread(kill, installed, name, unit)
                load.kills += 1
                await load.some(3 * len(QUESTIONS))
        finally:
            await load.stop()
        print(f"{relay}: {len(load.asked)} requests in {time.monotonic() - begun:.0f} s:", outcomes(load))
        assert not [one for one in load.asked if one.outcome == "wrong"]
        assert not [one for one in load.asked if one.outcome != "ok" and not (one.streamed and one.begun)]
        assert summed(installed, name, "language", "omnipipeline_engine_kv_failed_total", "reason")["refused"] == 0
    finally:
        installed.kubectl("delete", "omnipipeline", name, "--ignore-not-found", "--timeout=60s")


def outcomes(load: Load) -> dict[str, int]:
    return dict(Counter(one.outcome if one.outcome in ("ok", "wrong") else "torn stream" for one in load.asked))


def crossed(installed: Installed, name: str, relay: str) -> bool:
    """Blocks have come, by the relay that is named and by no other one."""
    received = summed(installed, name, "language", "omnipipeline_engine_kv_received_blocks_total", "stage")
    sent = summed(installed, name, "prompts", "omnipipeline_relay_sent_bytes_total", "relay")
    others = {one: count for one, count in sent.items() if one != relay and count}
    assert not others, others
    return received.total() > 0 and sent[relay] > 0
