"""Pipelines of real processes for the tests of this folder: started, asked, looked at from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from omnipipeline_spec.cluster import Control, Coordinator, ProcessGroup
from omnipipeline_spec.pipeline import EndpointsConfig, PipelineConfig, StageConfig
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from tests.patience import patience

HERE = Path(__file__).parent
HELLO = HERE.parents[1] / "examples" / "hello" / "pipeline.yaml"

HEARTBEAT_S = 0.25
PATIENCE_S = patience(100.0)  # how long a test waits before it fails, on a machine that others use
APART = {"take": "front", "left": "side", "right": "front", "join": "joiner", "write": "joiner", "speak": "voice"}
TOGETHER = dict.fromkeys(APART, "all")
SPREAD = {name: name for name in APART}


def diamond(processes: Mapping[str, str] = APART, **changes: Any) -> PipelineConfig:
    """take → left, right (fan-out) → join (fan-in) → write → speak (result and stream)."""

    def stage(name: str, **fields: Any) -> StageConfig:
        fields.setdefault("factory", f"diamond_stages:{name}")
        return StageConfig(name=name, process=processes[name], **fields)

    return PipelineConfig(
        name="diamond",
        stages=[
            stage("take", next=["left", "right"], route_fn="diamond_stages:route_fn"),
            stage("left", factory="diamond_stages:side", factory_args={"name": "left"}, next="join"),
            stage("right", factory="diamond_stages:side", factory_args={"name": "right"}, next="join"),
            stage(
                "join",
                wait_for=["left", "right"],
                wait_for_fn="diamond_stages:wait_for_fn",
                merge_fn="diamond_stages:merge_fn",
                next="write",
            ),
            stage(
                "write",
                next="speak",
                stream_to="speak",
                stream_done_to_fn="diamond_stages:stream_done_to_fn",
                project_payload={"speak": "diamond_stages:project"},
            ),
            stage("speak", terminal=True),
        ],
        terminal_stages_fn="diamond_stages:terminal_stages_fn",
        control=Control(heartbeat_seconds=HEARTBEAT_S),  # gauges come with the beats, and tests wait for them
        **changes,
    )


@contextlib.asynccontextmanager
async def running(
    source: PipelineConfig | Path, base: Path, *, environ: Mapping[str, str] | None = None, **options: Any
) -> AsyncIterator[LocalPipeline]:
    """The pipeline up, in a run folder of its own; drained and gone afterwards. Its log is in ``base/log``."""
    if isinstance(source, PipelineConfig):
        source = _changed(source, endpoints=EndpointsConfig(base_path=str(base / "run")))
        overrides: list[str] = []
    else:
        overrides = [f"endpoints.basePath={base / 'run'}"]
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(environ or {})}
    with (base / "log").open("a") as log:
        pipeline = LocalPipeline(
            source,
            overrides=overrides,
            options=LocalOptions(port=0, **options),
            environ=env,
            on_line=lambda name, line: print(f"{name}: {line}", file=log, flush=True),
        )
        async with pipeline:
            yield pipeline


def _changed(spec: PipelineConfig, **changes: Any) -> PipelineConfig:
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    return type(spec)(**{**fields, **changes})


def replicas(**counts: int) -> list[ProcessGroup]:
    return [ProcessGroup(name=name, replicas=count) for name, count in counts.items()]


def coordinator(**fields: Any) -> Coordinator:
    return Coordinator(**fields)


# --- asking -----------------------------------------------------------------------------------------------------


class Client:
    """Asks /v1/pipeline, and retries nothing."""

    def __init__(self, url: str, *, connections: int = 32, keep_s: float | None = 5.0) -> None:
        """keep_s: how long a connection without requests stays open; None: as long as the server leaves it open."""
        limits = httpx.Limits(
            max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=keep_s
        )
        self._http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(self, body: dict[str, Any], *, request_id: str | None = None) -> httpx.Response:
        headers = {} if request_id is None else {"x-request-id": request_id}
        return await self._http.post("/v1/pipeline", json=body, headers=headers)

    async def order(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Another route than `/v1/pipeline`."""
        return await self._http.post(path, json=body)

    async def send(self, body: bytes) -> httpx.Response:
        """A body that is JSON already."""
        return await self._http.post("/v1/pipeline", content=body, headers={"content-type": "application/json"})

    async def ask(self, text: str, **inputs: Any) -> dict[str, Any]:
        """The whole body of an unstreamed answer, an error's included."""
        response = await self.post({"inputs": {"text": text, **inputs}})
        answer: dict[str, Any] = response.json()
        return answer

    async def answer(self, text: str, **inputs: Any) -> dict[str, Any]:
        """The answer of `speak`, which must be one."""
        body = await self.ask(text, **inputs)
        assert "results" in body, body
        result: dict[str, Any] = body["results"]["speak"]
        return result

    async def streamed(
        self, text: str, *, came: asyncio.Semaphore | None = None, **inputs: Any
    ) -> list[tuple[str, Any]]:
        """The events of a streamed answer. came: released for each as it comes."""
        body = {"inputs": {"text": text, **inputs}, "stream": True}
        found = []
        async with self._http.stream("POST", "/v1/pipeline", json=body) as response:
            async for event in events(response):
                found.append(event)
                if came is not None:
                    came.release()
        return found

    async def cut(self, text: str, *, after: int, **inputs: Any) -> None:
        """Ask for a streamed answer and hang up after so many events."""
        body = {"inputs": {"text": text, **inputs}, "stream": True}
        async with self._http.stream("POST", "/v1/pipeline", json=body) as response:
            seen = 0
            if after:
                async for _ in events(response):
                    seen += 1
                    if seen == after:
                        return

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = (await self._http.get("/status")).json()
        return status

    async def metrics(self) -> dict[str, float]:
        """Every sample by its name; of labelled ones ``name{value}``, by the last label."""
        return {
            f"{sample.name}{{{list(sample.labels.values())[-1]}}}" if sample.labels else sample.name: sample.value
            for sample in await self.samples()
        }

    async def samples(self) -> list[Any]:
        """Every sample, with ``name``, ``labels`` and ``value``."""
        text = (await self._http.get("/metrics")).text
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def events(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def eventually(
    holds: Callable[[], bool | Awaitable[bool]], within_s: float = PATIENCE_S, what: object = "it never came about"
) -> None:
    """Wait until ``holds()``. what: what to say when it does not; called, when it can be."""
    end = time.monotonic() + within_s
    while True:
        found = holds()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < end, what() if callable(what) else what
        await asyncio.sleep(0.02)


# --- looking ----------------------------------------------------------------------------------------------------

#: Gauges of a process that must be 0 when nothing is under way. The arena's high-water marks are not among them.
AT_REST = (
    "relay_arena_bytes_in_use",
    "relay_slots_in_flight",
    "relay_shm_unreleased_transfers",
    "transfers_in_flight",
    "sends_queued",
    "relay_shm_pinned_transfers",
    "relay_tcp_pinned_transfers",
    "relay_tcp_unreleased_transfers",
    "relay_tcp_unclaimed_bytes",
    "relay_nixl_unreleased_transfers",
    "relay_nixl_pinned_transfers",
    "relay_nixl_quarantined_sends",
    "relay_nixl_quarantined_receives",
    "relay_mooncake_unreleased_transfers",
    "relay_mooncake_pinned_transfers",
    "relay_mooncake_quarantined_receives",
)


async def under_way(client: Client) -> dict[str, float]:
    """Everything that /status and /metrics say is not at rest; empty when all is."""
    status = await client.status()
    found: dict[str, float] = {name: status[name] for name in ("in_flight", "awaiting_instance") if status[name]}
    for one in status["instances"]:
        numbers = {"waiting": one["waiting"], "running": one["running"], "bound": one["bound"], **one["gauges"]}
        for name in ("waiting", "running", "bound", *AT_REST):
            if numbers.get(name):
                found[f"{one['group']}.{name}"] = numbers[name]
    own = {**status["gauges"], "retained_body_bytes": (await client.metrics())["omnipipeline_retained_body_bytes"]}
    for name in ("retained_body_bytes", *AT_REST):
        if own.get(name):
            found[f"coordinator.{name}"] = own[name]
    return found


async def at_rest(client: Client) -> None:
    """Wait until no request, slot, credit or queue entry is left anywhere."""
    left: dict[str, float] = {}
    await asyncio.sleep(2 * HEARTBEAT_S)  # what beats said before says nothing

    async def empty() -> bool:
        nonlocal left
        left = await under_way(client)
        return not left

    await eventually(empty, what=lambda: f"not at rest: {left}")


async def holds(client: Client, group: str, count: int) -> bool:
    """So many requests are bound to the instances of the group."""
    found = sum(int(one["bound"]) for one in (await client.status())["instances"] if one["group"] == group)
    return found >= count


async def bound_so_far(client: Client, group: str) -> int:
    """How many requests were bound to the instances of the group, those that are over with them."""
    return sum(int(one["bound_total"]) for one in (await client.status())["instances"] if one["group"] == group)


def held(pids: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Descriptors and threads of each process."""
    found = {}
    for name, pid in pids.items():
        process = psutil.Process(pid)
        found[name] = (process.num_fds(), process.num_threads())
    return found


def resident(pids: Mapping[str, int]) -> dict[str, int]:
    """Private memory of each process, in bytes: the arena is shared, and taken back only after a while."""
    found = {}
    for name, pid in pids.items():
        memory = psutil.Process(pid).memory_info()
        found[name] = memory.rss - memory.shared
    return found


def shared_files(pids: Mapping[str, int]) -> int:
    """Shared-memory files of the whole machine that these processes hold, by any name or none."""
    found = 0
    for pid in pids.values():
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                found += target.startswith(("/dev/shm/", "/memfd:"))
    return found
