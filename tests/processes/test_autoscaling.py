"""`omni up` follows the load of its groups: steps by a clock of the test, and a run of real processes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from omnipipeline_spec import loading, planning
from omnipipeline_spec.scaling import Load
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.one_machine.autoscaling import Autoscaler, Instances
from stage_runtime.processes.one_machine.fleet import Fleet
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from stage_runtime.processes.one_machine.preparing.prepared import Prepared
from stage_runtime.processes.supervision.supervisor import Supervisor

PATIENCE_S = 60.0
SLEEPER = """\
name: sleeper
stages:
- {name: hear, process: ear, factory: "sleeper_stages:hear", next: say}
- {name: say, process: voice, factory: "sleeper_stages:say", terminal: true}
processGroups:
- name: voice
  autoscaling: {minReplicas: 0, maxReplicas: 3, targetQueueSeconds: 0.2, scaleDownDelaySeconds: 2}
code:
  inline:
    sleeper_stages.py: |
      import time
      def hear():
          return lambda payload: payload.data
      def say():
          return lambda payload: (time.sleep(0.2), payload.data)[1]
"""
LOADED = loading.loads(SLEEPER)
PLAN = planning.plan(LOADED.spec, name=LOADED.name)


class Pipeline:
    """Instances that are ready when the test says so."""

    def __init__(self) -> None:
        self.ready, self.pending = 0, 0
        self.changing = False
        self.orders: list[int] = []
        self.lines: list[str] = []
        self.autoscaler = Autoscaler(PLAN, self)

    def instances(self, unit: str) -> Instances | None:
        return None if self.changing else Instances(self.ready if unit == "voice" else 1, self.pending)

    def order(self, unit: str, replicas: int) -> None:
        self.orders.append(replicas)
        self.pending = max(0, replicas - self.ready)
        self.ready = min(self.ready, replicas)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def come(self, took_s: float = 1.0) -> None:
        self.ready, self.pending = self.ready + self.pending, 0
        self.autoscaler.started("voice", took_s)

    def step(self, now: float, **load: Any) -> None:
        groups = {"ear": Load(ready=1, arrivals_per_s=0.0), "voice": Load(ready=self.ready, **load)}
        self.autoscaler.step({"groups": msgspec.to_builtins(groups)}, now)


def test_from_none_to_one_to_three_and_back_to_none() -> None:
    made = Pipeline()
    made.step(0.0, arrivals_per_s=0.0)
    made.step(1.0, arrivals_per_s=0.5, waiting=1, held=1)
    made.step(2.0, arrivals_per_s=0.5, waiting=1, held=1)  # the one that loads was ordered for it
    made.come()
    made.step(3.0, arrivals_per_s=12.0, service_s=0.2, running=1, waiting=2)
    made.come()
    made.step(4.0, arrivals_per_s=12.0, service_s=0.2, running=3)
    for now in range(5, 10):
        made.step(float(now), arrivals_per_s=1.0, service_s=0.2)
    for now in range(10, 15):
        made.step(float(now), arrivals_per_s=0.0, service_s=0.2)
    assert made.orders == [1, 3, 1, 0]
    assert made.lines == [
        "voice: up to 1: 1 wait for the first instance",
        "voice: up to 3: load 2.4, 1 at once each; 4 would be wanted, maxReplicas is 3",
        "voice: down to 1: load 0.2, 1 at once each for 2 s",
        "voice: down to 0: no request for 2 s",
    ]
    assert made.autoscaler.in_charge("ear") is None
    assert made.autoscaler.in_charge("voice") == (
        "its load sets its replicas (autoscaling, 0 to 3); last: down to 0: no request for 2 s"
    )


def test_after_a_start_that_failed_no_other_is_ordered_for_a_while() -> None:
    made = Pipeline()
    for now in (0.0, 1.0, 4.0, 5.0, 6.0, 14.0, 15.0):
        made.step(now, arrivals_per_s=0.5, waiting=1, held=1)
        if made.pending:
            made.pending = 0
            made.autoscaler.start_failed("voice", "say did not start: out of memory", now)
    assert made.orders == [1, 1, 1]
    assert made.lines[1] == "voice: say did not start: out of memory; tried again in 5 s"
    assert made.lines[-1].endswith("tried again in 20 s")


def test_a_start_that_fails_for_days_is_tried_each_minute() -> None:
    made = Pipeline()
    for _ in range(2000):
        made.autoscaler.start_failed("voice", "out of memory", 0.0)
    assert made.lines[-1] == "voice: out of memory; tried again in 60 s"


def test_nothing_is_decided_without_the_coordinators_numbers_or_while_a_person_changes_the_group() -> None:
    made = Pipeline()
    made.autoscaler.step({}, 0.0)
    made.autoscaler.step({"groups": {"voice": {"ready": "many"}}}, 0.0)
    made.changing = True
    made.step(1.0, arrivals_per_s=0.5, waiting=1)
    assert made.orders == []


def test_a_unit_that_an_update_has_taken_out_is_passed_over() -> None:
    """The coordinator's numbers may still have its groups."""

    async def admitted(ready: Callable[[], Awaitable[None]], group: str | None = None) -> None:
        await ready()

    supervisor = Supervisor(on_change=lambda view: None, on_line=lambda process, line: None)
    fleet = Fleet(Prepared(LOADED.spec), supervisor, admitted=admitted, printed=lambda line: None)
    fleet.prepared = Prepared(loading.loads(SLEEPER.replace("process: ear", "process: other")).spec)
    groups = {"ear": Load(ready=1, arrivals_per_s=0.0), "voice": Load(ready=0, arrivals_per_s=0.0)}
    fleet.step({"groups": msgspec.to_builtins(groups)})
    assert [unit.name for unit in fleet.prepared.plan.units] == ["other", "voice"]
    assert fleet.instances("ear") is None


