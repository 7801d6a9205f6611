"""Messages between an engine process, its clients and the coordinator of several. Types only.

A request's message is ``[type, header, body, more frames]``: when the body cannot be read, the header names the
request that fails. An engine's message is one `EngineCoreOutputs`, or ``[ENGINE_CORE_DEAD, identity]``, or
``[KV, identity, body, more frames]``.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreOutput
from stage_runtime.errors import ProtocolError, RequestError, describe, safe_str

ENGINE_CORE_DEAD: Final = b"ENGINE_CORE_DEAD"
KV: Final = b"KV"  # then an engine's identity, and a `crossing.ToStage`
# last an engine's identity: it is connected. The message to clients has the pid, 8 bytes, between both
READY: Final = b"READY"
COORDINATOR: Final = -1  # in place of a client's index
NAME_MOST: Final = 1024

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_MOST)]
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


def identity(engine_index: int) -> bytes:
    """The identity by which a client's socket addresses an engine."""
    return engine_index.to_bytes(2, "little")


class EngineCoreRequestType(Enum):
    ADD = b"\x00"  #: `AddHeader`, then an `EngineCoreRequest`.
    ABORT = b"\x01"  #: Ids.
    START_DP_WAVE = b"\x02"  #: `StartWave`, from the coordinator.
    UTILITY = b"\x03"  #: `UtilityCall`, then its arguments.
    RELEASE = b"\x04"  #: An id that was held.
    WAKEUP = b"\x05"  #: Nothing: inside the process.
    EXTEND = b"\x06"  #: `AddHeader`, then a `prompt_rows.Extension`.
    ATTACH = b"\x07"  #: `Attach`: a further front end is there.
    KV = b"\x08"  #: A `crossing.ToEngine`.


class AddHeader(msgspec.Struct, frozen=True, array_like=True):
    request_id: Name
    client_index: Natural = 0


class UtilityCall(msgspec.Struct, frozen=True, array_like=True):
    call_id: int
    method: Name
    client_index: Natural = 0


class Attach(msgspec.Struct, frozen=True, array_like=True):
    """pid: of the front end. When that process ends, its requests are aborted."""

    client_index: Natural
    pid: Annotated[int, msgspec.Meta(ge=1)]


class StartWave(msgspec.Struct, frozen=True, array_like=True):
    """exclude: the rank of the engine that has begun it."""

    wave: Natural
    exclude: int


class SchedulerStats(msgspec.Struct, frozen=True, array_like=True):
    """An engine's sign of life, sent after a step, and now and then while it has nothing to compute.

    kv_blocks: all there are. held: requests that wait for something from outside, see `Scheduler.held`. parts:
    `EngineCore.gauges`.
    """

    waiting: int
    running: int
    step_counter: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    held: int = 0
    parts: dict[str, int] = {}


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """A request that the engine does not compute, with a code of `errors.CODES`. param: the field that is wrong."""

    request_id: str
    code: str
    message: str
    param: str | None = None


def refused(request_id: str, error: Exception) -> Refused:
    """The refusal that a client gets for an error which an engine raised while it checked a request."""
    match error:
        case RequestError():
            return Refused(request_id, error.code, safe_str(error.message), error.param)
        case ValueError() | ProtocolError():
            return Refused(request_id, "invalid_request", safe_str(error))
    return Refused(request_id, "stage_failed", describe(error))


class UtilityOutput(msgspec.Struct, frozen=True, array_like=True):
    """failure: what it raised; None: it returned ``result``."""

    call_id: int
    result: Any = None
    failure: str | None = None


class EngineCoreOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one step for one client. timestamp: of the engine's monotonic clock.

    scheduled: requests that are computed from now on, each with how many tokens of its prompt were cached.
    """

    engine_index: int = 0
    scheduled: tuple[tuple[str, int], ...] = ()
    outputs: tuple[EngineCoreOutput, ...] = ()
    refused: tuple[Refused, ...] = ()
    scheduler_stats: SchedulerStats | None = None
    utility_output: UtilityOutput | None = None
    timestamp: float = 0.0
    start_wave: int | None = None


# --- the handshake: EngineHello → Init → EngineLoading … → EngineReady or EngineFailed -------------------------------


class EngineHello(msgspec.Struct, frozen=True, tag="HELLO"):
    engine_index: int
    pid: int


class EngineLoading(msgspec.Struct, frozen=True, tag="LOADING"):
    """A report of loading, as of `StageContext.progress`. An engine may send any number before it is ready."""

    engine_index: int
    message: str
    done: float = 0.0
    total: float = 0.0
    unit: str = ""


class Coordination(msgspec.Struct, frozen=True, kw_only=True):
    """How engines and clients take part in data parallelism, in any process of this user.

    input, output, stats: the coordinator's addresses, the first two for engines, the last for clients. pid: its own.
    rendezvous: a file by which lockstep engines meet.
    """

    size: int
    input: str
    output: str
    stats: str
    pid: int
    lockstep: bool = False
    rendezvous: str = ""


class Init(msgspec.Struct, frozen=True, kw_only=True):
    """inputs, outputs: one of each for every client; the first client is the process that starts the engine. factory:
    a dotted name; called with ``kwargs``.
    """

    factory: str
    kwargs: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    coordination: Coordination | None = None


class EngineReady(msgspec.Struct, frozen=True, tag="READY"):
    """dp_stats_address: by which its clients read the counts of all engines; None: it is alone."""

    engine_index: int
    num_gpu_blocks: int
    dp_stats_address: str | None = None


class FrontEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a further front end of running engines must know, in any process of this user. engines: by rank,
    the pid and the number of blocks. index: its place among ``inputs`` and ``outputs``, where no other one is or was.
    """

    index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    engines: dict[int, tuple[int, int]]
    coordination: Coordination | None = None


class EngineFailed(msgspec.Struct, frozen=True, tag="FAILED"):
    engine_index: int
    message: str


# --- between clients and the coordinator: clients read `rules.autoregressive.waves.PublishState` -------------------


class Replaced(msgspec.Struct, frozen=True, tag="REPLACED"):
    """An engine has ended, and another one has its rank."""

    engine: Natural


class ScaleEngines(msgspec.Struct, frozen=True, tag="SCALE_ELASTIC_EP"):
    engines: Annotated[int, msgspec.Meta(ge=1, le=4096)]
