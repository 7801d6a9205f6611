"""Echo pipelines whose stages are processes of their own, driven at the request manager."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from omnipipeline_spec import planning
from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from omnipipeline_spec.types.plan import PipelinePlan
from omnipipeline_spec.types.relays import RelayBackend
from stage_runtime.coordinator.coordinator import Coordinator
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.sockets.channels import Channels
from stage_runtime.sockets.endpoints.addresses import CurveSecurity
from stage_runtime.wire.values import OmniRequest, RawTensor

ECHO = "def make():\n    def run(payload):\n        return payload.data\n    return run\n"


def pipeline(stages: int, *, processes: int, relay: RelayBackend = "auto") -> PipelinePlan:
    """An echo pipeline of ``stages``, spread over ``processes``."""
    names = [f"s{index}" for index in range(stages)]
    config = PipelineConfig(
        relay_backend=relay,
        stages=[
            StageConfig(
                name=name,
                process=f"p{index % processes}",
                factory="hop_echo:make",
                next=names[index + 1 : index + 2],
                terminal=index + 1 == stages,
            )
            for index, name in enumerate(names)
        ],
    )
    return planning.plan(config, name=f"hops-{stages}-{processes}")


class Running:
    """A pipeline under way: its request manager in this process, its stages in their own."""

    def __init__(self, coordinator: Coordinator, pids: list[int]) -> None:
        self.manager = coordinator.manager
        self.pids = pids  #: Process ids of the stages.

    async def once(self, inputs: object) -> None:
        handle = self.manager.admit(OmniRequest(id=secrets.token_hex(8), inputs=inputs))
        async for _ in handle.events():
            pass

    async def latency_us(self, inputs: object, rounds: int) -> float:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            await self.once(inputs)
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6


@contextlib.asynccontextmanager
async def running(plan: PipelinePlan, *, tcp: bool, curve: bool) -> AsyncIterator[Running]:
    """Start ``plan``'s stage processes and a coordinator in this one; all are ready."""
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="hops") as folder:
        root = Path(folder)
        (root / "hop_echo.py").write_text(ECHO)
        key = secrets.token_bytes(32)
        (root / "key").write_bytes(key)
        security = CurveSecurity(key) if curve else None
        incarnation = secrets.token_hex(8)
        coordinator = Coordinator(
            msgspec.structs.replace(plan.coordinator, max_in_flight=4096), incarnation=incarnation, loop=loop
        )
        channels = Channels(coordinator, incarnation=incarnation, loop=loop, security=security)
        relays = Relays(
            loop=loop,
            incarnation=incarnation,
            on_release=coordinator.release,
            security=security,
            settings=RelaySettings(
                named=frozenset([plan.coordinator.relay_backend]) - {"auto"},
                coordinator=True,
                bind="tcp://127.0.0.1:*" if tcp else f"ipc://{root}/c.data",
            ),
        )
        publisher = channels.bind_publisher("tcp://127.0.0.1:*" if tcp else f"ipc://{root}/p.sock")
        endpoint = channels.bind("tcp://127.0.0.1:*" if tcp else f"ipc://{root}/c.sock")
        coordinator.wire(channels, relays, endpoint=endpoint, publisher=publisher, revisions=[plan.current])
        children = []
        for unit in plan.units:
            (root / f"{unit.name}.json").write_bytes(msgspec.json.encode(unit))
            for group in unit.groups:
                env = {
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
                    "OMNI_PLAN": str(root / f"{unit.name}.json"),
                    "OMNI_GROUP": group.name,
                    "OMNI_COORDINATOR": endpoint,
                    "OMNI_LISTEN": "tcp://127.0.0.1:*" if tcp else f"ipc://{root}/{group.name}.sock",
                    **({"OMNI_CONTROL_KEY_FILE": str(root / "key")} if curve else {}),
                }
                argv = [sys.executable, "-m", "stage_runtime", "stage", group.name]
                children.append(subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL))
        try:
            while not coordinator.membership.state.complete():
                await asyncio.sleep(0.05)
                dead = [child.args for child in children if child.poll() is not None]
                if dead:
                    raise SystemExit(f"a stage process died: {dead}")
            yield Running(coordinator, [child.pid for child in children])
        finally:
            for child in children:
                child.terminate()
            await asyncio.gather(*(asyncio.to_thread(child.wait) for child in children))
            coordinator.manager.close()
            relays.close()
            channels.close()


def tensor(nbytes: int) -> object:
    return None if nbytes == 0 else RawTensor("uint8", (nbytes,), bytes(nbytes))
