"""Names of the events that the runtime records, and which of them open and close an interval or a hop.

Pure. `recorder` writes events, `views` reads them. Names are lowercase, with the layer that owns the event as prefix.
Their table: docs/profiling.md, "Events".
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

# --- a request's milestones ---------------------------------------------------------------------------------------
REQUEST_ADMISSION: Final = "request_admission"
PREPROCESS_START: Final = "preprocess_start"
PREPROCESS_END: Final = "preprocess_end"
ENCODER_START: Final = "encoder_start"  #: metadata: modality, batch_size
ENCODER_END: Final = "encoder_end"
STAGE_AGGREGATE_READY: Final = "stage_aggregate_ready"
SCHEDULER_REQUEST_BUILD_START: Final = "scheduler_request_build_start"
SCHEDULER_REQUEST_BUILD_END: Final = "scheduler_request_build_end"
SCHEDULER_QUEUE_ENTER: Final = "scheduler_queue_enter"
SCHEDULER_PREFILL_START: Final = "scheduler_prefill_start"
SCHEDULER_FIRST_EMIT: Final = "scheduler_first_emit"
STAGE_FIRST_STREAM_CHUNK_SENT: Final = "stage_first_stream_chunk_sent"
CODE2WAV_FIRST_AUDIO: Final = "code2wav_first_audio"
TERMINAL_RESPONSE: Final = "terminal_response"

# --- what happens between them ------------------------------------------------------------------------------------
COORDINATOR_STREAM_RECEIVED: Final = "coordinator_stream_received"
STAGE_INPUT_RECEIVED: Final = "stage_input_received"  #: metadata: from_stage
STAGE_DISPATCH: Final = "stage_dispatch"
STAGE_COMPLETE: Final = "stage_complete"  #: metadata: terminal, next
STAGE_HOP_SENT: Final = "stage_hop_sent"  #: metadata: to_stage
STAGE_STREAM_CHUNK_SENT: Final = "stage_stream_chunk_sent"  #: metadata: to_stage, chunk_id, modality
STAGE_STREAM_CHUNK_RECEIVED: Final = "stage_stream_chunk_received"  #: metadata: from_stage, chunk_id

# --- the relays and queues of this runtime ------------------------------------------------------------------------
STAGE_RUN_START: Final = "stage_run_start"  #: The author's function is called.
STAGE_RUN_END: Final = "stage_run_end"
STAGE_QUEUE_ENTER: Final = "stage_queue_enter"  #: metadata: kind, depth before it; of a chunk from_stage, chunk_id
STAGE_QUEUE_LEAVE: Final = "stage_queue_leave"  #: metadata: as of the entry; depth after it
#: metadata of all relay events: transfer (the same at both ends), relay, nbytes; of a put to_stage, too.
RELAY_PUT_START: Final = "relay_put_start"
RELAY_PUT_END: Final = "relay_put_end"  #: The relay has all of it; it may be announced to its receiver before.
RELAY_GET_START: Final = "relay_get_start"
RELAY_GET_END: Final = "relay_get_end"  #: All of it is here.
RELAY_RELEASED: Final = "relay_released"  #: The receiver has released it: the sender's slot is free.

# --- prefill apart from decode ------------------------------------------------------------------------------------
KV_LOCAL: Final = "kv_local"  #: Decode computes the prompt itself. metadata: reason
KV_LOAD_START: Final = "kv_load_start"  #: Decode asks for blocks. metadata: blocks
KV_LOAD_END: Final = "kv_load_end"  #: Nothing more comes. metadata: blocks that have come, complete
KV_PREFILL_START: Final = "kv_prefill_start"  #: Prefill was asked for blocks. metadata: blocks
KV_PREFILL_END: Final = "kv_prefill_end"  #: It computes nothing more of them. metadata: complete

# --- of a file, not of a request ----------------------------------------------------------------------------------
RECORDER_STARTED: Final = "recorder_started"  #: metadata: host, incarnation, stages
RECORDER_STOPPED: Final = "recorder_stopped"  #: metadata: dropped, why
CLOCK_OFFSET: Final = "clock_offset"  #: metadata: incarnation, offset_ns to add to its times, uncertainty_ns, reference


MAX_TIME_NS: Final = 1 << 62  # the year 2116; two such times and their clocks' offsets still differ by 64 bits
MAX_OFFSET_NS: Final = 1 << 60  # 36 years: a machine whose clock was never set


class Event(msgspec.Struct, frozen=True, gc=False):
    """One line of an event file. ``timestamp_ns``: since the epoch, by the clock of the machine that wrote it."""

    request_id: str
    stage: str | None  #: None: the author named none, and none was active.
    event_name: str
    timestamp_ns: Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME_NS)]
    run_id: str | None = ""
    pid: int = 0
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


#: (opening event, closing event). One event may open several intervals: each pair has its own stack.
INTERVALS: Final[tuple[tuple[str, str], ...]] = (
    (REQUEST_ADMISSION, TERMINAL_RESPONSE),
    (STAGE_INPUT_RECEIVED, STAGE_AGGREGATE_READY),
    (STAGE_INPUT_RECEIVED, STAGE_DISPATCH),
    (STAGE_INPUT_RECEIVED, STAGE_COMPLETE),
    (STAGE_DISPATCH, STAGE_RUN_START),
    (STAGE_DISPATCH, STAGE_COMPLETE),
    (STAGE_RUN_START, STAGE_RUN_END),
    (STAGE_RUN_START, STAGE_FIRST_STREAM_CHUNK_SENT),
    (STAGE_RUN_START, CODE2WAV_FIRST_AUDIO),
    (PREPROCESS_START, PREPROCESS_END),
    (ENCODER_START, ENCODER_END),
    (SCHEDULER_REQUEST_BUILD_START, SCHEDULER_REQUEST_BUILD_END),
    (SCHEDULER_QUEUE_ENTER, SCHEDULER_PREFILL_START),
    (SCHEDULER_PREFILL_START, SCHEDULER_FIRST_EMIT),
    (SCHEDULER_PREFILL_START, STAGE_FIRST_STREAM_CHUNK_SENT),
    (SCHEDULER_PREFILL_START, CODE2WAV_FIRST_AUDIO),
    (STAGE_QUEUE_ENTER, STAGE_QUEUE_LEAVE),
    (RELAY_PUT_START, RELAY_PUT_END),
    (RELAY_PUT_START, RELAY_RELEASED),
    (RELAY_GET_START, RELAY_GET_END),
    (KV_LOAD_START, KV_LOAD_END),
    (KV_PREFILL_START, KV_PREFILL_END),
)

#: Pairs beside those of a start and an end whose two events carry the same of `DISTINCT_BY`.
ALIKE: Final = frozenset(((STAGE_QUEUE_ENTER, STAGE_QUEUE_LEAVE), (RELAY_PUT_START, RELAY_RELEASED)))

#: sending event -> (receiving event, kind of hop)
HOPS: Final[dict[str, tuple[str, str]]] = {
    STAGE_HOP_SENT: (STAGE_INPUT_RECEIVED, "payload"),
    STAGE_STREAM_CHUNK_SENT: (STAGE_STREAM_CHUNK_RECEIVED, "stream"),
}

#: Intervals that the same request can have several of at once in one stage are distinguished by these metadata keys.
DISTINCT_BY: Final = ("span_id", "modality", "from_stage", "to_stage", "chunk_id", "transfer", "kind", "attempt")
