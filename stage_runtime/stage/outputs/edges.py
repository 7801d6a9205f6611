"""A stage's edges to its neighbours: how what it gives reaches one instance of a neighbour. Any thread.

Whether an instance is in this process is decided once, when `Edges` binds it: `LocalEdge` calls the neighbour's input
and shares tensors, `RemoteEdge` encodes and sends. `ClientEdge` is a terminal stage's, by way of the request's
coordinator. `stage_output` decides what is sent to whom.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from omnipipeline_spec.types.plan import StagePlan
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.errors import NoConnection
from stage_runtime.payloads import encoding
from stage_runtime.payloads.pack import Extracted
from stage_runtime.rules.flow import streams
from stage_runtime.stage.inputs.arrivals import SCALARS, Passed
from stage_runtime.stage.inputs.stage_input import StageInput
from stage_runtime.stage.process_context import ProcessContext
from stage_runtime.stage.work import RequestWork
from stage_runtime.transfers.sending import Make, PendingSend
from stage_runtime.wire.messages import Complete, Consumed, DataReady, Message, Skip, Stream, StreamStalled
from stage_runtime.wire.parts import Body, Failure, Header
from stage_runtime.wire.values import Chunk, StagePayload

EDGES_KEPT: Final = 64  # instances of one neighbour; they change, and making a binding again is cheap

Packed: TypeAlias = dict[
    int, tuple[StagePayload, Extracted]
]  #: Entries by id, with the payload itself, because ids are reused.
Lost: TypeAlias = Callable[[RequestWork, BaseException], None]  #: A payload in a send queue cannot be sent.


class LocalEdge:
    """An edge to or from a stage of this process."""

    def __init__(self, stage: str, neighbour: str, neighbour_input: StageInput, process: ProcessContext) -> None:
        self._stage = stage
        self._neighbour = neighbour
        self._input = neighbour_input
        self._process = process

    def payload(self, work: RequestWork, payload: StagePayload, packed: Packed | None) -> None:
        timings = work.timing(self._stage)
        fields: dict[str, Any] = {
            "request": encoding.reissued(payload.request),
            "data": self._process.shared(self._stage, self._neighbour, work, payload.data, "payload.data"),
        }
        self._input.payload(work.header(), self._stage, Passed(fields), timings)

    def chunk(self, work: RequestWork, chunk: Chunk) -> None:
        target = self._neighbour
        data, nbytes = self._process.measured(self._stage, target, work, chunk.data, "chunk.data")
        metadata, more = self._process.measured(self._stage, target, work, chunk.metadata, "chunk.metadata")
        fields: dict[str, Any] = {"data": data, "metadata": metadata}
        if work.request is not None and work.sent(target) == 0:
            fields["request"] = encoding.reissued(work.request)
        weight = streams.weight(nbytes + more)
        index = work.number(target, weight)
        self._input.chunk(work.header(), self._stage, index, chunk.modality, Passed(fields), weight)

    def end(self, work: RequestWork) -> None:
        """The stream is complete. It is the first message of an empty one to the target, and brings the request."""
        total = work.sent(self._neighbour)
        timings = work.timing(self._stage)
        sealed = None
        if total == 0 and work.request is not None:
            sealed = Passed({"request": encoding.reissued(work.request)})
        self._input.end(work.header(), self._stage, total, sealed, timings)

    def skip(self, work: RequestWork, chunks: int | None) -> None:
        """Nothing more comes on this edge. chunks: of a stream, how many came before."""
        self._input.skip(work.header(), self._stage, chunks)

    def failed(self, work: RequestWork, failure: Failure) -> None:
        """The stream ends in the middle."""
        self._input.broken(work.header(), self._stage, failure)

    def consumed(self, work: RequestWork, weight: int) -> None:
        """The stage has taken so much of the neighbour's stream: the producer is notified at once."""
        if weight:
            self._input.consumed(
                Consumed(work.request_id, work.attempt, work.owner, self._neighbour, self._stage, weight)
            )

    def refuse(self, header: Header) -> None:
        """The stage takes no more of the neighbour's stream."""
        self._input.consumed(_over(header, self._neighbour, self._stage))

    def stalled(self, stalled: bool) -> None:
        """All workers of the stage wait for the neighbour, or no longer."""
        self._input.source_stalled(self._stage, self._process.incarnation, stalled)


