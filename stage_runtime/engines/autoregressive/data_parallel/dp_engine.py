"""An engine among several of one instance: it reports its counts; in lockstep, it steps while any of them has work.

Lockstep is for models whose ranks meet in every step (experts spread over ranks). Engines without it are independent.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Protocol

from stage_runtime.engines.autoregressive.core.busy_loop import BusyLoop, ShutdownState
from stage_runtime.engines.autoregressive.core.serving import Served
from stage_runtime.engines.autoregressive.process.engine_messages import (
    COORDINATOR,
    Coordination,
    EngineCoreOutputs,
    Init,
    StartWave,
)
from stage_runtime.engines.autoregressive.process.proc import EngineCoreProc

MEET_EVERY: Final = 32  # steps between two all-reduces of whether anything is left; vLLM's number
MEET_WITHIN: Final = timedelta(minutes=10)  # a rank's longest step


class RankGroup(Protocol):
    """The ranks of a lockstep."""

    def any(self, value: bool) -> bool:
        """Whether it is true on any rank. Waits for all of them. Raises: RuntimeError: one is gone."""


class GlooGroup:
    """Ranks on one machine, over loopback."""

    def __init__(self, coordination: Coordination, rank: int) -> None:
        import torch
        from torch import distributed as untyped

        distributed: Any = untyped

        self._torch: Any = torch
        made = distributed.ProcessGroupGloo
        options = made._Options()
        options._timeout = MEET_WITHIN
        options._devices = [made.create_device(hostname="127.0.0.1")]
        store = distributed.FileStore(coordination.rendezvous, coordination.size)
        self._group = made(store, rank, coordination.size, options)

    def any(self, value: bool) -> bool:
        flag = self._torch.tensor([int(value)], dtype=self._torch.int32)
        options = self._torch.distributed.AllreduceOptions()
        options.reduceOp = self._torch.distributed.ReduceOp.MAX
        self._group.allreduce([flag], options).wait()
        return bool(flag.item())


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

    def _counting(self, kind: type[CountingLoop]) -> CountingLoop:
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

    def _process_input_queue(self) -> None:
        while not self.engines_running and not self._core.has_work() and self._waits():
            for callback in self._on_idle:
                callback()
            self._core.drain_aborts()
            self._handle(self._inputs.get(block=True))
        while (item := self._inputs.get(block=False)) is not None:
            self._handle(item)

    def _handle_shutdown(self) -> bool:
        """Whether the loop goes on. It does during a wave: the other ranks wait for this one in their next step."""
        if self.engines_running and self.shutdown_state is ShutdownState.REQUESTED:
            if not self._drain:
                self._core.abort_requests([request.id for request in self._core.scheduler])
            return True
        return super()._handle_shutdown()


class DPEngineCoreProc(DataParallelProc):
    """An engine in lockstep with others."""

    loop: WaveLoop

    def __init__(self, served: Served, init: Init, *, engine_index: int = 0, group: RankGroup | None = None) -> None:
        assert init.coordination is not None
        self._served = served
        self._steps = 0  #: Of this wave.
        self._group = group or GlooGroup(init.coordination, engine_index)
        super().__init__(served, init, engine_index=engine_index)
        self.inputs.on_start_wave = self._on_start_wave
        self.inputs.on_wave = self._on_wave

    def _make_loop(self) -> BusyLoop:
        loop = self._counting(WaveLoop)
        loop.after_step = self._after_step
        return loop

    def _on_wave(self, wave: int) -> None:
        """A request has come that was sent in this wave."""
        if wave > self.current_wave:
            self.current_wave = wave
        elif wave < self.current_wave and not self.loop.engines_running:
            # Its client takes the old wave for running, so it has not started the other engines.
            self.outputs.put(COORDINATOR, EngineCoreOutputs(start_wave=self.current_wave))

    def _on_start_wave(self, start: StartWave) -> None:
        if start.exclude != self.engine_index and start.wave >= self.current_wave:
            self.current_wave = start.wave
            self.loop.engines_running = True

    def _after_step(self, executed: bool) -> None:
        self.report()
        # Requests that wait for rows count: who resumes them would step alone.
        unfinished = self._core.has_work() or self._core.scheduler.has_unfinished_requests()
        if not executed:
            if not unfinished and not self.loop.engines_running:
                return
            self._served.dummy_batch()
        self._steps += 1
        self.loop.engines_running = self._steps % MEET_EVERY != 0 or self._group.any(unfinished)
        if not self.loop.engines_running:
            if self.engine_index == 0:
                self.outputs.put(COORDINATOR, EngineCoreOutputs(wave_complete=self.current_wave))
            self.current_wave += 1
            self._steps = 0
