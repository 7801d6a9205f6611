"""An engine between a real inbox and an outbox in memory, on a thread as a stage has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from stage_runtime.engines import events
from stage_runtime.engines.base import Engine, Gate, Inbox, Work
from stage_runtime.errors import RequestError
from stage_runtime.wire.values import Chunk, OmniRequest, RequestKind, StagePayload
from tests.patience import patience

PATIENCE_S = patience(100.0)  # how long a test waits before it fails, on a machine that others use


class OneWork:
    """`engines.base.Work`."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.attempt = 1
        self.bindings: dict[str, str] = {}
        self.cancelled = False
        self.over = False
        self.at_engine = False
        self.left_depth: int | None = None


class Opening:
    """`engines.base.InboxItem` of something that is open already, or cannot be opened."""

    def __init__(self, work: OneWork, event: Any) -> None:
        self.work = work
        self.event = event
        self.discarded = False

    def open(self) -> Any:
        if isinstance(self.event, BaseException):
            raise self.event
        return self.event

    def discard(self) -> None:
        self.discarded = True


class Recorder:
    """`engines.base.Outbox`: what an engine said, in order. A chunk is given one of ``gates``, if any is left."""

    def __init__(self) -> None:
        self.outputs: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self.gates: list[Gate] = []
        self.taken: list[tuple[str, str]] = []  #: (request, source) of every chunk consumed
        self.began_ids: list[str] = []
        self.crashes: list[BaseException] = []
        self.refuses: Exception | None = None
        self.together_counts: list[int] = []  #: Counts of outputs that left together, while nobody took any.

    def emit(self, work: Work, chunk: Any) -> Gate | None:
        if self.refuses is not None:
            raise self.refuses
        self.outputs.put((work.request_id, "chunk", chunk.data))
        return self.gates.pop(0) if self.gates else None

    def done(self, work: Work, data: Any, *, has_data: bool = True) -> None:
        assert isinstance(work, OneWork)
        if not work.over:
            work.over = True
            self.outputs.put((work.request_id, "done", data) if has_data else (work.request_id, "done"))

    def fail(self, work: Work, error: BaseException, *, hook: str = "run") -> None:
        assert isinstance(work, OneWork)
        if not work.over:
            work.over = True
            self.outputs.put((work.request_id, "failed", f"{type(error).__name__}: {error}"))

    @contextmanager
    def together(self) -> Iterator[None]:
        before = self.outputs.qsize()
        yield
        self.together_counts.append(self.outputs.qsize() - before)

    def letting_go(self) -> None: ...

    def settle(self) -> None: ...

    def began(self, work: Work) -> None:
        self.began_ids.append(work.request_id)

    def consumed(self, work: Work, source: str, count: int) -> int:
        self.taken += [(work.request_id, source)] * count
        return count

    def turn_away(self, work: Work, error: RequestError) -> None:
        self.fail(work, error)

    def crashed(self, error: BaseException) -> None:
        self.crashes.append(error)

    def next(self) -> tuple[Any, ...]:
        return self.outputs.get(timeout=PATIENCE_S)

    def several(self, count: int) -> list[tuple[Any, ...]]:
        return [self.next() for _ in range(count)]


class Rig:
    """One engine at work."""

    def __init__(self, engine: Engine) -> None:
        self.outbox = Recorder()
        self.inbox = Inbox(self.unreadable)
        self.stop = Event()
        self.crash: BaseException | None = None
        self.works: dict[str, OneWork] = {}
        self.thread = Thread(target=self._run, args=(engine,), daemon=True)

    def _run(self, engine: Engine) -> None:
        try:
            engine.run(self.inbox, self.outbox, self.stop)
        except BaseException as error:
            self.crash = error

    def work(self, request_id: str) -> OneWork:
        return self.works.setdefault(request_id, OneWork(request_id))

    def start(self, request_id: str, data: Any = None, *, kind: RequestKind = "pipeline") -> Opening:
        payload = StagePayload(request=OmniRequest(id=request_id, kind=kind), data=data)
        work = self.work(request_id)
        return self._put(Opening(work, events.Start(request_id, payload, work)))

    def ask(self, request: OmniRequest) -> Opening:
        work = self.work(request.id)
        return self._put(Opening(work, events.Start(request.id, StagePayload(request=request), work)))

    def chunk(self, request_id: str, data: Any, source: str = "a", index: int = 0) -> Opening:
        work = self.work(request_id)
        chunk = Chunk(data, source=source, index=index, request=OmniRequest(id=request_id))
        return self._put(Opening(work, events.ChunkIn(request_id, chunk, work)))

    def done(self, request_id: str, source: str = "a") -> None:
        self.inbox.put(events.StreamDone(request_id, source, self.work(request_id)))

    def failed(self, request_id: str, source: str, error: str) -> None:
        self.inbox.put(events.StreamFailed(request_id, source, error, self.work(request_id)))

    def broken(self, request_id: str, error: BaseException) -> Opening:
        return self._put(Opening(self.work(request_id), error))

    def abort(self, request_id: str) -> None:
        """Abort as `stage.inputs.stage_input` does."""
        work = self.work(request_id)
        work.cancelled = work.over = True
        self.inbox.abort(work)

    def unreadable(self, work: Work, error: BaseException) -> None:
        self.outbox.fail(work, error)
        self.abort(work.request_id)

    def close(self) -> None:
        self.stop.set()
        self.inbox.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the engine does not end"

    def _put(self, arrival: Opening) -> Opening:
        self.inbox.put(arrival)
        return arrival


@contextmanager
def running(engine: Engine) -> Iterator[Rig]:
    """Run ``engine`` on a thread; at the end it must stop when its inbox closes, and not have crashed."""
    rig = Rig(engine)
    rig.thread.start()
    try:
        yield rig
    finally:
        rig.close()
    if rig.crash is not None:
        raise rig.crash


def gate() -> Gate:
    return Gate()
