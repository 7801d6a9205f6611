"""Every metric that the runtime serves: the one list, from which `/metrics` and the tables of the docs are made.

Here: descriptions. Not here: counting (`counting`), where the numbers of a process come from (`processes`), Prometheus'
text (`exposition`). Called by all rooms that count; tests compare `/metrics`, the chart and docs/operations.md with the
list. One room however long it grows: a reader looks for a metric's name in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from omnipipeline_spec.types.metrics import Metric

_OF_HTTP: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
#: Bounds from a hop to a long generation.
_OF_STAGES: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

HTTP_REQUESTS: Final = Metric(
    name="omnipipeline_http_requests_total",
    kind="counter",
    help="Answers by route, status and outcome",
    labels=("route", "status", "outcome"),
)
HTTP_FIRST_BYTE: Final = Metric(
    name="omnipipeline_http_first_byte_seconds",
    kind="histogram",
    help="Time from the request read to the answer's first byte",
    labels=("route",),
    buckets=_OF_HTTP,
)
HTTP_REQUEST_TIME: Final = Metric(
    name="omnipipeline_http_request_seconds",
    kind="histogram",
    help="Time from the request read to the answer's last byte",
    labels=("route",),
    buckets=_OF_HTTP,
)
HTTP_SENT_BYTES: Final = Metric(
    name="omnipipeline_http_sent_bytes_total", kind="counter", help="Bytes of answers' bodies", labels=("route",)
)
HTTP_HELD_BYTES: Final = Metric(
    name="omnipipeline_http_buffered_bytes", kind="gauge", help="Bodies and media of requests in flight"
)
HTTP_CERTIFICATE_START: Final = Metric(
    name="omnipipeline_http_certificate_not_before_timestamp_seconds",
    kind="gauge",
    help="Begin of the life of the certificate that new connections get",
)
HTTP_CERTIFICATE_END: Final = Metric(
    name="omnipipeline_http_certificate_not_after_timestamp_seconds",
    kind="gauge",
    help="End of the life of the certificate that new connections get",
)
HTTP_CERTIFICATE_REFUSED: Final = Metric(
    name="omnipipeline_http_certificate_refused",
    kind="gauge",
    help="1 while the certificate's files cannot replace the one that is served",
)

REQUESTS: Final = Metric(
    name="omnipipeline_requests_total",
    kind="counter",
    help="Requests that have ended, by kind and outcome: completed or an error code",
    labels=("kind", "outcome"),
)
REQUESTS_IN_FLIGHT: Final = Metric(
    name="omnipipeline_requests_in_flight", kind="gauge", help="Requests that were admitted and have not ended"
)
REQUESTS_RETRIED: Final = Metric(
    name="omnipipeline_requests_retried_total", kind="counter", help="Attempts after a request's first"
)
REVISION_REQUESTS: Final = Metric(
    name="omnipipeline_revision_requests_total",
    kind="counter",
    help="Attempts on a pipeline revision that is served: completed, or failed by the pipeline's fault",
    labels=("revision", "outcome"),
)
REVISION_TIME: Final = Metric(
    name="omnipipeline_revision_request_seconds",
    kind="histogram",
    help="Time from an attempt's beginning to the request's end, on a pipeline revision that is served",
    labels=("revision",),
    buckets=_OF_HTTP,
)
REQUESTS_WAITING: Final = Metric(
    name="omnipipeline_requests_waiting",
    kind="gauge",
    help="Requests that wait for an instance of a process group that has none",
    labels=("group",),
)
WAITING_BYTES: Final = Metric(
    name="omnipipeline_waiting_bytes", kind="gauge", help="Bytes of the requests that wait for an instance"
)
REQUESTS_NOT_HELD: Final = Metric(
    name="omnipipeline_requests_not_held_total",
    kind="counter",
    help="Requests refused while a group has no instance: none is expected (gone), or too many requests or bytes wait",
    labels=("reason",),
)
RETAINED_BODY_BYTES: Final = Metric(
    name="omnipipeline_retained_body_bytes", kind="gauge", help="Bytes of requests kept to send them again"
)
INSTANCES_READY: Final = Metric(
    name="omnipipeline_instances_ready",
    kind="gauge",
    help="Instances of a process group to which requests may be bound",
    labels=("group",),
)
GROUP_ARRIVALS: Final = Metric(
    name="omnipipeline_group_arrivals_total",
    kind="counter",
    help="Requests that need the process group, be they admitted or refused: counted without an instance, too",
    labels=("group",),
)
GROUP_DEMAND: Final = Metric(
    name="omnipipeline_group_demand",
    kind="gauge",
    help="Requests at work and waiting at the stage of the group that needs most instances, and for an instance of it",
    labels=("group",),
)
GROUP_PLACES: Final = Metric(
    name="omnipipeline_group_places",
    kind="gauge",
    help="Requests that one instance of the group works on at once",
    labels=("group",),
)
STAGE_WAITING: Final = Metric(
    name="omnipipeline_stage_waiting",
    kind="gauge",
    help="Requests in the stage's queue, all instances together",
    labels=("stage",),
)
STAGE_RUNNING: Final = Metric(
    name="omnipipeline_stage_running",
    kind="gauge",
    help="Requests that the stage computes, all instances together",
    labels=("stage",),
)
STAGE_BUSY: Final = Metric(
    name="omnipipeline_stage_busy_ratio",
    kind="gauge",
    help="Share of the last second in which an instance of the stage computed a request or more, their mean",
    labels=("stage",),
)
STAGE_QUEUE_TIME: Final = Metric(
    name="omnipipeline_stage_queue_seconds",
    kind="histogram",
    help="Time of a request in the stage's queue",
    labels=("stage",),
    buckets=_OF_STAGES,
)
STAGE_RUN_TIME: Final = Metric(
    name="omnipipeline_stage_run_seconds",
    kind="histogram",
    help="Time of a request in the stage's function",
    labels=("stage",),
    buckets=_OF_STAGES,
)

#: A voice's first sound and a model's first token: most services promise less than a second.
_OF_FIRSTS: Final = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60)
_OF_GAPS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)
_OF_FACTORS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10)
TIME_TO_FIRST_TOKEN: Final = Metric(
    name="omnipipeline_time_to_first_token_seconds",
    kind="histogram",
    help="Time from the request read to the first text of a streamed answer",
    labels=("route",),
    buckets=_OF_FIRSTS,
)
TIME_TO_FIRST_AUDIO: Final = Metric(
    name="omnipipeline_time_to_first_audio_seconds",
    kind="histogram",
    help="Time from the request read to the first audio of a streamed answer",
    labels=("route",),
    buckets=_OF_FIRSTS,
)
INTER_TOKEN_LATENCY: Final = Metric(
    name="omnipipeline_inter_token_latency_seconds",
    kind="histogram",
    help="Time between two texts of a streamed answer: two tokens, where the stage streams tokens",
    labels=("route",),
    buckets=_OF_GAPS,
)
TOKENS: Final = Metric(
    name="omnipipeline_tokens_total",
    kind="counter",
    help="Tokens that stages report with omni.Usage, by kind: prompt or completion",
    labels=("route", "kind"),
)
REAL_TIME_FACTOR: Final = Metric(
    name="omnipipeline_real_time_factor",
    kind="histogram",
    help="Time from the request read to the last audio, by the audio's length; below 1: faster than it plays",
    labels=("route",),
    buckets=_OF_FACTORS,
)
AUDIO_SECONDS: Final = Metric(
    name="omnipipeline_audio_seconds_total", kind="counter", help="Length of the audio in answers", labels=("route",)
)
AUDIO_UNDERRUNS: Final = Metric(
    name="omnipipeline_audio_underruns_total",
    kind="counter",
    help="Times that a client playing a streamed answer ran out of audio before the next piece came",
    labels=("route",),
)

REALTIME_SESSIONS: Final = Metric(
    name="omnipipeline_realtime_sessions", kind="gauge", help="Open sessions of /v1/realtime"
)
REALTIME_TURNS: Final = Metric(
    name="omnipipeline_realtime_turns_total",
    kind="counter",
    help="Turns of speech that have ended: found by the detector or committed by the client",
)
REALTIME_BARGE_INS: Final = Metric(
    name="omnipipeline_realtime_barge_ins_total", kind="counter", help="Responses that speech has interrupted"
)
REALTIME_FIRST_SOUND: Final = Metric(
    name="omnipipeline_realtime_first_sound_seconds",
    kind="histogram",
    help="Time from the end of a turn of speech, as it was found or committed, to the first sound of its answer",
    buckets=_OF_FIRSTS,
)

TRACES_SENT: Final = Metric(
    name="omnipipeline_traces_sent_total", kind="counter", help="Requests whose spans an OpenTelemetry collector took"
)
TRACES_DROPPED: Final = Metric(
    name="omnipipeline_traces_dropped_total",
    kind="counter",
    help="Sampled requests whose spans were dropped: the collector was unreachable for too long, or refused them",
)

_OF_PROCESS: Final = ("process",)
_OF_EDGE: Final = ("process", "source", "target", "relay")
_OF_RELAY: Final = ("process", "relay")
TRANSFERS_IN_FLIGHT: Final = Metric(
    name="omnipipeline_transfers_in_flight",
    kind="gauge",
    help="Payloads sent by relay that their receivers have not released",
    labels=_OF_PROCESS,
)
SENDS_QUEUED: Final = Metric(
    name="omnipipeline_sends_queued", kind="gauge", help="Payloads that wait for credit or memory", labels=_OF_PROCESS
)
EDGE_TRANSFER_BYTES: Final = Metric(
    name="omnipipeline_edge_transfer_bytes_total",
    kind="counter",
    help="Bytes of tensors and long values sent by relay on an edge; payloads inside a message are not counted",
    labels=_OF_EDGE,
)
EDGE_TRANSFERS_IN_FLIGHT: Final = Metric(
    name="omnipipeline_edge_transfers_in_flight",
    kind="gauge",
    help="Payloads of an edge sent by relay that their receivers have not released",
    labels=_OF_EDGE,
)
EDGE_COPIED_BYTES: Final = Metric(
    name="omnipipeline_edge_copied_bytes_total",
    kind="counter",
    help="Those of these bytes that the sender copied into memory that the relay reads",
    labels=_OF_EDGE,
)
EDGE_OLDEST_TRANSFER: Final = Metric(
    name="omnipipeline_edge_oldest_transfer_seconds",
    kind="gauge",
    help="Age of the oldest of an edge's transfers in flight",
    labels=_OF_EDGE,
)
EDGE_QUARANTINED: Final = Metric(
    name="omnipipeline_edge_quarantined_transfers",
    kind="gauge",
    help="Transfers in flight whose requests were aborted: their slots are not used again before their release",
    labels=_OF_EDGE,
)
EDGE_FAILOVERS: Final = Metric(
    name="omnipipeline_edge_failovers_total",
    kind="counter",
    help="Failovers of an edge to this relay",
    labels=_OF_EDGE,
)
EDGE_RETRIES: Final = Metric(
    name="omnipipeline_edge_retries_total",
    kind="counter",
    help="Payloads sent by relay on an edge for a second or later attempt of their request",
    labels=_OF_EDGE,
)
EDGE_INSTANCES: Final = Metric(
    name="omnipipeline_edge_instances",
    kind="gauge",
    help="Instances of an edge's target, by the relay that is used to them and the medium of its bytes",
    labels=(*_OF_EDGE, "medium"),
)
CONTROL_EVENTS: Final = Metric(
    name="omnipipeline_control_events_total",
    kind="counter",
    help="Events of the control plane: received, resent, malformed, …",
    labels=("process", "event"),
)
ARENA_BYTES: Final = Metric(
    name="omnipipeline_arena_bytes", kind="gauge", help="Size of the process's arena", labels=_OF_PROCESS
)
ARENA_BYTES_IN_USE: Final = Metric(
    name="omnipipeline_arena_bytes_in_use", kind="gauge", help="Bytes of slots in use", labels=_OF_PROCESS
)
ARENA_BYTES_RESIDENT: Final = Metric(
    name="omnipipeline_arena_bytes_resident",
    kind="gauge",
    help="Bytes of the arena that occupy memory",
    labels=_OF_PROCESS,
)
ARENA_SLOTS: Final = Metric(
    name="omnipipeline_arena_slots", kind="gauge", help="Slots by state", labels=("process", "state")
)
LATE_RELEASES: Final = Metric(
    name="omnipipeline_relay_late_releases_total",
    kind="counter",
    help="Releases of transfers that were no longer known",
    labels=_OF_PROCESS,
)


def _of_relay(name: str, help: str, *, kind: Literal["counter", "gauge"] = "counter") -> Metric:
    return Metric(name=f"omnipipeline_relay_{name}", kind=kind, help=help, labels=_OF_RELAY)


#: Key of `relays.base.Relay.stats` -> its metric.
RELAY: Final[Mapping[str, Metric]] = {
    "sent_transfers": _of_relay("sent_transfers_total", "Payloads sent"),
    "sent_bytes": _of_relay("sent_bytes_total", "Bytes of payloads sent"),
    "received_transfers": _of_relay("received_transfers_total", "Payloads received"),
    "received_bytes": _of_relay("received_bytes_total", "Bytes of payloads received"),
    "copied_bytes": _of_relay("copied_bytes_total", "Bytes copied into the arena"),
    "unreleased_transfers": _of_relay("unreleased_transfers", "Payloads sent and not released", kind="gauge"),
    "unreleased_bytes": _of_relay("unreleased_bytes", "Bytes of payloads sent and not released", kind="gauge"),
    "pinned_transfers": _of_relay("pinned_transfers", "Payloads received and still referenced", kind="gauge"),
    "pinned_bytes": _of_relay("pinned_bytes", "Bytes of payloads received and still referenced", kind="gauge"),
    "unclaimed_bytes": _of_relay("unclaimed_bytes", "Bytes received before they were announced", kind="gauge"),
    "awaited_transfers": _of_relay("awaited_transfers", "Payloads announced and not yet received", kind="gauge"),
    "dropped_transfers": _of_relay("dropped_transfers_total", "Payloads received and dropped"),
    "malformed_messages": _of_relay("malformed_messages_total", "Messages dropped because they are not a relay's"),
    "failovers": _of_relay("failovers_total", "Peers that another relay serves since this one failed"),
    "handshake_failures": _of_relay("handshake_failures_total", "Connections refused for a wrong key or protocol"),
}


def _of_engine(
    short: str, help: str, *, kind: Literal["counter", "gauge"] = "gauge", labels: tuple[str, ...] = ()
) -> Metric:
    return Metric(name=f"omnipipeline_engine_{short}", kind=kind, help=help, labels=(*_OF_PROCESS, "stage", *labels))


#: Metrics by the names in `Inbox.gauges` of an `omni.Autoregressive` stage.
ENGINE: Final[Mapping[str, Metric]] = {
    "waiting": _of_engine("requests_waiting", "Requests in the engine's queue"),
    "running": _of_engine("requests_running", "Requests of which each step computes tokens"),
    "kv_blocks": _of_engine("kv_blocks", "Blocks of the KV cache"),
    "kv_blocks_used": _of_engine("kv_blocks_used", "Blocks of requests that are computed"),
    "kv_blocks_cached": _of_engine("kv_blocks_cached", "Blocks with a known prefix, used or not"),
    "steps_total": _of_engine("steps_total", "Steps computed", kind="counter"),
    "preemptions_total": _of_engine(
        "preemptions_total", "Preemptions: requests whose blocks went to an older request", kind="counter"
    ),
    "prompt_tokens_total": _of_engine("prompt_tokens_total", "Tokens of prompts", kind="counter"),
    "prefix_hit_tokens_total": _of_engine(
        "prefix_hit_tokens_total", "Those of these tokens that were found in the prefix cache", kind="counter"
    ),
    "generated_tokens_total": _of_engine("generated_tokens_total", "Tokens generated", kind="counter"),
}

#: The same as `ENGINE`, of a stage with ``speculative_config``. Names are vLLM's.
SPECULATION: Final[Mapping[str, Metric]] = {
    "spec_decode_drafts_total": _of_engine(
        "spec_decode_drafts_total", "Drafts of next tokens that were verified", kind="counter"
    ),
    "spec_decode_draft_tokens_total": _of_engine(
        "spec_decode_draft_tokens_total", "Tokens of these drafts", kind="counter"
    ),
    "spec_decode_accepted_tokens_total": _of_engine(
        "spec_decode_accepted_tokens_total", "Those of these tokens that are of answers", kind="counter"
    ),
}

#: The same as `ENGINE`, of a stage with ``lora_modules`` or ``max_loras``.
LORA: Final[Mapping[str, Metric]] = {
    "adapters": _of_engine("adapters", "LoRA adapters in memory"),
    "adapter_bytes": _of_engine("adapter_bytes", "Their bytes"),
    "adapter_requests_total": _of_engine(
        "adapter_requests_total", "Requests with this adapter since it was loaded", kind="counter", labels=("adapter",)
    ),
}

#: The same as `ENGINE`, of a stage with ``disaggregation`` or ``kv_folder``.
KV: Final[Mapping[str, Metric]] = {
    "kv_loads_under_way": _of_engine("kv_loads", "Prompts that wait for blocks of a prefill instance or a folder"),
    "kv_least_tokens": _of_engine(
        "kv_least_tokens", "Tokens from which on a prompt is asked of a prefill instance, as measured; 0: of others"
    ),
    "kv_loads_total": _of_engine("kv_loads_total", "Prompts asked of a prefill instance or a folder", kind="counter"),
    "kv_received_tokens_total": _of_engine(
        "kv_received_tokens_total", "Tokens of prompts whose blocks were received", kind="counter"
    ),
    "kv_received_blocks_total": _of_engine("kv_received_blocks_total", "Blocks received", kind="counter"),
    "kv_received_bytes_total": _of_engine("kv_received_bytes_total", "Their bytes", kind="counter"),
    "kv_sent_blocks_total": _of_engine("kv_sent_blocks_total", "Blocks sent, or kept in a folder", kind="counter"),
    "kv_sent_bytes_total": _of_engine("kv_sent_bytes_total", "Their bytes", kind="counter"),
    "kv_hidden_bytes_total": _of_engine(
        "kv_hidden_bytes_total",
        "Those of the bytes received that came before prefill had computed the last block of their prompt",
        kind="counter",
    ),
    "kv_local_total": _of_engine(
        "kv_local_total",
        "Prompts computed here, nobody asked: short, unbound (no prefill instance), absent (from the folder), unfit",
        kind="counter",
        labels=("reason",),
    ),
    "kv_failed_total": _of_engine(
        "kv_failed_total",
        "Prompts asked for and computed here: lost, declined, silent, refused (what came), unreadable, error",
        kind="counter",
        labels=("reason",),
    ),
    "kv_leases": _of_engine("kv_leases", "Prompts that decode instances have asked of this prefill instance"),
    "kv_leases_renewed_total": _of_engine(
        "kv_leases_renewed_total", "Renewals of such prompts' leases", kind="counter"
    ),
    "kv_leases_expired_total": _of_engine(
        "kv_leases_expired_total", "Such prompts given up: no renewal came for 30 s", kind="counter"
    ),
}


def _of_cache(short: str, help: str, *, kind: Literal["counter", "gauge"] = "counter") -> Metric:
    return Metric(name=f"omnipipeline_stage_cache_{short}", kind=kind, help=help, labels=(*_OF_PROCESS, "stage"))


#: Metrics by the names that `omni.Batched.gauges` may give.
CACHE: Final[Mapping[str, Metric]] = {
    "cache_hits_total": _of_cache("hits_total", "Values that the stage's cache had"),
    "cache_misses_total": _of_cache("misses_total", "Values that it had not, and that were computed"),
    "cache_bytes": _of_cache("bytes", "Bytes of the values in it", kind="gauge"),
}

#: The same as `RELAY`, of keys that only the relays nixl, mooncake, nccl and cuda_ipc have.
NIXL: Final[Mapping[str, Metric]] = {
    "stray_notices": _of_relay("stray_notices_total", "Notices of peers that belong to no transfer"),
    "library_bytes": _of_relay(
        "library_bytes_total", "Bytes that NIXL itself reports to have moved from or to this process"
    ),
    "copied_out_bytes": _of_relay("copied_out_bytes_total", "Bytes copied out of the receive arena to free it"),
    "receive_bytes_in_use": _of_relay("receive_bytes_in_use", "Bytes of the receive arena in use", kind="gauge"),
    "waiting_transfers": _of_relay("waiting_transfers", "Payloads that wait for memory to receive into", kind="gauge"),
    "incoming_transfers": _of_relay("incoming_transfers", "Payloads that peers are writing here", kind="gauge"),
    "incoming_bytes": _of_relay("incoming_bytes", "Bytes received so far of transfers in progress", kind="gauge"),
    "outgoing_transfers": _of_relay("outgoing_transfers", "Payloads being written to peers", kind="gauge"),
    "quarantined_sends": _of_relay("quarantined_sends", "Payloads given up that a peer may still use", kind="gauge"),
    "quarantined_send_bytes": _of_relay("quarantined_send_bytes", "Their bytes", kind="gauge"),
    "quarantined_receives": _of_relay(
        "quarantined_receives", "Regions given up that a peer may still write", kind="gauge"
    ),
    "quarantined_receive_bytes": _of_relay("quarantined_receive_bytes", "Their bytes", kind="gauge"),
    "staged_bytes": _of_relay("staged_bytes_total", "Bytes of GPUs that cuda_ipc sent by the host's memory"),
    "gpu_bytes": _of_relay("gpu_bytes", "Bytes of GPUs that cuda_ipc sends from", kind="gauge"),
    "gpu_bytes_in_use": _of_relay("gpu_bytes_in_use", "Those of these bytes that are of slots in use", kind="gauge"),
    "gpu_quarantined_slots": _of_relay(
        "gpu_quarantined_slots", "Slots on GPUs of aborted requests that a peer may still read", kind="gauge"
    ),
}

PROCESS_READY: Final = Metric(
    name="omnipipeline_process_ready", kind="gauge", help="1 while the process can serve", labels=_OF_PROCESS
)
PROCESS_RESTARTS: Final = Metric(
    name="omnipipeline_process_restarts_total",
    kind="counter",
    help="Starts of the process after the first",
    labels=_OF_PROCESS,
)
PROCESS_RESIDENT_MEMORY: Final = Metric(
    name="omnipipeline_process_resident_memory_bytes", kind="gauge", help="Memory of the process", labels=_OF_PROCESS
)
PROCESS_CPU: Final = Metric(
    name="omnipipeline_process_cpu_seconds_total",
    kind="counter",
    help="Processor time of the process and of what it has started",
    labels=_OF_PROCESS,
)

#: Metrics of requests, stages and HTTP, served by coordinators.
COORDINATOR: Final = (
    REQUESTS,
    REQUESTS_IN_FLIGHT,
    REQUESTS_RETRIED,
    REVISION_REQUESTS,
    REVISION_TIME,
    REQUESTS_WAITING,
    WAITING_BYTES,
    REQUESTS_NOT_HELD,
    RETAINED_BODY_BYTES,
    INSTANCES_READY,
    GROUP_ARRIVALS,
    GROUP_DEMAND,
    GROUP_PLACES,
    STAGE_WAITING,
    STAGE_RUNNING,
    STAGE_BUSY,
    STAGE_QUEUE_TIME,
    STAGE_RUN_TIME,
    HTTP_REQUESTS,
    HTTP_FIRST_BYTE,
    HTTP_REQUEST_TIME,
    HTTP_SENT_BYTES,
    HTTP_HELD_BYTES,
    TRACES_SENT,
    TRACES_DROPPED,
)
#: Metrics of the certificate, served by coordinators with TLS.
TLS: Final = (HTTP_CERTIFICATE_START, HTTP_CERTIFICATE_END, HTTP_CERTIFICATE_REFUSED)
#: Service-level metrics of voice and chat, served by coordinators. They count answers that have text, audio or usage.
SERVICE: Final = (
    TIME_TO_FIRST_TOKEN,
    TIME_TO_FIRST_AUDIO,
    INTER_TOKEN_LATENCY,
    TOKENS,
    REAL_TIME_FACTOR,
    AUDIO_SECONDS,
    AUDIO_UNDERRUNS,
)
#: Metrics of live speech, served by coordinators once a session was opened.
REALTIME: Final = (REALTIME_SESSIONS, REALTIME_TURNS, REALTIME_BARGE_INS, REALTIME_FIRST_SOUND)
#: Metrics of the edges of a process, all but the last once they have sent something by relay; among `PLANES`.
EDGES: Final = (
    EDGE_TRANSFER_BYTES,
    EDGE_TRANSFERS_IN_FLIGHT,
    EDGE_COPIED_BYTES,
    EDGE_OLDEST_TRANSFER,
    EDGE_QUARANTINED,
    EDGE_FAILOVERS,
    EDGE_RETRIES,
    EDGE_INSTANCES,
)
#: Metrics of a process's planes, served by its pod. A coordinator serves its own; in `omni up`, those of all processes.
PLANES: Final = (
    TRANSFERS_IN_FLIGHT,
    SENDS_QUEUED,
    *EDGES,
    CONTROL_EVENTS,
    ARENA_BYTES,
    ARENA_BYTES_IN_USE,
    ARENA_BYTES_RESIDENT,
    ARENA_SLOTS,
    LATE_RELEASES,
    *RELAY.values(),
)
#: Metrics of stages that generate tokens; served as `PLANES`.
ENGINES: Final = (*ENGINE.values(), *KV.values(), *SPECULATION.values(), *LORA.values())
#: Those of stages that report a cache.
CACHES: Final = tuple(CACHE.values())
#: Metrics of processes that have opened the relay nixl, mooncake, nccl or cuda_ipc, beside `PLANES`.
PLANES_WITH_NIXL: Final = tuple(NIXL.values())
#: Metrics of the operating system's processes in a stage's pod, served by the pod.
PROCESSES: Final = (PROCESS_READY, PROCESS_RESTARTS, PROCESS_RESIDENT_MEMORY, PROCESS_CPU)
