"""What leaves a stage: results routed and projected, chunks numbered, ends and failures told. Any thread.

Runs in the thread that computed: user hooks and copies into the relay stay off the I/O thread, and the message
goes straight from here to the socket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

from omnipipeline_spec.plan import StagePlan
from stage_runtime.engines.base import Gate, Work
from stage_runtime.errors import HookError, ProtocolError, RequestError, TransferError, ValueRefused
from stage_runtime.relays import payloads
from stage_runtime.relays.lanes import Lanes, Make, Parcel
from stage_runtime.relays.payloads import Extracted
from stage_runtime.rules import routing, streams
from stage_runtime.stage.arrivals import Passed
from stage_runtime.stage.hooks import Hooks
from stage_runtime.stage.intake import Intake
from stage_runtime.stage.work import RequestWork
from stage_runtime.wire.messages import Body, Complete, Consumed, DataReady, Failure, Message, Stream
from stage_runtime.wire.values import Chunk, StagePayload

log = logging.getLogger(__name__)

MESSAGE_LIMIT: Final = 2000  # of what a client is told of a failure
COORDINATOR: Final = "coordinator"  # the target of a terminal's edge; reserved as a name of processes


class Surroundings(Protocol):
    """What a stage knows of the process around it."""

    incarnation: str
    lanes: Lanes

    def sibling(self, name: str) -> Intake | None:
        """The intake of a stage of this process."""

    def say(self, peer: str, message: Message) -> bool:
        """False: there is no link to ``peer``."""

    def shared(self, source: str, target: str, request_id: str, value: Any, where: str) -> Any:
        """``value`` on its way to a sibling stage: checked, containers fresh, tensors shared.

        where: what a refusal calls it, the same as when it goes to another process.
        """

    def began(self, stage: str, request_id: str) -> None: ...

    def ended(self, stage: str, request_id: str) -> None: ...


class StageOutbox:
    """`engines.base.Outbox` of one stage."""

    def __init__(
        self, plan: StagePlan, hooks: Hooks, around: Surroundings, forget: Callable[[RequestWork], None]
    ) -> None:
        self._plan = plan
        self._hooks = hooks
        self._around = around
        self._forget = forget
        self.given = 0  #: Results, chunks and failures that the engine has given.

    # --- engines.base.Outbox ------------------------------------------------------------------------------------

    def began(self, work: Work) -> None:
        _ours(work).began()
        self._around.began(self._plan.name, work.request_id)

    def emit(self, work: Work, chunk: Chunk) -> Gate | None:
        ours = _ours(work)
        self.given += 1
        if ours.dead:
            return None
        for target in self._chunk_targets(chunk):
            self._send_chunk(ours, target, chunk)
        return ours.gate()

    def done(self, work: Work, data: Any, *, has_data: bool = True) -> None:
        ours = _ours(work)
        self.given += 1
        if ours.dead:
            return
        self._around.ended(self._plan.name, ours.request_id)  # before the result is handed on, which may share
        try:
            if self._plan.stream_to:
                for target in self._hooks.stream_done_targets(ours.request_id, data):
                    self._send_end(ours, target)
            if self._plan.terminal:
                self._complete(ours, data, has_data=has_data)
            else:
                self._pass_on(ours, data)
        except BaseException as error:
            self.fail(ours, error, hook="result")
            return
        if ours.finish():
            self._end(ours)

    def fail(self, work: Work, error: BaseException, *, hook: str = "run") -> None:
        ours = _ours(work)
        self.given += 1
        if not ours.finish():
            return
        failure = failure_of(error, self._plan.name, hook)
        expected = isinstance(error, RequestError)
        log.log(
            logging.INFO if expected else logging.ERROR,
            "request %s failed in %s.%s: %s",
            ours.request_id,
            failure.stage,
            failure.hook,
            failure.message,
            exc_info=None if expected else error,
        )
        self._around.say(
            ours.owner,
            Complete(ours.request_id, ours.attempt, self._plan.name, failure=failure, timings=self._timings(ours)),
        )
        for target in self._plan.stream_to:
            if ours.sent(target):
                self._send_control(ours, target, failure=failure)
        self._end(ours)

    def consumed(self, work: Work, source: str, count: int) -> None:
        ours = _ours(work)
        producer = ours.bindings.get(source, "")
        here = producer == self._around.incarnation
        weight = ours.taken(source, count)
        told = weight if here else 0 if ours.dead else ours.note_consumed(source, weight)
        if not told:
            return
        said = Consumed(ours.request_id, ours.attempt, ours.owner, source, self._plan.name, told)
        if here:
            tell_consumed(self._around.sibling(source), said)
        else:
            self._around.say(producer, said)

    # --- results ------------------------------------------------------------------------------------------------

    def _complete(self, work: RequestWork, data: Any, *, has_data: bool) -> None:
        chunks = work.sent(COORDINATOR)
        timings = self._timings(work)

        def make(body: Body | None) -> Message:
            return Complete(work.request_id, work.attempt, self._plan.name, body, chunks, timings=timings)

        if has_data:
            extracted = payloads.extract(data, where="result")
            self._ship(work, COORDINATOR, work.owner, extracted, make)
        else:
            self._around.say(work.owner, make(None))

    def _pass_on(self, work: RequestWork, data: Any) -> None:
        targets, own = self._hooks.route(work.request_id, data)
        assert work.request is not None  # a result needs a payload or a chunk, and both bring it
        payload = StagePayload(request=work.request, data=data)
        packed: dict[int, tuple[StagePayload, Extracted]] = {}
        for target in targets:
            sent = payload if own is None else StagePayload(request=work.request, data=own[target])
            self._send_payload(work, target, self._hooks.project(target, sent), packed)

    def _send_payload(
        self, work: RequestWork, target: str, payload: StagePayload, packed: dict[int, tuple[StagePayload, Extracted]]
    ) -> None:
        fields: dict[str, Any] = {"request": payload.request}
        if payload.data is not payload.request.inputs:  # which go along with the request
            fields["data"] = payload.data
        timings = self._timings(work)
        peer = self._bound(work, target)
        if peer == self._around.incarnation:
            intake = self._sibling(target)
            fields["data"] = self._around.shared(self._plan.name, target, work.request_id, payload.data, "payload.data")
            intake.payload(work.header(), self._plan.name, Passed(fields), timings)
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
            extracted = payloads.extract(fields, where="chunk", as_fields=True)
            weight = streams.weight(extracted.nbytes)
            index = work.number(target, weight)

            def stream(body: Body) -> Message:
                return Stream(work.request_id, work.attempt, self._plan.name, index, body, chunk.modality, weight)

            self._ship(work, target, work.owner, extracted, stream)
            return
        peer = self._bound(work, target)
        if peer == self._around.incarnation:
            intake = self._sibling(target)
            source, shared = self._plan.name, self._around.shared
            for name, one in fields.items():
                fields[name] = shared(source, target, work.request_id, one, f"chunk.{name}")
            fields["request"] = work.request
            intake.chunk(work.header(), self._plan.name, work.number(target), chunk.modality, Passed(fields))
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
        total = work.sent(target)
        if self._bound(work, target) == self._around.incarnation:
            self._sibling(target).end(work.header(), self._plan.name, total)
        else:
            self._send_control(work, target, is_done=True, chunk_id=total)

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
        if failure is not None and peer == self._around.incarnation:
            intake = self._around.sibling(target)
            if intake is not None:
                intake.broken(header, self._plan.name, failure)
            return
        said = DataReady(header, self._plan.name, target, None, chunk_id, is_done, failure)
        if not self._around.say(peer, said) and failure is None:
            raise TransferError(f"no connection to the instance of {target!r}")

    # --- inside -------------------------------------------------------------------------------------------------

    def _ship(self, work: RequestWork, target: str, peer: str, extracted: Extracted, make: Make) -> None:
        relay = self._plan.relay
        parcel = Parcel(work, extracted, make, relay.backend)
        if not self._around.lanes.ship((self._plan.name, target, peer), parcel, credits=relay.credits):
            raise TransferError(f"no connection to the instance of {target!r}")

    def _bound(self, work: RequestWork, target: str) -> str:
        try:
            return work.bindings[target]
        except KeyError:
            raise TransferError(f"the request is bound to no instance of {target!r}") from None

    def _sibling(self, target: str) -> Intake:
        intake = self._around.sibling(target)
        if intake is None:
            raise TransferError(f"{target!r} is not in this process, though the request is bound to it here")
        return intake

    def _end(self, work: RequestWork) -> None:
        self._forget(work)
        self._around.ended(self._plan.name, work.request_id)

    def _timings(self, work: RequestWork) -> Any:
        return work.timing(self._plan.name)


def tell_consumed(producer: Intake | None, said: Consumed) -> None:
    """A consumer has taken chunks of a stage of this process."""
    work = producer.find(said.owner, said.request_id, said.attempt) if producer is not None else None
    if work is not None:
        work.consumed(said.target, said.weight)


def failure_of(error: BaseException, stage: str, hook: str) -> Failure:
    """What the client is told of ``error``."""
    match error:
        case RequestError():
            return Failure(error.code, _sayable(error.message), error.stage or stage, error.hook or hook, error.param)
        case HookError():
            return Failure("stage_failed", _sayable(error.message), error.stage, error.hook)
        case ValueRefused():
            return Failure("stage_failed", _sayable(str(error)), stage, hook)
        case TransferError() | ProtocolError():
            return Failure("transport_failed", _sayable(str(error)), stage, hook)
    return Failure("stage_failed", _sayable(f"{type(error).__name__}: {error}"), stage, hook)


def _sayable(message: str) -> str:
    """A failure that could not be said would never end its request: no surrogates (file names), no novels."""
    return str(message)[:MESSAGE_LIMIT].encode(errors="backslashreplace").decode()


def _ours(work: Work) -> RequestWork:
    assert isinstance(work, RequestWork)
    return work
