"""One stage of this process: its plan, hooks, engine, inbox and outbox, and the thread that they run on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from threading import Event, Thread

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines.base import Engine, Inbox, Work
from stage_runtime.engines.custom import EngineCrashed
from stage_runtime.engines.simple import SyncEngine
from stage_runtime.engines.threads import stage_threads
from stage_runtime.errors import describe
from stage_runtime.profiler.recording.recorder import set_active_stage
from stage_runtime.stage import forks
from stage_runtime.stage.hooks import Hooks
from stage_runtime.stage.inputs.stage_input import InputOutcomes, StageInput
from stage_runtime.stage.observing import recorded
from stage_runtime.stage.observing.stalling import Stalling
from stage_runtime.stage.outputs.stage_output import StageOutput
from stage_runtime.stage.process_context import ProcessContext
from stage_runtime.stage.ranks import tensor_parallel
from stage_runtime.stage.ranks.tensor_parallel import Leader, LeaderInbox
from stage_runtime.stage.work import RequestWork
from stage_runtime.wire.messages import InputComplete

log = logging.getLogger(__name__)


class Stage:
    """Made on the I/O thread; its engine is loaded and run on the stage's own scheduler thread."""

    def __init__(
        self,
        plan: StagePlan,
        process: ProcessContext,
        *,
        crashed: Callable[[str, BaseException], None],
        loop: asyncio.AbstractEventLoop,
        leader: Leader | None = None,
    ) -> None:
        """leader: the followers' end, of a TP stage's rank 0."""
        self.plan = plan
        self.hooks = Hooks(plan)
        self.stop = Event()
        leaves = recorded.leaving(plan)
        self.inbox = (
            Inbox(self._unreadable, leaves)
            if leader is None
            else LeaderInbox(self._unreadable, leader.broadcast, leaves)
        )
        self.input = StageInput(
            plan,
            self.hooks,
            self.inbox,
            InputOutcomes(
                fail=self._fail,
                crashed=self._crash,
                skipped=lambda work: self.output.skip(work),
                unwanted=lambda header, source: self.output.refuse(header, source),
                reject=lambda header, error: self.output.reject(header, error),
                complete=lambda work: process.send(work.owner, InputComplete(work.request_id, work.attempt, plan.name)),
            ),
        )
        self.output = StageOutput(plan, self.hooks, process, self.input.forget, self._crash, self._fail)
        self._stalling = Stalling(
            self.inbox.parking,
            workers=lambda: self.input.engine.concurrency if self.input.engine is not None else 1,
            works=self.input.works,
            others=lambda: any(self._queued(work) for work in self.input.works()),
            notify=self.output.stalled,
            loop=loop,
        )
        self._crashed = crashed
        self._thread: Thread | None = None

    def start(self, load: Callable[[StagePlan], Engine], loaded: Callable[[str, BaseException | None], None]) -> None:
        """Load the engine and run it. ``loaded`` is called, on the scheduler thread, with the result."""
        self._thread = stage_threads.start(self.plan.name, self._run, load, loaded, crashed=self._crash)

    def close(self, timeout_s: float) -> bool:
        """Let the engine finish what waits, and end. False when it did not within ``timeout_s``."""
        self.stop.set()
        self.inbox.close()
        self.input.close()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def steps(self) -> int:
        """Grows with all that the engine asks for, takes or gives, and while its event loop turns."""
        engine = self.input.engine
        return self.inbox.polls + self.inbox.taken + self.output.given + (engine.ticks if engine is not None else 0)

    @property
    def busy(self) -> bool:
        """It has work at hand. A message that waits at a join waits for others."""
        return len(self.inbox) > 0 or self.running > 0

    @property
    def computing(self) -> bool:
        """It has work that can proceed: it waits neither for a reader of its streams nor for an input."""
        engine, parking = self.input.engine, self.inbox.parking
        if engine is None or parking.all >= engine.concurrency:
            return False
        return len(self.inbox) > 0 or self.running > parking.at_gates

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(1 for work in self.input.works() if work.began_at is None)

    @property
    def running(self) -> int:
        """Requests that are being computed."""
        return sum(1 for work in self.input.works() if work.began_at is not None)

    @property
    def places(self) -> int:
        """Requests that it computes at once; 0: its engine does not say."""
        return self.input.engine.places if self.input.engine is not None else 0

    def busy_share(self) -> float:
        """The share of the time since the last call that it computed at least one request."""
        return self.input.busy.share()

    def _queued(self, work: RequestWork) -> bool:
        """It could begin, if a worker were free."""
        here = work.has_payload or bool(self.plan.stream_from and work.queued_at)
        return here and work.began_at is None and not work.dead

    def _run(self, load: Callable[[StagePlan], Engine], loaded: Callable[[str, BaseException | None], None]) -> None:
        set_active_stage(self.plan.name)
        forks.watch()
        try:
            engine = load(self.plan)
            if self.plan.tp_size > 1:
                tensor_parallel.couple(engine, self.plan.name)
        except BaseException as error:
            if forks.in_child:
                forks.end(self.plan.name, error)
            loaded(self.plan.name, error)
            return
        if forks.in_child:
            forks.end(self.plan.name, None)
        self.input.engine = engine
        self.inbox.begins_at_once = isinstance(engine, SyncEngine)
        loaded(self.plan.name, None)
        engine.run(self.inbox, self.output, self.stop)
        if not self.stop.is_set() and not self.inbox.closed:
            raise EngineCrashed("the engine's loop ended before it was asked to stop")

    def _crash(self, error: BaseException) -> None:
        """A thread of the stage ends by an error, so all requests of the stage fail. That thread calls it."""
        for work in self.input.works():
            self.output.fail(work, RuntimeError(f"scheduler crashed: {describe(error)}"))
        self._crashed(self.plan.name, error)

    def _unreadable(self, work: Work, error: BaseException) -> None:
        assert isinstance(work, RequestWork)
        self._fail(work, error, "receive")

    def _fail(self, work: RequestWork, error: BaseException, hook: str) -> None:
        """The request failed outside of the engine, which may still wait for a chunk of it: the engine drops it."""
        self.output.fail(work, error, hook=hook)
        work.abort()
        self.inbox.abort(work)
