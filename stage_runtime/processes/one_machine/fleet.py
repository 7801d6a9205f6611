"""The instances of a local run: how many each group has, and which version of the plan they were started from.

Here: what a person orders (`scale`, `restart`, `update`) and what the load does; they share one lock, one launcher and
one count of the instances that each group should have. Not here: the life of a process (`supervision`), what a changed
file means (`updating`), when the load asks for another number (`autoscaling`). Called by `local`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

from omnipipeline_spec import scaling
from omnipipeline_spec.types.plan import GroupPlan, PipelinePlan, UnitPlan
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.one_machine import autoscaling, updating
from stage_runtime.processes.one_machine.launcher import Launcher
from stage_runtime.processes.one_machine.preparing.prepared import Prepared
from stage_runtime.processes.starting.rundir import RunDir
from stage_runtime.processes.supervision import reaper
from stage_runtime.processes.supervision.startup_failures import StartupFailed
from stage_runtime.processes.supervision.supervisor import Supervisor


class Admitted(Protocol):
    """Waits until processes are ready, and the coordinator has given them, or ``group``, work.

    Raises: StartupFailed: one never will be.
    """

    async def __call__(self, ready: Callable[[], Awaitable[None]], group: str | None = None) -> None: ...


class Fleet:
    """All stage processes of one run. `autoscaling.Scaled`."""

    def __init__(
        self,
        prepared: Prepared,
        supervisor: Supervisor,
        *,
        admitted: Admitted,
        printed: Callable[[str], None],
    ) -> None:
        """printed: is given a line about the autoscaler's decisions."""
        self.prepared = prepared
        self.stopping = False  #: Nothing is started any more.
        self._supervisor = supervisor
        self._admitted = admitted
        self._printed = printed
        self._changing = asyncio.Lock()
        self._subject: str | None = None  #: The unit that is being changed, while `_changing` is locked; None: all.
        plan = prepared.plan
        #: Group -> the instances that it should have.
        self._wanted = {group.name: plan.replicas[unit.name] for unit in plan.units for group in unit.groups}
        self._autoscaler = autoscaling.Autoscaler(plan, self)
        self._orders: dict[asyncio.Task[None], str] = {}  #: Orders of the autoscaler, under way, with their unit.
        self._version = 0  #: The version of the plan; see `update`.
        self._dir: RunDir
        self._launcher: Launcher

    def start(self, directory: RunDir, port: Callable[[], int]) -> None:
        """Start the coordinator and every instance of the plan. port: called at each start of the coordinator."""
        self._dir = directory
        self._launcher = self._launcher_of(self.prepared)
        options = self.prepared.options
        self._launcher.add_coordinator(
            host=options.host, port=port, api_keys=self.prepared.api_keys, certificate=options.certificate
        )
        for unit in self.prepared.plan.units:
            for group in unit.groups:
                for _ in range(self.prepared.plan.replicas[unit.name]):
                    self._launcher.add_replica(unit, group)

    def step(self, status: Mapping[str, Any]) -> None:
        """Follow the load. status: the coordinator's; empty: it did not answer."""
        self._autoscaler.step(status, time.monotonic())

    def cancel_orders(self) -> list[asyncio.Task[None]]:
        """End what the autoscaler has begun. Returns: what to wait for."""
        for task in self._orders:
            task.cancel()
        return list(self._orders)

    async def scale(self, group: str, replicas: int) -> None:
        """Let ``group`` have so many instances: new ones are ready, or old ones drained, when this returns.

        Raises: ConfigurationError: no such group, no such number, or the pipeline is stopping. StartupFailed: a new
            instance did not get ready; all that were added are gone again.
        """
        async with self._change_of(group) as (unit, plan):
            in_charge = self._autoscaler.in_charge(unit.name)
            if in_charge is not None:
                raise ConfigurationError(f"{group}: {in_charge}")
            least = 0 if _is_prefill(unit, plan) else 1
            if replicas < least:
                raise ConfigurationError(f"{group}: {replicas} replicas would serve nothing; the least is {least}")
            there = self._supervisor.instances(group)
            await self._grow(unit, plan, replicas - len(there))
            self._wanted[group] = replicas
            there.sort(key=lambda one: not one.ready)  # those that serve stay
            await asyncio.gather(*(self._supervisor.stop(one.spec.name) for one in there[replicas:]))

    async def restart(self, group: str) -> None:
        """Replace every instance of ``group`` by a new one, one after another, and start those that are missing.

        The new one is ready before the old one drains on CPU. A GPU has no room for both: there the old one goes first.
        Raises: ConfigurationError: no such group, or the pipeline is stopping. StartupFailed: a new instance did not
            get ready and is gone again; the old ones that it was not the turn of go on.
        """
        async with self._change_of(group) as (unit, plan):
            for old in self._supervisor.instances(group):
                if unit.gpu_ids:
                    self._refuse_when_stopping()
                    await self._supervisor.stop(old.spec.name)
                    await self._grow(unit, plan, 1, old.spec.replica)
                else:
                    await self._grow(unit, plan, 1)
                    await self._supervisor.stop(old.spec.name)
            await self._grow(unit, plan, self._wanted[group] - len(self._supervisor.instances(group)))

    async def update(self, changed: set[Path]) -> str:
        """Read the file again; what differs from what runs gets new instances, and the old ones finish their requests.

        changed: files of its folder that were written. The old instances go first on a GPU. Returns: what was done.
        Raises: SpecError, ConfigurationError: the file is wrong. StartupFailed: a new instance did not get ready.
        Instances that ran go on.
        """
        fresh = self.prepared.again()
        renamed = fresh.given_name != self.prepared.given_name
        wanted = updating.change(self.prepared.plan, fresh.plan, changed, self.prepared.author_folder, renamed=renamed)
        async with self._changing, self._settled():
            self._refuse_when_stopping()
            # Requests for a group that may have no instance before or after the change wait throughout.
            before, after = scaling.on_demand(self.prepared.plan), scaling.on_demand(fresh.plan)
            self._launcher.start_on_demand(sorted({*before, *after}))
            try:
                if wanted.begin or wanted.end or self.prepared.plan.current != fresh.plan.current:
                    await self._replace(fresh, wanted)
            except BaseException:
                self._launcher.start_on_demand(before)
                raise
        grown = updating.scaled(self.prepared.plan, fresh.plan, wanted)
        self.prepared = fresh
        self._autoscaler.follow(fresh.plan)
        try:
            for group, replicas in grown.items():
                await self.scale(group, replicas)
        finally:  # no load starts the others any more
            self._launcher.start_on_demand(after)
        return wanted.told(grown)

    async def _replace(self, fresh: Prepared, wanted: updating.Change) -> None:
        ended = [(unit, group) for unit in self.prepared.plan.units if unit.name in wanted.end for group in unit.groups]
        begun = [(unit, group) for unit in fresh.plan.units if unit.name in wanted.begin for group in unit.groups]
        old = [(unit, group, one) for unit, group in ended for one in self._supervisor.instances(group.name)]
        counts = {group.name: self._count(fresh.plan, unit, group) for unit, group in begun}
        before, self._version = self._launcher, self._version + 1
        launcher = self._launcher_of(fresh)
        launcher.serve([self.prepared.plan.current, fresh.plan.current])
        added: list[str] = []
        try:
            await asyncio.gather(*(self._supervisor.stop(one.spec.name) for unit, _, one in old if unit.gpu_ids))
            for unit, group in begun:
                added += [launcher.add_replica(unit, group) for _ in range(counts[group.name])]
            await self._admitted(functools.partial(self._supervisor.ready, added))
            self._supervisor.settle(added)
        except BaseException:
            try:
                launcher.serve([self.prepared.plan.current])
            finally:  # a disk may be full
                await asyncio.shield(asyncio.gather(*map(self._supervisor.take_back, added)))
                for unit, group, one in old:
                    if unit.gpu_ids and not self.stopping:
                        before.add_replica(unit, group, one.spec.replica)
            raise
        self._launcher = launcher
        launcher.serve([fresh.plan.current])
        self._wanted = {
            name: count for name, count in self._wanted.items() if name not in {one.name for _, one in ended}
        }
        self._wanted |= counts
        await asyncio.gather(*(self._supervisor.stop(one.spec.name) for unit, _, one in old if not unit.gpu_ids))

    def _count(self, plan: PipelinePlan, unit: UnitPlan, group: GroupPlan) -> int:
        """How many instances of a changed group begin: those whose replicas follow the load have as many as before."""
        if unit.name not in plan.autoscaling:
            return plan.replicas[unit.name]
        there = sum(not one.stopping for one in self._supervisor.instances(group.name))
        limits = plan.autoscaling[unit.name]
        return min(max(there, limits.least), limits.most)

    # --- autoscaling.Scaled -----------------------------------------------------------------------------------------

    def instances(self, unit: str) -> autoscaling.Instances | None:
        groups = next((one.groups for one in self.prepared.plan.units if one.name == unit), None)
        if groups is None or (self._changing.locked() and self._subject in (None, unit)):
            return None
        there = [[one for one in self._supervisor.instances(group.name) if not one.stopping] for group in groups]
        ready = min(sum(one.ready for one in its) for its in there)
        return autoscaling.Instances(ready, max(map(len, there)) - ready)

    def order(self, unit: str, replicas: int) -> None:
        plan = next(one for one in self.prepared.plan.units if one.name == unit)
        for group in plan.groups:
            self._wanted[group.name] = replicas
            every = self._supervisor.instances(group.name)
            there = sorted((one for one in every if not one.stopping), key=lambda one: not one.ready)
            room = self.prepared.plan.autoscaling[unit].most - len(every)  # one that ends still has its GPU
            for _ in range(min(replicas - len(there), room)):
                self._begin(unit, self._start_one(plan, group))
            for one in there[replicas:]:
                self._begin(unit, self._supervisor.stop(one.spec.name))

    def say(self, line: str) -> None:
        self._printed(line)

    def _begin(self, unit: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._orders[task] = unit
        task.add_done_callback(self._orders.pop)

    async def _start_one(self, unit: UnitPlan, group: GroupPlan) -> None:
        began = time.monotonic()
        try:
            name = self._launcher.add_replica(unit, group)
        except ConfigurationError as error:
            self._autoscaler.start_failed(unit.name, str(error), time.monotonic())
            return
        try:
            await self._admitted(functools.partial(self._supervisor.ready, [name]), group.name)
            self._supervisor.settle([name])
            self._autoscaler.started(unit.name, time.monotonic() - began)
        except BaseException as error:
            there = next((one for one in self._supervisor.instances(group.name) if one.spec.name == name), None)
            if there is None or there.stopping:
                return  # it was given up, or all is
            await asyncio.shield(self._supervisor.take_back(name))
            if not isinstance(error, StartupFailed):
                raise
            self._autoscaler.start_failed(unit.name, str(error), time.monotonic())

    # --- inside -----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _change_of(self, group: str) -> AsyncIterator[tuple[UnitPlan, GroupPlan]]:
        """Change the unit of a group. The plan is read in turn: an update may come first.

        Raises: ConfigurationError: no such group.
        """
        async with self._changing:
            unit, plan = self._find(group)
            async with self._settled(unit.name):
                yield unit, plan

    @contextlib.asynccontextmanager
    async def _settled(self, unit: str | None = None) -> AsyncIterator[None]:
        """Change a unit, or all, once the autoscaler's orders for it are carried out; others follow their load.

        Called while `_changing` is locked.
        """
        self._subject = unit
        try:
            under_way = [task for task, of in self._orders.items() if unit in (None, of)]
            await asyncio.gather(*under_way, return_exceptions=True)
            yield
        finally:
            self._subject = None

    async def _grow(self, unit: UnitPlan, group: GroupPlan, count: int, replica: int | None = None) -> None:
        """Add instances and wait until the coordinator gives them work; if one fails, take all of them back."""
        self._refuse_when_stopping()
        if count < 1:
            return
        added: list[str] = []
        try:
            for _ in range(count):
                added.append(self._launcher.add_replica(unit, group, replica))
            await self._admitted(functools.partial(self._supervisor.ready, added), group.name)
            self._supervisor.settle(added)
        except BaseException as error:
            await asyncio.shield(asyncio.gather(*map(self._supervisor.take_back, added)))
            left, wanted = len(self._supervisor.instances(group.name)), self._wanted[group.name]
            if isinstance(error, StartupFailed) and left < wanted and not self.stopping:
                cure = f"{left} of {wanted} instances of {group.name} run now: `omni restart {group.name}` tries again"
                raise error.with_cure(cure) from error
            raise

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise ConfigurationError(f"{self.prepared.plan.pipeline} is stopping")

    def _launcher_of(self, prepared: Prepared) -> Launcher:
        """prepared: what runs, or a later version of it. Each has a folder of its own for code."""
        folder = self._dir.path / (f"code-{self._version}" if self._version else "code")
        common = {**prepared.environment(folder), reaper.RUN: str(self._dir.path)}
        options = prepared.options
        if options.debug_values:
            common["OMNI_DEBUG_VALUES"] = "1"
        if options.log_level is not None:
            common["OMNI_LOG_LEVEL"] = options.log_level
        return Launcher(
            prepared.plan,
            self._supervisor,
            self._dir,
            environment=common,
            startup_s=options.startup_s,
            shown_gpus=prepared.shown_gpus,
            version=self._version,
            debug=options.debug,
        )

    def _find(self, group: str) -> tuple[UnitPlan, GroupPlan]:
        groups = {plan.name: (unit, plan) for unit in self.prepared.plan.units for plan in unit.groups}
        if group not in groups:
            pipeline = self.prepared.plan.pipeline
            raise ConfigurationError(f"{group!r} is not a process group of {pipeline}: {', '.join(groups)}")
        return groups[group]


def _is_prefill(unit: UnitPlan, group: GroupPlan) -> bool:
    """Whether requests do without the group: decode computes their prompts then."""
    return all(stage.kv_role == "prefill" for stage in unit.stages if stage.name in group.stages)
