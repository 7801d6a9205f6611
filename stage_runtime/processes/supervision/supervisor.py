"""Keeps a set of instances running: PID 1 of a stage pod and `omni up` both stand on this.

Here: adding and draining instances, waiting for some or all of them, and what failed of them. Not here: one instance's
life (`instances`), where anybody reads about it (`pod`, `local`). Called by those two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from stage_runtime.processes.supervision.instances import InstanceSpec, ProcessView, RestartPolicy, SupervisedInstance
from stage_runtime.processes.supervision.startup_failures import StartupFailed

OnProcessChange = Callable[[ProcessView], None]
Printer = Callable[[str, str], None]  # process, line


class Supervisor:
    """Owns the instances and their tasks. Use it in one event loop, and `close` it."""

    def __init__(self, *, on_change: OnProcessChange, on_line: Printer) -> None:
        self._on_change, self._on_line = on_change, on_line
        self._instances: dict[str, SupervisedInstance] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._shown: dict[str, ProcessView] = {}
        self._changed = asyncio.Event()
        #: Instance -> why it ended for good, first failure first. Forgotten with the instance.
        self._failures: dict[str, StartupFailed] = {}
        self._all_stopping = False  #: `ask_all_to_stop` was called.

    @property
    def failure(self) -> StartupFailed | None:
        """The first failure among the instances; the caller decides what follows."""
        return next(iter(self._failures.values()), None)

    def add(self, spec: InstanceSpec, policy: RestartPolicy) -> SupervisedInstance:
        """Start an instance and keep it alive; until it is settled its first death is its failure."""
        instance = SupervisedInstance(spec, policy, on_change=self._see, on_line=self._on_line)
        self._instances[spec.name] = instance
        task = asyncio.create_task(instance.run(), name=f"instance {spec.name}")
        self._tasks[spec.name] = task
        task.add_done_callback(lambda done: self._over(spec.name, done))
        return instance

    def instances(self, group: str | None = None) -> list[SupervisedInstance]:
        """Those that are there now, of one group or all."""
        return [one for one in self._instances.values() if group is None or one.spec.group == group]

    def views(self) -> list[ProcessView]:
        """Every process there is, in the order of starting. Any thread may call it: that of a live table does."""
        return [view for instance in list(self._instances.values()) for view in instance.views()]

    async def started(self) -> None:
        """Wait until every instance that is there is ready.

        Raises: StartupFailed: one never will be.
        """
        await self.until(lambda: all(instance.ready for instance in self._instances.values()))

    async def ready(self, names: Collection[str]) -> None:
        """Wait until these instances are ready, whatever becomes of others.

        Raises: StartupFailed: one of these never will be; it failed, or was stopped.
        """
        while True:
            instances = []
            for name in names:
                if name in self._failures:
                    raise self._failures[name]
                instance = self._instances.get(name)
                if instance is None or instance.stopping:
                    raise StartupFailed(name, "was stopped before it was ready")
                instances.append(instance)
            if all(instance.ready for instance in instances):
                return
            self._changed.clear()
            await self._changed.wait()

    def settle(self, names: Collection[str] | None = None) -> None:
        """Forgive deaths from now on, of these instances or of all that are there."""
        for name in self._instances if names is None else names:
            self._instances[name].fragile = False

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something about the instances is so.

        Raises: StartupFailed: an instance failed meanwhile, or had before.
        """
        while not holds():
            if self.failure is not None:
                raise self.failure
            self._changed.clear()
            await self._changed.wait()

    async def stop(self, name: str) -> None:
        """Drain one instance, and wait until it and its failure, if it has one, are gone."""
        task = self._tasks[name]
        self._instances[name].stop()
        await asyncio.wait([task])
        self._forget(name)

    async def take_back(self, name: str) -> None:
        """The same as `stop`, but an instance that never was ready has nothing to finish, and ends at once."""
        if not self._instances[name].was_ready:
            self._instances[name].cut()
        await self.stop(name)

    def ask_all_to_stop(self) -> None:
        """Begin draining everything; called again: cut that short. An instance that drains already goes on with it."""
        again, self._all_stopping = self._all_stopping, True
        for instance in list(self._instances.values()):
            if again:
                instance.cut()
            else:
                instance.stop()

    async def gone(self) -> None:
        """Wait until no instance is left."""
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def close(self) -> None:
        """End everything now. Nothing runs afterwards."""
        for task in self._tasks.values():
            task.cancel()
        await self.gone()

    def _forget(self, name: str) -> None:
        instance = self._instances.pop(name, None)
        self._tasks.pop(name, None)
        self._failures.pop(name, None)
        for process in instance.spec.processes if instance is not None else ():
            self._shown.pop(process, None)

    def _see(self, instance: SupervisedInstance) -> None:
        self._changed.set()
        for view in instance.views():
            if self._shown.get(view.process) != view:
                self._shown[view.process] = view
                self._on_change(view)

    def _over(self, name: str, task: asyncio.Task[None]) -> None:
        self._changed.set()
        if task.cancelled():
            return
        match task.exception():
            case None:
                pass
            case StartupFailed() as failure:
                self._failures[name] = failure
            case error:
                process = self._instances[name].spec.processes[0]
                failure = StartupFailed(process, f"could not be started: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._failures[name] = failure
