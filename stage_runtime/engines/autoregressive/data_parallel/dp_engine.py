"""An engine among several of one instance: it reports its counts; in lockstep, it steps while any of them has work.

Lockstep is for engines that compute each pass together (experts spread over them). Others are independent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from stage_runtime.engines.autoregressive.core.busy_loop import BusyLoop, ShutdownState
from stage_runtime.engines.autoregressive.core.serving import Served
from stage_runtime.engines.autoregressive.process.messages.engine_messages import (
    COORDINATOR,
    EngineCoreOutputs,
    Init,
    StartWave,
)
from stage_runtime.engines.autoregressive.process.proc import EngineCoreProc

Loop = TypeVar("Loop", bound="CountingLoop")


class CountingLoop(BusyLoop):
    """Calls ``after_step`` after each step, and before it waits."""

    after_step: Callable[[bool], None]

    def post_step(self, executed: bool) -> None:
        self.after_step(executed)


class DataParallelProc(EngineCoreProc):
    """An independent engine that reports its counts to the coordinator."""

    def __init__(self, served: Served, init: Init, *, engine_index: int = 0) -> None:
        self._reported = (0, 0)
        super().__init__(served, init, engine_index=engine_index)

    def _make_loop(self) -> BusyLoop:
        return self._counting(CountingLoop)

    def _counting(self, kind: type[Loop]) -> Loop:
        idle = (self.report,)
        loop = kind(self._core, self.inputs, self.deliver, self._refuse, wake=self.inputs.wake, on_idle=idle)
        loop.after_step = lambda executed: self.report()
        return loop

    def report(self) -> None:
        """Send counts that have changed."""
        scheduler = self._core.scheduler
        counts = (scheduler.waiting, scheduler.running)
        if counts != self._reported:
            self._reported = counts
            self.step_counter += 1
            self.outputs.put(COORDINATOR, EngineCoreOutputs(scheduler_stats=self.stats()))


class WaveLoop(CountingLoop):
    """Steps while ``engines_running``, with or without requests of its own."""

    engines_running = False
    left = False  #: All engines have agreed to end: this one computes nothing more.
    begin: Callable[[], None]  #: Begins a wave: wakes the other engines.

    def _process_input_queue(self) -> None:
        while not self.engines_running and not self._core.has_work() and self._waits():
            for callback in self._on_idle:
                callback()
            self._core.drain_aborts()
            self._handle(self._inputs.get(block=True))
        while (item := self._inputs.get(block=False)) is not None:
            self._handle(item)

    def _process_engine_step(self) -> None:
        if self.left:
            return
        if not self.engines_running and self._core.has_work():
            self.begin()
        super()._process_engine_step()

    def _handle_shutdown(self) -> bool:
        """Whether the loop goes on. It does until all engines wish to end: they meet this one before each pass."""
        if self.shutdown_state is ShutdownState.RUNNING:
            return True
        if not self._drain:
            self._core.abort_requests([request.id for request in self._core.scheduler])
        if self.left:
            self.shutdown_state = ShutdownState.COMPLETED
            return False
        if not self.engines_running:
            self.begin()
        return True


class DPEngineCoreProc(DataParallelProc):
    """An engine in lockstep with others. All meet before each pass (`Lockstep`), so they end a wave at the same
    meeting: the one at which none has work left.
    """

    loop: WaveLoop

    def __init__(self, served: Served, init: Init, *, engine_index: int = 0) -> None:
        assert served.lockstep is not None, "the factory gives engines that compute alone"
        self._ranks = served.lockstep
        self._met = 0  #: Meetings of the steps before.
        self.wave = 0  #: The number of the wave under way, or the next one: the same in all engines.
        super().__init__(served, init, engine_index=engine_index)
        self.inputs.on_start_wave = self._on_start_wave

    def _make_loop(self) -> BusyLoop:
        loop = self._counting(WaveLoop)
        loop.after_step = self._after_step
        loop.begin = self._begin
        return loop

    def _begin(self) -> None:
        self.loop.engines_running = True
        self.outputs.put(COORDINATOR, EngineCoreOutputs(start_wave=self.wave))

    def _on_start_wave(self, start: StartWave) -> None:
        if start.exclude != self.engine_index and start.wave == self.wave:
            self.loop.engines_running = True

    def _after_step(self, executed: bool) -> None:
        self.report()
        if not self.loop.engines_running:
            return
        ending = self.loop.shutdown_state is not ShutdownState.RUNNING
        if self._ranks.meetings == self._met:  # the step has computed nothing
            waiting = ending and self._core.scheduler.has_unfinished_requests()  # held ones: nobody else is woken later
            self._ranks.leaving = ending
            self._ranks.take_part(unfinished=self._core.has_work() or waiting)
        self._met = self._ranks.meetings
        if self._ranks.some_leave and not ending:
            self.request_shutdown()
        if self._ranks.over:
            self.loop.engines_running = False
            self.loop.left = self._ranks.all_leave
            self.wave += 1
