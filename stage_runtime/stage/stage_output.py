"""What leaves a stage: results routed and projected, chunks numbered, ends and failures told. Any thread.

Runs in the thread that computed: user hooks and copies into the relay stay off the I/O thread, and the message
goes straight from here to the socket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from omnipipeline_spec.types.plan import StagePlan
from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.engines.base import Gate, Work
from stage_runtime.errors import HookError, RequestError, TransferError, ValueRefused
from stage_runtime.relays import payloads
from stage_runtime.relays.payloads import Extracted
from stage_runtime.relays.send_queues import Make, PendingSend, SendQueues
from stage_runtime.rules import routing, streams
from stage_runtime.rules.failures import failure_of, log_failure
from stage_runtime.stage.arrivals import Passed
from stage_runtime.stage.hooks import Hooks
from stage_runtime.stage.stage_input import StageInput
from stage_runtime.stage.work import RequestWork
from stage_runtime.wire import outputs
from stage_runtime.wire.messages import (
    Body,
    Complete,
    Consumed,
    DataReady,
    Failure,
    Header,
    Message,
    Skip,
    Stream,
    Timing,
)
from stage_runtime.wire.values import Chunk, StagePayload

#: Of a terminal stage that gives an OpenAI route nothing but what that cannot show.
UNSHOWN: Final = (
    "{kind}: this request's route shows omni.Text, omni.Audio, omni.Usage, omni.Finish and omni.Note: wrap it, "
    "or ask by /v1/pipeline"
)
SCALARS: Final = frozenset([type(None), bool, int, float, str, bytes])  # nobody can write into them


class ProcessContext(Protocol):
    """What a stage knows of the process around it."""

    incarnation: str
    send_queues: SendQueues

    def sibling(self, name: str) -> StageInput | None:
        """the stage input of a stage of this process."""

    def send(self, peer: str, message: Message) -> bool:
        """False: there is no link to ``peer``."""

    def shared(self, source: str, target: str, work: RequestWork, value: Any, where: str) -> Any:
        """``value`` on its way to a sibling stage: checked, containers fresh, tensors shared.

        where: what a refusal calls it, the same as when it goes to another process.
        """

    def stalled(self, source: str, target: str, peer: str, stalled: bool) -> None:
        """Tell the instance of ``target`` that all workers of ``source`` wait for it, or no longer."""

    def settle(self) -> None:
        """As `engines.base.Outbox.settle`."""

    def began(self, stage: str, work: RequestWork) -> None: ...

    def gave(self, stage: str, work: RequestWork, values: Mapping[str, Any]) -> None:
        """These were sent, by what a refusal calls them: the stage may not write into them again."""

    def ended(self, stage: str, work: RequestWork) -> None: ...


class StageOutput:
    """`engines.base.Outbox` of one stage."""

    def __init__(
        self,
        plan: StagePlan,
        hooks: Hooks,
        process: ProcessContext,
        forget: Callable[[RequestWork], None],
        crashed: Callable[[BaseException], None],
        take_back: Callable[[RequestWork, BaseException, str], None],
    ) -> None:
        """take_back: fails a request and has the engine drop it."""
        self._plan = plan
        self._hooks = hooks
        self._process = process
        self._forget = forget
        self._crashed = crashed
        self._take_back = take_back
        self.given = 0  #: Results, chunks and failures that the engine has given.

    # --- engines.base.Outbox ------------------------------------------------------------------------------------

    def began(self, work: Work) -> None:
        ours = _ours(work)
        ours.began()
        self._process.began(self._plan.name, ours)

    def emit(self, work: Work, chunk: Chunk) -> Gate | None:
        ours = _ours(work)
        self.given += 1
        if ours.dead:
            return None
        outputs.check_chunk(chunk)
        for target in _met(ours, self._chunk_targets(chunk)):
            if ours.takes(target):
                self._send_chunk(ours, target, chunk)
        self._process.gave(self._plan.name, ours, {"chunk.data": chunk.data, "chunk.metadata": chunk.metadata})
        return ours.gate()

    def done(self, work: Work, data: Any, *, has_data: bool = True) -> None:
        ours = _ours(work)
        self.given += 1
        if ours.dead:
            return
        try:
            self._process.ended(self._plan.name, ours)  # before the result is handed on, which may share
            if self._plan.stream_to:
                notified = self._hooks.stream_done_targets(ours.request_id, data)
                for target in _met(ours, self._plan.stream_to):
                    if target in notified:
                        self._send_end(ours, target)
                    else:
                        self._send_skip(ours, target, chunks=ours.sent(target))
            if self._plan.terminal:
                self._complete(ours, data, has_data=has_data)
            else:
                self._pass_on(ours, data)
        except BaseException as error:
            self.fail(ours, error, hook="result")
            return
        if ours.finish():
            ours.served = ours.has_payload
            self._end(ours)

    def fail(self, work: Work, error: BaseException, *, hook: str = "run") -> None:
        ours = _ours(work)
        self.given += 1
        if not ours.finish():
            return
        failure = failure_of(error, self._plan.name, hook)
        log_failure(ours.request_id, failure, error)
        try:
            self._send_failed(ours, failure, timings=self._timings(ours))
            for target in self._plan.stream_to:
                if ours.sent(target):
                    self._send_control(ours, target, failure=failure)
            self._end(ours)
        except BaseException as trouble:  # a fault of ours: said aloud, for the request would wait in silence
            self._crashed(trouble)

    def settle(self) -> None:
        self._process.settle()

    def crashed(self, error: BaseException) -> None:
        self._crashed(error)

    def skip(self, work: RequestWork) -> None:
        """Nothing can begin the request here any more: nor can this stage begin anything after it."""
        if not work.finish():
            return
        with contextlib.suppress(TransferError):  # a neighbour is away: the coordinator ends the request for that
            for target in self._plan.next:
                self._send_skip(work, target)
            for target in self._plan.stream_to:
                self._send_skip(work, target, chunks=0)
        if self._plan.terminal:
            self._process.send(work.owner, Complete(work.request_id, work.attempt, self._plan.name, skipped=True))
        self._end(work)

    def refuse(self, header: Header, source: str) -> None:
        """``source`` streams to a request that is over here: it need not wait for anybody."""
        message = Consumed(header.request_id, header.attempt, header.owner, source, self._plan.name, 0, over=True)
        self._send_consumed(header.bindings.get(source, ""), message)

    def turn_away(self, work: Work, error: RequestError) -> None:
        self._take_back(_ours(work), error, "streams")

    def reject(self, header: Header, error: HookError) -> None:
        """A request that is over here turns out to be wrong. Too late when it is over everywhere."""
        failure = failure_of(error, self._plan.name, error.hook)
        log_failure(header.request_id, failure, error)
        self._process.send(header.owner, Complete(header.request_id, header.attempt, self._plan.name, failure=failure))

    def consumed(self, work: Work, source: str, count: int) -> int:
        ours = _ours(work)
        producer = ours.bindings.get(source, "")
        here = producer == self._process.incarnation
        weight = ours.taken(source, count)
        consumed = weight if here else 0 if ours.dead else ours.note_consumed(source, weight)
        if consumed:
            message = Consumed(ours.request_id, ours.attempt, ours.owner, source, self._plan.name, consumed)
            self._send_consumed(producer, message)
        return weight

    # --- results ------------------------------------------------------------------------------------------------

    def _complete(self, work: RequestWork, data: Any, *, has_data: bool) -> None:
        chunks = work.sent(COORDINATOR)
        timings = self._timings(work)

        def make(body: Body | None) -> Message:
            return Complete(work.request_id, work.attempt, self._plan.name, body, chunks, timings=timings)

        if has_data:
            work.look(data)
        if work.unshown is not None:
            raise ValueRefused("result", UNSHOWN.format(kind=work.unshown))
        if has_data:
            extracted = payloads.extract(data, where="result")
            self._ship(work, COORDINATOR, work.owner, extracted, make)
            self._process.gave(self._plan.name, work, {"result": data})
        else:
            self._process.send(work.owner, make(None))

    def _pass_on(self, work: RequestWork, data: Any) -> None:
        targets, own = self._hooks.route(work.request_id, data)
        request = work.request
        if request is None:  # a result needs a payload or a chunk, and both bring it: it was aborted a moment ago
            return
        payload = StagePayload(request=request, data=data)
        sent = {}  # all projections first: one that writes into the result must not change what some have got already
        for target in _met(work, targets):
            given = payload if own is None else StagePayload(request=request, data=own[target])
            sent[target] = self._hooks.project(target, given)
        packed: dict[int, tuple[StagePayload, Extracted]] = {}
        for target, projected in sent.items():
            self._send_payload(work, target, projected, packed)
        for projected in sent.values():
            self._process.gave(self._plan.name, work, {"payload.data": projected.data})
        for target in self._plan.next:
            if target not in targets:
                self._send_skip(work, target)

    def _send_payload(
        self, work: RequestWork, target: str, payload: StagePayload, packed: dict[int, tuple[StagePayload, Extracted]]
    ) -> None:
        fields: dict[str, Any] = {"request": payload.request}
        if not (type(payload.data) in SCALARS and payload.data is payload.request.inputs):  # which go along with it
            fields["data"] = payload.data
        timings = self._timings(work)
        peer = work.bindings[target]
        if peer == self._process.incarnation:
            stage_input = self._sibling(target)
            fields["request"] = payloads.reissued(payload.request)
            fields["data"] = self._process.shared(self._plan.name, target, work, payload.data, "payload.data")
            stage_input.payload(work.header(), self._plan.name, Passed(fields), timings)
            return
        found = packed.get(id(payload))
        if found is None:  # targets that get the same payload share its packing, and a slot where they can
            found = (payload, payloads.extract(fields, where="payload", as_fields=True))
            packed[id(payload)] = found  # with the payload itself: the id of a dead one is given out again
        extracted = found[1]

        def make(body: Body) -> Message:
            return DataReady(work.header(), self._plan.name, target, body, timings=timings)

        self._ship(work, target, peer, extracted, make)

    # --- streams ------------------------------------------------------------------------------------------------

    def _chunk_targets(self, chunk: Chunk) -> tuple[str, ...]:
        plan = self._plan
        if plan.stream_to:
            return routing.stream_targets(plan.name, plan.stream_to, chunk.to)
        if plan.terminal and chunk.to is None:
            return (COORDINATOR,)
        cure = "declare it in streamTo" if chunk.to is not None else "add streamTo, or make the stage terminal"
        raise HookError(plan.name, "chunk", f"a chunk to {chunk.to or 'nobody'}: {cure}")

    def _send_chunk(self, work: RequestWork, target: str, chunk: Chunk) -> None:
        fields: dict[str, Any] = {"data": chunk.data, "metadata": chunk.metadata}
        if target == COORDINATOR:
            work.look(chunk.data)
            extracted = payloads.extract(fields, where="chunk", as_fields=True)
            weight = streams.weight(extracted.nbytes)
            index = work.number(target, weight)

            def stream(body: Body) -> Message:
                return Stream(work.request_id, work.attempt, self._plan.name, index, body, chunk.modality, weight)

            self._ship(work, target, work.owner, extracted, stream)
            return
        peer = work.bindings[target]
        if peer == self._process.incarnation:
            stage_input = self._sibling(target)
            source, shared = self._plan.name, self._process.shared
            for name, one in fields.items():
                fields[name] = shared(source, target, work, one, f"chunk.{name}")
            if work.request is not None and work.sent(target) == 0:
                fields["request"] = payloads.reissued(work.request)
            stage_input.chunk(work.header(), self._plan.name, work.number(target), chunk.modality, Passed(fields))
            return
        if work.sent(target) == 0:
            fields["request"] = work.request
        extracted = payloads.extract(fields, where="chunk", as_fields=True)
        weight = streams.weight(extracted.nbytes)
        index = work.number(target, weight)

        def make(body: Body) -> Message:
            return DataReady(
                work.header(), self._plan.name, target, body, index, modality=chunk.modality, weight=weight
            )

        self._ship(work, target, peer, extracted, make)

    def _send_end(self, work: RequestWork, target: str) -> None:
        """The done signal. Of an empty stream it is the first that the target hears of the request, and brings it."""
        total = work.sent(target)
        peer = work.bindings[target]
        fields = {"request": work.request} if total == 0 else None
        if peer == self._process.incarnation:
            sealed = None
            if total == 0 and work.request is not None:
                sealed = Passed({"request": payloads.reissued(work.request)})
            self._sibling(target).end(work.header(), self._plan.name, total, sealed)
        elif fields is None:
            self._send_control(work, target, is_done=True, chunk_id=total)
        else:

            def make(body: Body) -> Message:
                return DataReady(work.header(), self._plan.name, target, body, 0, is_done=True)

            self._ship(work, target, peer, payloads.extract(fields, where="payload", as_fields=True), make)

    def _send_skip(self, work: RequestWork, target: str, *, chunks: int | None = None) -> None:
        """Tell ``target`` that nothing more comes on this edge: it begins nothing, and ends waiting."""
        peer = work.bindings.get(target)
        if peer is None:
            return  # the request has no instance of it: nobody waits there
        if peer == self._process.incarnation:
            self._sibling(target).skip(work.header(), self._plan.name, chunks)
        elif not self._process.send(peer, Skip(work.header(), self._plan.name, target, chunks)):
            raise TransferError(f"no connection to the instance of {target!r}")

    def _send_control(
        self,
        work: RequestWork,
        target: str,
        *,
        is_done: bool = False,
        chunk_id: int | None = None,
        failure: Failure | None = None,
    ) -> None:
        header = work.header()
        peer = work.bindings.get(target, "")
        if failure is not None and peer == self._process.incarnation:
            stage_input = self._process.sibling(target)
            if stage_input is not None:
                stage_input.broken(header, self._plan.name, failure)
            return
        message = DataReady(header, self._plan.name, target, None, chunk_id, is_done, failure)
        if not self._process.send(peer, message) and failure is None:
            raise TransferError(f"no connection to the instance of {target!r}")

    # --- inside -------------------------------------------------------------------------------------------------

    def _ship(self, work: RequestWork, target: str, peer: str, extracted: Extracted, make: Make) -> None:
        relay = self._plan.relay
        pending = PendingSend(work, extracted, make, relay.backend, lambda error: self._lost(work, error))
        if not self._process.send_queues.ship((self._plan.name, target, peer), pending, credits=relay.credits):
            raise TransferError(f"no connection to the instance of {target!r}")

    def _lost(self, work: RequestWork, error: BaseException) -> None:
        """What had waited in a send queue cannot be sent. The work may be over here, and its request is not."""
        failure = failure_of(error, self._plan.name, "send")
        log_failure(work.request_id, failure, error)
        self._send_failed(work, failure)

    def _send_failed(self, work: RequestWork, failure: Failure, timings: tuple[Timing, ...] = ()) -> None:
        message = Complete(work.request_id, work.attempt, self._plan.name, failure=failure, timings=timings)
        self._process.send(work.owner, message)

    def _sibling(self, target: str) -> StageInput:
        stage_input = self._process.sibling(target)
        if stage_input is None:
            raise TransferError(f"{target!r} is not in this process, though the request is bound to it here")
        return stage_input

    def _send_consumed(self, producer: str, message: Consumed) -> None:
        if producer == self._process.incarnation:
            notify_consumed(self._process.sibling(message.source), message)
        else:
            self._process.send(producer, message)

    def _end(self, work: RequestWork) -> None:
        self._forget(work)
        for source in self._plan.stream_from:
            if source not in work.ended_sources:  # nobody takes the rest of that stream
                self.refuse(work.header(), source)
        self._process.ended(self._plan.name, work)

    def _timings(self, work: RequestWork) -> tuple[Timing, ...]:
        return work.timing(self._plan.name)


def notify_consumed(producer: StageInput | None, message: Consumed) -> None:
    """A consumer has taken chunks of a stage of this process."""
    work = producer.find(message.owner, message.request_id, message.attempt) if producer is not None else None
    if work is not None:
        work.consumed(message.target, message.weight, over=message.over)


def _met(work: RequestWork, targets: Sequence[str]) -> list[str]:
    """The targets that the request may meet. From a stage that it is not bound to, no terminal that it waits for can be
    reached (`rules.reachability`).
    """
    return [target for target in targets if target in work.bindings or target == COORDINATOR]


def _ours(work: Work) -> RequestWork:
    assert isinstance(work, RequestWork)
    return work
