"""One instance of a process group, or the coordinator: started, watched, started again, drained.

Here: one life after another of its processes (of a TP stage: all its ranks, which live and die together), and what
ends them. Not here: several instances (`supervisor`), a single operating-system process (`children`). Called by
`supervisor`.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from stage_runtime.processes.supervision import startup_failures, statuspipe
from stage_runtime.processes.supervision.children import Child, Command
from stage_runtime.processes.supervision.progress import LoadedShare, ProgressWatch
from stage_runtime.processes.supervision.startup_failures import StartupFailed
from stage_runtime.rules.flow import ticks

WATCH_S = 1.0  # between two looks at a process that loads
STEADY_S = 10.0  # a life of this length as ready forgets the deaths before it
CUT_S = 2.0  # what a process may still do after a second SIGTERM
STACKS_S = 10.0  # for printing the stacks of a process that hangs, before it is killed; mostly below 1 s
EXIT_S = 15.0  # it lets go of its sockets and threads, which takes it a few seconds at most
RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 5.0)  # the first is within the promised second, with room to spare

ProcessState = Literal[
    "starting", "loading", "registering", "ready", "draining", "ending", "restarting", "stopped", "failed"
]


class ProcessView(msgspec.Struct, frozen=True, kw_only=True):
    """The view of one process for people."""

    process: str
    instance: str
    stages: tuple[str, ...]
    state: ProcessState
    message: str = ""
    pid: int | None = None
    restarts: int = 0
    gauges: dict[str, float] = {}  #: Gauges of its planes (`metrics.planes`).
    share: LoadedShare | None = None  #: The share of what ``message`` is about, while it loads.

    @property
    def detail(self) -> str:
        """The message, with the share in words."""
        return self.message if self.share is None else f"{self.message} {self.share}"


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long things may take."""

    startup_s: float  #: Seconds without progress, not of wall time.
    grace_s: float  #: Seconds from SIGTERM to SIGKILL.
    exit_s: float = EXIT_S  #: Seconds from the report of a failure to SIGKILL.
    give_up_after: int | None = None  #: Deaths before ready, in a row, of one that had been ready. None: never.


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An instance to keep running. ``commands`` is called for each life: addresses may be fresh ones."""

    name: str
    group: str
    replica: int
    stages: tuple[str, ...]
    processes: tuple[str, ...]
    commands: Callable[[], Sequence[Command]]


class SupervisedInstance:
    """Keeps one instance alive until it is stopped."""

    def __init__(
        self,
        spec: InstanceSpec,
        policy: RestartPolicy,
        *,
        on_change: Callable[[SupervisedInstance], None],
        on_line: Callable[[str, str], None],
    ) -> None:
        self.spec = spec
        self.policy = policy
        self.children: tuple[Child, ...] = ()
        self.restarts = 0
        self.was_ready = False  #: It was ready in any of its lives.
        self.fragile = True  #: No death is forgiven until what it was started for is done (`Supervisor.settle`).
        self._resting: str | None = None  #: Why nothing runs now.
        self._death: StartupFailed | None = None  #: The error that ended the latest life.
        self._end: ProcessState | None = None
        self._on_change, self._on_line = on_change, on_line
        self._stopping = asyncio.Event()
        self._cut = asyncio.Event()

    @property
    def ready(self) -> bool:
        """All its processes are, and none is on its way out."""
        children = self.children
        return bool(children) and not self._stopping.is_set() and all(c.ready and not c.exited.done() for c in children)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Let it drain."""
        self._stopping.set()
        self._on_change(self)

    def cut(self) -> None:
        """Let it end at once, whether or not it drains already."""
        self._cut.set()
        self.stop()

    async def run(self) -> None:
        """Run until stopped.

        Raises: StartupFailed: it ended before it was ready, and is not started again.
        """
        # Deaths since the last long life, oldest first: whether it had been ready.
        deaths: deque[bool] = deque(maxlen=64)
        try:
            while not self._stopping.is_set():
                ready_for_s = await self._live()
                if self._stopping.is_set():
                    break
                if ready_for_s >= STEADY_S:
                    deaths.clear()
                deaths.append(ready_for_s > 0)
                self._forgive(deaths)
                await self._rest(RESTART_DELAYS_S[min(len(deaths), len(RESTART_DELAYS_S)) - 1])
                self.restarts += 1
            self._finish("stopped")
        except asyncio.CancelledError:
            self._finish("stopped")
            raise
        except BaseException:
            self._finish("failed")
            raise

    def views(self) -> list[ProcessView]:
        """One per process, for people."""
        alive = {child.command.name: child for child in self.children if not child.exited.done()}
        return [self._view(name, alive.get(name)) for name in self.spec.processes]

    def _view(self, name: str, child: Child | None) -> ProcessView:
        state, message = self._state(child)
        return ProcessView(
            process=name,
            instance=self.spec.name,
            stages=self.spec.stages,
            state=state,
            message=message,
            pid=None if child is None else child.pid,
            restarts=self.restarts,
            gauges={} if child is None else child.gauges,
            share=_share(child) if state == "loading" else None,
        )

    def _state(self, child: Child | None) -> tuple[ProcessState, str]:
        if self._end is not None:
            return self._end, self._resting or ""
        if child is None:
            return ("draining", "") if self._stopping.is_set() else ("restarting", self._resting or "")
        if self._stopping.is_set():
            return "draining", ""
        if child.failure is not None:
            return "ending", ""
        if child.ready:
            return "ready", next((event.url for event in child.events if isinstance(event, statuspipe.Serving)), "")
        # A process registers while it loads, and may be taken before it has loaded.
        phases = (
            event for event in reversed(child.events) if isinstance(event, statuspipe.Loading | statuspipe.Loaded)
        )
        match next(phases, None):
            case statuspipe.Loading(stage=stage, message=text):
                return "loading", f"{stage}: {text}" if text else stage
            case statuspipe.Loaded():
                return "registering", ""
            case _:
                return "starting", ""

    async def _live(self) -> float:
        """One life, from start to the last process's end; for how many seconds it was ready."""
        self._resting = self._death = None
        ready_since: float | None = None
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            self._start_children()
            watch = ProgressWatch(self.children, time.monotonic())
            while True:
                ends: list[asyncio.Future[Any]] = [*(child.exited for child in self.children), stopping]
                look_s = ticks.next_s(time.time(), WATCH_S)  # all instances in one wake-up
                await asyncio.wait(ends, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
                now = time.monotonic()
                if ready_since is None and all(child.was_ready for child in self.children):
                    ready_since, self.was_ready = now, True
                if stopping.done():
                    await self._drain()
                    break
                if any(child.exited.done() for child in self.children):
                    # The one of several whose siblings were killed for it.
                    self._death = startup_failures.failure_of(
                        startup_failures.to_blame([child for child in self.children if child.exited.done()])
                    )
                    break
                self._death = self._not_exiting(now)
                if self._death is not None:
                    break
                if ready_since is None:
                    self._death = await self._without_progress(watch, now)
                    if self._death is not None:
                        break
        except (OSError, subprocess.SubprocessError) as error:
            problem = f"could not be started: {type(error).__name__}: {error}"
            self._death = StartupFailed(self.spec.processes[0], problem)
            self._death.__cause__ = error
        finally:
            stopping.cancel()
            await self._kill()
        return 0.0 if ready_since is None else max(time.monotonic() - ready_since, 1e-3)

    def _start_children(self) -> None:
        started: list[Child] = []
        try:
            for command in self.spec.commands():
                started.append(Child(command, on_event=self._on_event, on_line=self._on_line))
        finally:
            self.children = tuple(started)
        self._on_change(self)

    def _on_event(self, child: Child) -> None:
        if not self.was_ready and all(other.ready for other in self.children):
            self.was_ready = True
        self._on_change(self)

    def _not_exiting(self, now: float) -> StartupFailed | None:
        """The failure that a process reported a while ago, though it still runs."""
        late = (child for child in self.children if now - child.failed_at >= self.policy.exit_s)
        return next(map(startup_failures.failure_of, late), None)

    async def _without_progress(self, watch: ProgressWatch, now: float) -> StartupFailed | None:
        """The failure of a process that has done nothing for too long while it loads; it is ended."""
        idle = watch.idlest(now)
        if idle is None or idle[1] < self.policy.startup_s:
            return None
        child, idle_s = idle
        detail = self._state(child)[1]
        child.signal(signal.SIGABRT)  # faulthandler prints every thread's stack: where it hangs
        await asyncio.wait([child.exited], timeout=STACKS_S)
        return StartupFailed(
            child.command.name,
            f"no progress for {idle_s:.0f} s while starting{f' ({detail})' if detail else ''}: no output, "
            "no processor time, no input or output",
            tail=child.tail,
            hung=True,
        )

    def _forgive(self, deaths: Sequence[bool]) -> None:
        """Decide whether the death just seen is one to recover from.

        Raises: StartupFailed: it is not.
        """
        assert self._death is not None
        in_a_row = next((n for n, had_been_ready in enumerate(reversed(deaths)) if had_been_ready), len(deaths))
        limit = self.policy.give_up_after
        if not self.was_ready or self.fragile or (limit is not None and in_a_row >= limit):
            raise self._death
        self._resting = self._death.problem

    async def _rest(self, delay_s: float) -> None:
        self._on_change(self)
        if delay_s:
            await asyncio.wait([waiter := asyncio.ensure_future(self._stopping.wait())], timeout=delay_s)
            waiter.cancel()

    async def _drain(self) -> None:
        """SIGTERM, then wait: rank 0 first, for the other ranks serve what is bound to it."""
        first, *others = self.children
        await self._ask_to_end([first], self.policy.grace_s)
        if others:
            await self._ask_to_end(others, CUT_S)

    async def _ask_to_end(self, children: Sequence[Child], grace_s: float) -> None:
        fates = [child.exited for child in children]
        for child in children:
            child.signal(signal.SIGTERM)
        cut = asyncio.ensure_future(self._cut.wait())
        gone = asyncio.gather(*fates)
        ends: list[asyncio.Future[Any]] = [gone, cut]
        await asyncio.wait(ends, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if cut.done() and not gone.done():
            for child in children:
                child.signal(signal.SIGTERM)
            await asyncio.wait([gone], timeout=CUT_S)
        cut.cancel()

    async def _kill(self) -> None:
        for child in self.children:
            child.kill()
        if self.children:
            await asyncio.shield(asyncio.gather(*(child.exited for child in self.children)))

    def _finish(self, state: ProcessState) -> None:
        self._end = state
        self._on_change(self)


def _share(child: Child | None) -> LoadedShare | None:
    """The share in the newest event of a process that loads."""
    newest = child.events[-1] if child is not None and child.events else None
    if not isinstance(newest, statuspipe.Loading) or not (newest.done > 0 or newest.total > 0):
        return None
    return LoadedShare(newest.done, newest.total, newest.unit)