class _SendingEdge:
    """An edge to one peer over the planes. ``_queue_key``: its key in `transfers.sending`."""

    def __init__(self, plan: StagePlan, neighbour: str, peer: str, process: ProcessContext, lost: Lost) -> None:
        self._stage = plan.name
        self._relay = plan.relay
        self._neighbour = neighbour
        self._peer = peer
        self._process = process
        self._lost = lost
        self._queue_key = (plan.name, neighbour, peer)

    def stalled(self, stalled: bool) -> None:
        """All workers of the stage wait for the neighbour, or no longer."""
        self._process.send(self._peer, StreamStalled(self._stage, self._neighbour, stalled))

    def _ship(self, work: RequestWork, extracted: Extracted, make: Make) -> None:
        lost = self._lost
        pending = PendingSend(work, extracted, make, self._relay.backend, lambda error: lost(work, error))
        limits = self._relay
        if not self._process.send_queues.ship(
            self._queue_key, pending, credits=limits.credits, slot_nbytes=limits.slot_bytes
        ):
            raise self._unreachable()

    def _send(self, message: Message) -> None:
        if not self._process.send(self._peer, message):
            raise self._unreachable()

    def _unreachable(self) -> NoConnection:
        return NoConnection(f"no connection to the instance of {self._neighbour!r}", self._peer)


class RemoteEdge(_SendingEdge):
    """An edge to or from a stage of another process."""

    def payload(self, work: RequestWork, payload: StagePayload, packed: Packed | None) -> None:
        """packed: targets that get the same payload share its packing, and a slot where they can; None: one target."""
        timings = work.timing(self._stage)
        if packed is None:
            extracted = _extracted(payload)
        elif (found := packed.get(id(payload))) is not None:
            extracted = found[1]
        else:
            extracted = _extracted(payload)
            packed[id(payload)] = (payload, extracted)
        if extracted.is_inline:
            body = Body(extracted.value_bytes, extracted.refs, extracted.flat())
            self._send(DataReady(work.header(), self._stage, self._neighbour, body, timings=timings))
            return

        def make(body: Body) -> Message:
            return DataReady(work.header(), self._stage, self._neighbour, body, timings=timings)

        self._ship(work, extracted, make)

    def chunk(self, work: RequestWork, chunk: Chunk) -> None:
        target = self._neighbour
        fields: dict[str, Any] = {"request": work.request} if work.sent(target) == 0 else {}
        fields["data"] = chunk.data
        fields["metadata"] = chunk.metadata
        extracted = encoding.extract(fields, where="chunk", as_fields=True)
        weight = streams.weight(extracted.nbytes)
        index = work.number(target, weight)

        def make(body: Body) -> Message:
            return DataReady(work.header(), self._stage, target, body, index, modality=chunk.modality, weight=weight)

        self._ship(work, extracted, make)

    def end(self, work: RequestWork) -> None:
        """The same as `LocalEdge.end`."""
        total = work.sent(self._neighbour)
        timings = work.timing(self._stage)
        if total:
            self._send(DataReady(work.header(), self._stage, self._neighbour, None, total, True, timings=timings))
            return

        def make(body: Body) -> Message:
            return DataReady(work.header(), self._stage, self._neighbour, body, 0, is_done=True, timings=timings)

        self._ship(work, encoding.extract({"request": work.request}, where="payload", as_fields=True), make)

    def skip(self, work: RequestWork, chunks: int | None) -> None:
        """The same as `LocalEdge.skip`."""
        self._send(Skip(work.header(), self._stage, self._neighbour, chunks))

    def failed(self, work: RequestWork, failure: Failure) -> None:
        """The same as `LocalEdge.failed`; a target that cannot be reached is notified by the coordinator."""
        self._process.send(
            self._peer, DataReady(work.header(), self._stage, self._neighbour, None, None, False, failure)
        )

    def consumed(self, work: RequestWork, weight: int) -> None:
        """The same as `LocalEdge.consumed`; the producer is notified a quarter of a window at a time."""
        due = 0 if work.dead else work.note_consumed(self._neighbour, weight)
        if due:
            self._process.send(
                self._peer, Consumed(work.request_id, work.attempt, work.owner, self._neighbour, self._stage, due)
            )

    def refuse(self, header: Header) -> None:
        """The same as `LocalEdge.refuse`."""
        self._process.send(self._peer, _over(header, self._neighbour, self._stage))


