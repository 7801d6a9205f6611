"""Items in a stage's inbox, decoded when the engine takes them. `engines.base.InboxItem`, three kinds."""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

from stage_runtime.engines import events
from stage_runtime.errors import ProtocolError
from stage_runtime.payloads import devices, encoding, streams
from stage_runtime.payloads.streams import DeviceStreams
from stage_runtime.stage.work import RequestWork
from stage_runtime.wire.values import Chunk, OmniRequest, StagePayload

SCALARS: Final = frozenset([type(None), bool, int, float, str, bytes])  # immutable


class Sealed(Protocol):
    """A value that has arrived: `transfers.receiving.Fetched`, or `Passed` from a stage of this process."""

    def open(self) -> Any: ...
    def copy_out(self) -> None: ...
    def discard(self) -> None: ...


class Passed:
    """A value handed over inside the process: checked and isolated by its sender, in whose thread this is made."""

    __slots__ = ("_handover", "_value")

    def __init__(self, value: Any, on: DeviceStreams = streams.CUDA) -> None:
        self._value = value
        self._handover = streams.given(value, on)

    def open(self) -> Any:
        if self._handover is not None:
            self._handover.take()
            self._handover = None
        value, self._value = self._value, None
        return value

    def copy_out(self) -> None:
        """Does nothing: the value occupies no relay slot."""

    def discard(self) -> None:
        self._value = self._handover = None


def open_payload(work: RequestWork, sealed: Sealed) -> StagePayload:
    """Raises: ProtocolError: it is not a payload."""
    fields = sealed.open()
    request = fields.get("request") if type(fields) is dict else None
    if type(request) is not OmniRequest:
        raise ProtocolError("a payload without its request")
    work.know(request)
    if "data" in fields:
        return StagePayload(request=request, data=devices.moved(fields["data"], work.device))
    # A payload without data has the request's inputs as its data: a copy, which the stage may write into.
    inputs = request.inputs
    own = inputs if type(inputs) in SCALARS else devices.moved(encoding.reissued(request).inputs, work.device)
    return StagePayload(request=request, data=own)


class PayloadArrival(msgspec.Struct, eq=False):
    """The payload of a stage with one input."""

    work: RequestWork
    sealed: Sealed

    def open(self) -> events.Start:
        return events.Start(self.work.request_id, open_payload(self.work, self.sealed), self.work)

    def discard(self) -> None:
        self.sealed.discard()


class MergedArrival:
    """A fan-in's payload, merged by the stage's hook thread."""

    __slots__ = ("_handover", "payload", "work")

    def __init__(self, work: RequestWork, payload: StagePayload, on: DeviceStreams = streams.CUDA) -> None:
        self.work = work
        self.payload: StagePayload | None = payload
        self._handover = streams.given(payload, on)

    def open(self) -> events.Start:
        if self._handover is not None:
            self._handover.take()
            self._handover = None
        payload, self.payload = self.payload, None
        assert payload is not None
        return events.Start(self.work.request_id, payload, self.work)

    def discard(self) -> None:
        self.payload = self._handover = None


class EndArrival:
    """The end of a stream without chunks, which brings the request."""

    __slots__ = ("sealed", "source", "work")

    def __init__(self, work: RequestWork, source: str, sealed: Sealed) -> None:
        self.work = work
        self.source = source
        self.sealed = sealed

    def open(self) -> events.StreamDone:
        request = self.sealed.open().get("request")
        if not isinstance(request, OmniRequest):
            raise ProtocolError("an empty stream's end without its request")
        self.work.know(request)
        return events.StreamDone(self.work.request_id, self.source, self.work, request)

    def discard(self) -> None:
        self.sealed.discard()


class ChunkArrival:
    """One chunk, in order."""

    __slots__ = ("index", "modality", "sealed", "source", "weight", "work")

    def __init__(
        self, work: RequestWork, source: str, index: int, modality: str | None, sealed: Sealed, weight: int = 1
    ) -> None:
        self.work = work
        self.source = source
        self.index = index
        self.modality = modality
        self.sealed = sealed
        self.weight = weight

    def open(self) -> events.ChunkIn:
        fields = self.sealed.open()
        if not isinstance(fields, dict):
            raise ProtocolError(f"expected the fields of a chunk, got {type(fields).__name__}")
        request = fields.get("request")
        if isinstance(request, OmniRequest):
            self.work.know(request)
        chunk = Chunk(
            devices.moved(fields.get("data"), self.work.device),
            modality=self.modality,
            metadata=devices.moved(fields.get("metadata"), self.work.device),
            source=self.source,
            index=self.index,
            request=self.work.request,
        )
        return events.ChunkIn(self.work.request_id, chunk, self.work)

    def discard(self) -> None:
        self.sealed.discard()
