"""`omni.testing`: one stage in the test's own process, without sockets, relays or a coordinator.

The factory is called and its function run by the same engines as in a pipeline, and values are checked as on every
transport, so a tuple in a result fails here as it would there. A stage that writes into what it received, or into what
it gave, fails here too; in a pipeline it is wrong on some placements. Not here: routes, joins, targets of chunks; those
are the pipeline's, which `run_pipeline` and `chat` run as a whole. It is for authors; nothing of ours imports it.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Condition, Event
from typing import Any, Final

import msgspec

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines import events
from stage_runtime.engines.base import Gate, Inbox, Work
from stage_runtime.engines.making import loading
from stage_runtime.engines.making.resolving import resolve
from stage_runtime.engines.streaming import StreamingEngine
from stage_runtime.engines.threads import stage_threads
from stage_runtime.errors import RequestError
from stage_runtime.payloads import encoding, isolating
from stage_runtime.stage.inputs.mutation_check import MutationCheck
from stage_runtime.wire import outputs
from stage_runtime.wire.values import Chunk, OmniRequest, StagePayload, detached

PATIENCE_S: Final = 60.0  # a stage that has not answered by then waits for something that will not come
STAGE: Final = "stage"
SOURCE: Final = "source"
TEST: Final = "the test"

Factory = Callable[..., Any]


def __getattr__(name: str) -> Any:
    """The functions that need the processes of a pipeline, made when they are asked for."""
    if name in ("run_pipeline", "chat", "RunningPipeline", "Answer", "StartupFailed"):
        return getattr(importlib.import_module("stage_runtime.whole_pipelines"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class WroteShared(AssertionError):
    """The stage wrote into tensors or arrays that it had received or given: other stages may share that memory."""


class Emitted(msgspec.Struct):
    """The outputs of the stage for one request."""

    request_id: str
    chunks: list[Chunk] = []  #: Chunks in order, as the next stage would see them.
    error: BaseException | None = None  #: Why the request failed; None: it did not.
    has_result: bool = False  #: False of a generator that yielded no Result.
    given: Any = None

    @property
    def result(self) -> Any:
        """The result's data; None without one. Raises: ``error``, if the request failed."""
        if self.error is not None:
            raise self.error
        return self.given

    @property
    def data(self) -> list[Any]:
        """The data of all chunks. Raises: ``error``, if the request failed."""
        if self.error is not None:
            raise self.error
        return [chunk.data for chunk in self.chunks]


def run_stage(
    factory: Factory | str,
    payloads: Sequence[Any] = (),
    chunks: Sequence[Any] | Mapping[str, Sequence[Any]] = (),
    *,
    patience_s: float = PATIENCE_S,
    **args: Any,
) -> list[Emitted]:
    """Call ``factory(**args)`` and run what it returns, once for every payload. Blocks.

    factory:  the function, or its dotted name as in ``factory:``. It gets ``context`` and the other offered arguments
        if its signature has them.
    payloads: each a `StagePayload`, an `OmniRequest`, or data, for which a request is made (``request-0``, …).
    chunks:   what streams in before the payload, as is usual: of the one request, or by request id; each a `Chunk` or
        its data. Its ``source`` is its own, or ``"source"``; all sources have ended when the payload comes.
    Returns:  one `Emitted` per payload. Its ``error`` is `WroteShared` where the stage wrote into what it shares.
    Raises:   ConfigurationError: the arguments do not fit, or the factory returned nothing runnable. ValueRefused:
        a payload or chunk could not travel. TimeoutError: a request was not through after ``patience_s``. An exception
        of the factory itself passes through.
    """
    given = [_payload(index, one) for index, one in enumerate(payloads)]
    before = _before(given, chunks)
    sources = tuple(dict.fromkeys(chunk.source for some in before for chunk in some))
    name = factory if isinstance(factory, str) else getattr(factory, "__qualname__", repr(factory))
    plan = StagePlan(name=STAGE, group=STAGE, factory=name, factory_args=args, stream_from=sources)
    function = resolve(factory, field="factory") if isinstance(factory, str) else factory
    engine = loading.call(function, plan, _Context())
    if isinstance(engine, StreamingEngine):
        engine.knows_sources = False
    mutation_check = MutationCheck(remembered=sys.maxsize)
    for payload, some in zip(given, before, strict=True):
        mutation_check.took(name, TEST, payload.request.id, payload.data, "payload.data")
        for chunk in some:
            mutation_check.took(name, TEST, payload.request.id, [chunk.data, chunk.metadata], "chunk")
    outbox = _Outbox(name, mutation_check)
    inbox = Inbox(outbox.fail)
    works = [_put(inbox, payload, some, sources) for payload, some in zip(given, before, strict=True)]
    stop = Event()
    outbox.works = works
    thread = stage_threads.start("stage under test", engine.run, inbox, outbox, stop, crashed=outbox.crashed)
    try:
        outbox.wait(works, patience_s)
        return outbox.judged(works)
    finally:
        stop.set()
        inbox.close()
        thread.join(1.0)


class _Work:
    """`engines.base.Work`."""

    cancelled = False

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.attempt = 1
        self.bindings: dict[str, str] = {}
        self.over = self.at_engine = False
        self.left_depth: int | None = None
        self.emitted = Emitted(request_id)


class _Arrival:
    """`engines.base.InboxItem`: nothing to open."""

    def __init__(self, work: _Work, event: events.Start | events.ChunkIn) -> None:
        self.work = work
        self._event = event

    def open(self) -> events.Incoming:
        return self._event

    def discard(self) -> None: ...