class ClientEdge(_SendingEdge):
    """The edge from a terminal stage to the client, by way of the coordinator that owns the request."""

    def chunk(self, work: RequestWork, chunk: Chunk) -> None:
        work.look(chunk.data)
        fields = {"data": chunk.data, "metadata": chunk.metadata}
        extracted = encoding.extract(fields, where="chunk", as_fields=True)
        weight = streams.weight(extracted.nbytes)
        index = work.number(self._neighbour, weight)

        def make(body: Body) -> Message:
            return Stream(work.request_id, work.attempt, self._stage, index, body, chunk.modality, weight)

        self._ship(work, extracted, make)

    def result(self, work: RequestWork, data: Any, *, has_data: bool) -> None:
        """The stage has finished the request. has_data: it gave something beside its chunks."""
        chunks = work.sent(self._neighbour)
        timings = work.timing(self._stage)

        def make(body: Body | None) -> Message:
            return Complete(work.request_id, work.attempt, self._stage, body, chunks, timings=timings)

        if not has_data:
            self._process.send(self._peer, make(None))
            return
        extracted = encoding.extract(data, where="result")
        if extracted.is_inline:
            self._send(make(Body(extracted.value_bytes, extracted.refs, extracted.flat())))
        else:
            self._ship(work, extracted, make)


StageEdge: TypeAlias = LocalEdge | RemoteEdge


class Edges:
    """The edges of one stage, by neighbour and instance. A cache: an edge holds nothing of a request."""

    def __init__(self, plan: StagePlan, process: ProcessContext, lost: Lost) -> None:
        self._plan = plan
        self._process = process
        self._lost = lost
        neighbours = (*plan.next, *plan.stream_to, *plan.stream_from, *plan.inputs_from)
        #: neighbour -> incarnation -> edge. Valid for this process's own incarnation.
        self._bound: dict[str, dict[str, StageEdge]] = {name: {} for name in neighbours}
        self._clients: dict[str, ClientEdge] = {}  #: Edges by the coordinator's incarnation.

    def to(self, neighbour: str, instance: str) -> StageEdge:
        """The edge to this instance of ``neighbour``; one that cannot be reached is refused when it is used."""
        bound = self._bound.get(neighbour)
        edge = bound.get(instance) if bound is not None else None
        return edge if edge is not None else self._bind(neighbour, instance)

    def client(self, owner: str) -> ClientEdge:
        edge = self._clients.get(owner)
        if edge is None:
            edge = ClientEdge(self._plan, COORDINATOR, owner, self._process, self._lost)
            _keep(self._clients, owner, edge)
        return edge

    def stalled(self, target: str, instance: str, stalled: bool) -> None:
        """Tell the instance of ``target`` that all workers of the stage wait for it, or no longer."""
        (self.client(instance) if target == COORDINATOR else self.to(target, instance)).stalled(stalled)

    def clear(self) -> None:
        """This process goes on under another incarnation."""
        for bound in self._bound.values():
            bound.clear()
        self._clients.clear()

    def _bind(self, neighbour: str, instance: str) -> StageEdge:
        """The only place that decides whether an instance is this process."""
        edge: StageEdge
        sibling = self._process.sibling(neighbour) if instance == self._process.incarnation else None
        if sibling is not None:
            edge = LocalEdge(self._plan.name, neighbour, sibling, self._process)
        else:
            edge = RemoteEdge(self._plan, neighbour, instance, self._process, self._lost)
        bound = self._bound.get(neighbour)
        if bound is not None:  # or a message names a source that the plan does not
            _keep(bound, instance, edge)
        return edge


def _extracted(payload: StagePayload) -> Extracted:
    data = payload.data
    # Equal to the request's inputs, it goes along with them.
    alone = type(data) in SCALARS and data is payload.request.inputs
    return encoding.payload(payload.request, () if alone else (data,))


def _keep(bound: dict[str, Any], instance: str, edge: StageEdge | ClientEdge) -> None:
    if len(bound) >= EDGES_KEPT:
        bound.clear()
    bound[instance] = edge


def _over(header: Header, source: str, stage: str) -> Consumed:
    return Consumed(header.request_id, header.attempt, header.owner, source, stage, 0, over=True)
