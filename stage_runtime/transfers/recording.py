"""Events of transfers, for a profile. Called by `sending` and `receiving`, and only while one is recorded.

Both ends name a transfer alike, by the sender's metadata, so that a report can follow it.
"""

from __future__ import annotations

import time
import zlib
from typing import Any, Protocol

import msgspec

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.profiler import events
from stage_runtime.profiler.recording.recorder import recorder


class RecordedRequest(Protocol):
    """The request that a payload belongs to."""

    @property
    def request_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...


class RecordedTransfer(msgspec.Struct, frozen=True):
    """A put that was recorded, until its release is."""

    request_id: str
    stage: str
    facts: dict[str, Any]


def put(work: RecordedRequest, edge: tuple[str, str], metadata: bytes, nbytes: int, begun_ns: int) -> RecordedTransfer:
    """Record that the relay takes a payload. edge: source, target. begun_ns: when the put began."""
    source, target = edge
    facts = {**_named(metadata), "to_stage": target, "nbytes": nbytes, "attempt": work.attempt}
    recorder.emit(events.RELAY_PUT_START, work.request_id, source, facts, timestamp_ns=begun_ns)
    return RecordedTransfer(work.request_id, source, facts)


def filled(transfer: RecordedTransfer | None) -> None:
    """Record that the relay has all of it: a put may be announced before it is copied."""
    if transfer is not None:
        recorder.emit(events.RELAY_PUT_END, transfer.request_id, transfer.stage, transfer.facts)


def released(transfer: RecordedTransfer | None) -> None:
    """Record that its receiver has released it."""
    if transfer is not None and recorder.active:
        recorder.emit(events.RELAY_RELEASED, transfer.request_id, transfer.stage, transfer.facts)


def received(key: str, stage: str, metadata: bytes, nbytes: int, begun_ns: int) -> None:
    """Record that a payload has arrived. key: `sending.attempt_key`. stage: empty at the coordinator.

    begun_ns: of its announcement.
    """
    named, _, attempt = key.partition("/")[2].rpartition("#")
    facts = {**_named(metadata), "nbytes": nbytes, "attempt": int(attempt)}
    recorder.emit(events.RELAY_GET_START, named, stage or COORDINATOR, facts, timestamp_ns=begun_ns)
    recorder.emit(events.RELAY_GET_END, named, stage or COORDINATOR, facts, timestamp_ns=time.time_ns())


def _named(metadata: bytes) -> dict[str, Any]:
    relay, _, _ = metadata.partition(b":")
    return {"transfer": f"{zlib.crc32(metadata):08x}", "relay": relay.decode("ascii", "replace")}