@pytest.mark.proves("starts-on-demand")
async def test_a_group_at_zero_starts_for_a_request_that_waits_and_ends_when_it_is_idle() -> None:
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="t-") as base:
        pipeline = LocalPipeline(
            _written(base),
            overrides=[f"endpoints.basePath={base}/run"],
            options=LocalOptions(port=0),
            on_line=lambda name, line: lines.append(line) if name == "autoscaling" else None,
        )
        async with pipeline, httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as client:
            assert "voice" not in pipeline.pids()
            assert (await client.get("/readyz")).status_code == 200
            answers = await asyncio.gather(*(client.post("/v1/pipeline", json={"inputs": "a"}) for _ in range(3)))
            assert [answer.status_code for answer in answers] == [200, 200, 200]
            assert lines[0].startswith("voice: up to ")
            with pytest.raises(ConfigurationError, match=r"voice: its load sets its replicas .*; last: "):
                await pipeline.scale("voice", 2)
            await pipeline.restart("voice")
            assert (await client.post("/v1/pipeline", json={"inputs": "a"})).status_code == 200


async def test_a_group_starts_on_demand_while_another_one_is_being_restarted() -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as base:
        file, slow = _written(base), Path(base) / "slow"
        waiting = f"      def hear():\n          while os.path.exists({str(slow)!r}): time.sleep(0.05)\n"
        file.write_text(SLEEPER.replace("      def hear():\n", waiting).replace("import time", "import os, time"))
        pipeline = LocalPipeline(
            file, overrides=[f"endpoints.basePath={base}/run"], options=LocalOptions(port=0, no_auth=True)
        )
        async with pipeline, httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as client:
            slow.touch()
            restarting = asyncio.create_task(pipeline.restart("ear"))
            async with asyncio.timeout(PATIENCE_S):
                while len(pipeline._supervisor.instances("ear")) < 2:
                    await asyncio.sleep(0.01)
            assert "voice" not in pipeline.pids()
            assert (await client.post("/v1/pipeline", json={"inputs": "a"})).status_code == 200
            assert not restarting.done()
            slow.unlink()
            await restarting
            assert (await client.post("/v1/pipeline", json={"inputs": "a"})).status_code == 200


@pytest.mark.long
async def test_limits_that_change_in_the_file_apply_to_the_run() -> None:
    without = "".join(line for line in SLEEPER.splitlines(True) if "autoscaling" not in line and "Groups" not in line)
    without = without.replace("- name: voice\n", "")
    with tempfile.TemporaryDirectory(prefix="t-") as base:
        file = _written(base)
        pipeline = LocalPipeline(
            file, overrides=[f"endpoints.basePath={base}/run"], options=LocalOptions(port=0, no_auth=True)
        )

        async def until(replicas: int) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while sum(one.ready for one in pipeline._supervisor.instances("voice")) != replicas:
                    await asyncio.sleep(0.05)

        async with pipeline, httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as client:

            async def asked() -> int:
                return (await client.post("/v1/pipeline", json={"inputs": "a"})).status_code

            assert "voice" not in pipeline.pids()
            file.write_text(without)
            assert await pipeline.update({file}) == "voice has 1 instances"
            assert "voice" in pipeline.pids() and await asked() == 200
            await pipeline.scale("voice", 2)

            file.write_text(SLEEPER.replace("scaleDownDelaySeconds: 2", "scaleDownDelaySeconds: 0"))
            assert await pipeline.update({file}) == "voice follows its load"
            await until(0)
            assert await asked() == 200

            file.write_text(SLEEPER.replace("{minReplicas: 0,", "{minReplicas: 2,"))
            assert await pipeline.update({file}) == "voice follows its load"
            await until(2)
            file.write_text(
                file.read_text().replace("say():", "say(loud=False):").replace("minReplicas: 2", "minReplicas: 1")
            )
            assert await pipeline.update({file}) == "restarted ear, voice; voice follows its load"
            assert sum(one.ready for one in pipeline._supervisor.instances("voice")) == 2, "as many as there were"
            assert await asked() == 200


@pytest.mark.nightly
@pytest.mark.proves("starts-on-demand")
@pytest.mark.timeout(300)
async def test_under_load_from_one_to_three_to_none_and_back_no_request_fails() -> None:
    counts: list[int] = []
    statuses: list[int] = []
    with tempfile.TemporaryDirectory(prefix="t-") as base:
        pipeline = LocalPipeline(
            _written(base), overrides=[f"endpoints.basePath={base}/run"], options=LocalOptions(port=0)
        )
        async with pipeline, httpx.AsyncClient(base_url=pipeline.url, timeout=PATIENCE_S) as client:

            async def ask() -> None:
                statuses.append((await client.post("/v1/pipeline", json={"inputs": "a"})).status_code)

            async def until(replicas: int, per_s: float) -> None:
                """Requests at this rate until there are so many instances."""
                asking: set[asyncio.Task[None]] = set()
                async with asyncio.timeout(PATIENCE_S):
                    while sum(one.ready for one in pipeline._supervisor.instances("voice")) != replicas:
                        if per_s:
                            asking.add(asyncio.create_task(ask()))
                        await asyncio.sleep(1 / per_s if per_s else 0.1)
                if asking:
                    await asyncio.wait(asking)
                counts.append(replicas)

            for replicas, per_s in ((1, 1.0), (3, 14.0), (1, 1.0), (0, 0.0), (1, 1.0)):
                await until(replicas, per_s)
    assert counts == [1, 3, 1, 0, 1]
    assert set(statuses) == {200}


def _written(base: str) -> Path:
    file = Path(base) / "sleeper.yaml"
    file.write_text(SLEEPER)
    return file
