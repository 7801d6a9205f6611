"""Keeps a set of instances running: PID 1 of a stage pod and `omni up` both stand on this.

Here: adding, replacing and draining instances, and the first start-up failure among them. Not here: one instance's
life (`instances`), where anybody reads about it (`pod`, `local`). Called by those two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stage_runtime.processes.instances import Instance, InstanceSpec, Patience, ProcessView, StartupFailed

Watcher = Callable[[ProcessView], None]
Printer = Callable[[str, str], None]  # process, line


class Supervisor:
    """Owns the instances and their tasks. Use it in one event loop, and `close` it."""

    def __init__(self, *, on_change: Watcher, on_line: Printer) -> None:
        self._on_change, self._on_line = on_change, on_line
        self._instances: dict[str, Instance] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._shown: dict[str, ProcessView] = {}
        self._changed = asyncio.Event()
        self._settled = False
        self.failure: StartupFailed | None = None  #: The first one; whoever runs us decides what follows.

    def add(self, spec: InstanceSpec, patience: Patience) -> Instance:
        """Start an instance and keep it alive."""
        instance = Instance(spec, patience, on_change=self._see, on_line=self._on_line)
        # Once everything has started, an instance that is added later stands for itself.
        instance.fragile = not self._settled
        self._instances[spec.name] = instance
        task = asyncio.create_task(instance.run(), name=f"instance {spec.name}")
        self._tasks[spec.name] = task
        task.add_done_callback(lambda done: self._over(spec.name, done))
        return instance

    def instances(self, group: str | None = None) -> list[Instance]:
        """Those that are there now, of one group or all."""
        return [one for one in self._instances.values() if group is None or one.spec.group == group]

    def views(self) -> list[ProcessView]:
        """Every process there is, in the order of starting."""
        return [view for instance in self._instances.values() for view in instance.views()]

    async def started(self) -> None:
        """Wait until every instance that is there is ready.

        Raises: StartupFailed: one never will be.
        """
        await self.until(lambda: all(instance.ready for instance in self._instances.values()))

    def settle(self) -> None:
        """Forgive deaths from now on."""
        self._settled = True
        for instance in self._instances.values():
            instance.fragile = False

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
        """Drain one instance, and wait until it is gone."""
        task = self._tasks[name]
        self._instances[name].stop()
        await asyncio.wait([task])
        self._forget(name)

    def ask_all_to_stop(self) -> None:
        """Begin draining everything; called again: cut that short."""
        for instance in list(self._instances.values()):
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
        for process in instance.spec.processes if instance is not None else ():
            self._shown.pop(process, None)

    def _see(self, instance: Instance) -> None:
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
                self.failure = self.failure or failure
            case error:
                spec = self._instances[name].spec
                problem = f"could not be started: {type(error).__name__}: {error}"
                self.failure = self.failure or StartupFailed(spec.processes[0], problem)
                self.failure.__cause__ = error