class _Outbox:
    """`engines.base.Outbox` in memory."""

    def __init__(self, name: str, mutation_check: MutationCheck) -> None:
        self._name = name
        self._mutation_check = mutation_check
        self._changed = Condition()
        self.works: Sequence[_Work] = ()

    def emit(self, work: Work, chunk: Chunk) -> Gate | None:
        ours = _ours(work)
        if not ours.over:
            outputs.check_chunk(chunk)
            kept = msgspec.structs.replace(
                chunk,
                data=_copied(chunk.data, "chunk.data"),
                metadata=_copied(chunk.metadata, "chunk.metadata"),
                source=STAGE,
                index=len(ours.emitted.chunks),
            )
            ours.emitted.chunks.append(kept)
            given = {"chunk.data": chunk.data, "chunk.metadata": chunk.metadata}
            self._mutation_check.gave(self._name, work.request_id, given)
        return None

    def done(self, work: Work, data: Any, *, has_data: bool = True) -> None:
        ours = _ours(work)
        if ours.over:
            return
        try:
            ours.emitted.given = _copied(data, "result")
            ours.emitted.has_result = has_data
            self._mutation_check.gave(self._name, work.request_id, {"result": data})
        except Exception as error:
            ours.emitted.error = error
        self._end(ours)

    def fail(self, work: Work, error: BaseException, *, hook: str = "run") -> None:
        ours = _ours(work)
        if not ours.over:
            ours.emitted.error = error
            self._end(ours)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def letting_go(self) -> None: ...

    def settle(self) -> None: ...

    def began(self, work: Work) -> None:
        self._mutation_check.began(self._name)

    def consumed(self, work: Work, source: str, count: int) -> int:
        return count

    def turn_away(self, work: Work, error: RequestError) -> None:
        self.fail(work, error)

    def crashed(self, error: BaseException) -> None:
        for work in self.works:
            self.fail(work, error)

    def wait(self, works: Sequence[_Work], patience_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: all(work.over for work in works), patience_s):
                late = ", ".join(work.request_id for work in works if not work.over)
                raise TimeoutError(f"the stage has not finished {late} after {patience_s:g} s")

    def judged(self, works: Sequence[_Work]) -> list[Emitted]:
        """The stage's outputs, once all of them are there; a request whose memory was written into has failed."""
        self._mutation_check.began(self._name)
        by_request = {work.request_id: work.emitted for work in works}
        for violation in self._mutation_check.violations:
            emitted = by_request[violation.request]
            emitted.error = emitted.error or WroteShared(str(violation))
        return [work.emitted for work in works]

    def _end(self, work: _Work) -> None:
        self._mutation_check.ended(self._name, work.request_id)
        with self._changed:
            work.over = True
            self._changed.notify_all()


class _Context:
    """`api.StageContext` on the CPU, alone."""

    name = STAGE
    terminal = False
    device = "cpu"
    model_path: str | None = None
    model_revision: str | None = None
    rendezvous: str | None = None
    tp_rank = 0
    tp_size = 1
    kv_role = ""
    kv: Any = None
    logger = logging.getLogger("stage.test")

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        import torch

        return torch.empty(shape, dtype=dtype, device="cpu")

    def emit(self, event: str, request_id: str, /, **metadata: Any) -> None: ...

    def progress(self, message: str, done: float = 0, total: float = 0, unit: str = "") -> None:
        self.logger.info("%s", message)


def _copied(value: Any, where: str) -> Any:
    """Checked as on every edge, and of its own memory: as it is now."""
    return isolating.isolate(detached(isolating.isolate(value, where=where)))


def _payload(index: int, given: Any) -> StagePayload:
    match given:
        case StagePayload():
            request, data = encoding.reissued(given.request), given.data
        case OmniRequest():
            request, data = encoding.reissued(given), given.inputs
        case _:
            request, data = OmniRequest(id=f"request-{index}", inputs=given), given
    return StagePayload(request=request, data=_copied(data, "payload.data"))


def _before(given: Sequence[StagePayload], chunks: Sequence[Any] | Mapping[str, Sequence[Any]]) -> list[list[Chunk]]:
    """The chunks that come before each payload."""
    ids = [payload.request.id for payload in given]
    if isinstance(chunks, Mapping):
        by_request = chunks
    elif chunks and len(ids) != 1:
        raise ValueError(f"chunks of {len(ids)} requests: give them by request id, {{{(ids or ['id'])[0]!r}: [...]}}")
    else:
        by_request = dict.fromkeys(ids, chunks)
    unknown = sorted(set(by_request) - set(ids))
    if unknown:
        raise ValueError(f"chunks of {', '.join(unknown)}, without a payload; there are {', '.join(ids)}")
    return [_chunks(by_request.get(payload.request.id, ()), payload.request) for payload in given]


def _chunks(given: Sequence[Any], request: OmniRequest) -> list[Chunk]:
    counts: Counter[str] = Counter()
    made = []
    for one in given:
        chunk = one if isinstance(one, Chunk) else Chunk(one)
        source = chunk.source or SOURCE
        data = _copied(chunk.data, "chunk.data")
        metadata = _copied(chunk.metadata, "chunk.metadata")
        made.append(Chunk(data, None, chunk.modality, metadata, source, counts[source], request))
        counts[source] += 1
    return made


def _put(inbox: Inbox, payload: StagePayload, chunks: Sequence[Chunk], sources: Sequence[str]) -> _Work:
    work = _Work(payload.request.id)
    for chunk in chunks:
        inbox.put(_Arrival(work, events.ChunkIn(work.request_id, chunk, work)))
    for source in sources:
        inbox.put(events.StreamDone(work.request_id, source, work))
    inbox.put(_Arrival(work, events.Start(work.request_id, payload, work)))
    return work


def _ours(work: Work) -> _Work:
    assert isinstance(work, _Work)
    return work
