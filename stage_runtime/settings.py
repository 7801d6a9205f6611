"""A process's settings, from its environment: read once, checked, frozen.

Here: the variables that start a process, and the plan and key files they name. Not here: those of telemetry, the torch
profiler and caches, which their rooms read; writing these variables for a child (`processes.starting.launching`).
Called by `__main__` alone; the result is passed on.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from omnipipeline_spec.types.plan import PLAN_VERSION, CoordinatorPlan, GroupPlan, StagePlan, UnitPlan
from omnipipeline_spec.types.pods import CONTROL_PORT, HTTP_PORT, PROBE_PORT
from stage_runtime import breakpoints
from stage_runtime.errors import UNDECODABLE, ConfigurationError

KEY_BYTES = 32
HTTP_QUIET_S = 10  # longer than httpx (5 s) and undici (4 s) keep a connection at rest
TERMINATION_LOG = "/dev/termination-log"  # where the kubelet looks for the reason of a container's end

LogFormat = Literal["text", "json"]
Plan = TypeVar("Plan", UnitPlan, CoordinatorPlan)


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of every process of a pipeline."""

    control_key: bytes | None = None  #: 32 bytes; None: no CURVE.
    profile_root: Path
    log_format: LogFormat = "text"
    log_level: str = "info"  #: One of `LOG_LEVELS`.
    arena_bytes: int | None = None  #: Size of the relay's arena; None: derived from the plan.
    status_fd: int | None = None  #: Write end of the pipe to the supervisor; None: started by hand.
    pod_uid: str = ""  #: The uid of Kubernetes; a fact by which a relay is chosen.
    #: The folder where the supervisor has put ``code.inline`` already (it is on PYTHONPATH).
    code_dir: Path | None = None


class StageSettings(ProcessSettings, frozen=True, kw_only=True):
    """One process of one process group."""

    plan: UnitPlan
    group: GroupPlan
    coordinators: tuple[str, ...]  #: Control endpoints; a host name may stand for several addresses.
    listen: str  #: Control endpoint to bind.
    advertise: str  #: The one that is advertised to peers.
    tp_rank: int = 0
    tp_endpoints: tuple[str, ...] = ()  #: Control endpoints of ranks 1..n-1.
    rendezvous: str | None = None  #: ``tcp://host:port`` of this TP instance's ranks.
    gpus: tuple[str, ...] | None = None  #: Device ids of this replica. Empty: CPU. None: all that the process sees.
    debug_values: bool = False  #: Log stages that write into tensors that they received or sent.
    debugged: bool = False  #: Somebody at a terminal may stop its stages: no progress is not a fault.

    @property
    def process(self) -> str:
        """The OS process's name, as the plan has it."""
        return self.group.processes[self.tp_rank]

    def stages(self) -> tuple[StagePlan, ...]:
        """The stages of this process, in spec order."""
        return tuple(stage for stage in self.plan.stages if stage.name in self.group.stages)

    def gpu_id(self, stage: StagePlan) -> int | None:
        """The local device of this rank of ``stage``; None on CPU."""
        if not stage.gpus or self.gpus == ():
            return None
        return stage.gpus[self.tp_rank]


class CoordinatorSettings(ProcessSettings, frozen=True, kw_only=True):
    """The coordinator's process."""

    plan: CoordinatorPlan
    revisions: Path  #: JSON list of PipelineRevision, newest last; re-read when it changes.
    listen: str
    advertise: str
    publish: str  #: Endpoint of the PUB socket.
    publish_advertise: str  #: The one that is advertised to stages.
    http_host: str = "127.0.0.1"
    http_port: int = HTTP_PORT  #: 0: any free one.
    admin_port: int = 0  #: 0: the admin routes are served on the HTTP port.
    probe_port: int = 0  #: 0: probes, metrics and status are served on the HTTP port.
    api_key_file: Path | None = None  #: Read again when it changes.
    api_keys: tuple[str, ...] = ()  #: Bearer tokens of which clients must send one; empty: none is required.
    #: Files of the HTTP server's certificate and its key, read again when they change; None: it serves plain HTTP.
    certificate: tuple[Path, Path] | None = None
    shown_certificate: Path | None = None  #: Written: the certificate that clients are shown, for a run's own programs.
    http_hosts: tuple[str, ...] = ()  #: Names, beside those of the loopback, allowed in Host and Origin headers.
    #: Bytes of bodies and media of all requests in flight; None: derived from the memory.
    bodies_nbytes: int | None = None
    answers_nbytes: int | None = None  #: Bytes of answers that are not read yet; None: derived from the memory.
    http_quiet_s: int = HTTP_QUIET_S  #: While it drains, a client's connection that rests for so long is closed.


class SupervisorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """PID 1 of a stage pod."""

    plan: UnitPlan
    plan_file: Path
    coordinators: str  #: Passed on as it is.
    address: str  #: The pod's IP address, which is advertised to peers.
    control_port: int = CONTROL_PORT  #: The port of the first group.
    probe_host: str = "*"  #: Every address of the pod.
    probe_port: int = PROBE_PORT
    termination_log: Path | None = None  #: None: no kubelet reads it.
    grace_s: float
    startup_timeout_s: float
    passed_on: dict[str, str]  #: Variables that stages read and PID 1 does not.


def stage(environ: Mapping[str, str]) -> StageSettings:
    """Settings of ``python -m stage_runtime stage``.

    Raises: ConfigurationError: names the variable, and the file when it is about one.
    """
    read = _EnvironmentReader(environ)
    plan = _plan(read, UnitPlan)
    group = _group(plan, read.text("OMNI_GROUP"))
    listen = read.text("OMNI_LISTEN")
    rank = read.integer("OMNI_TP_RANK", 0, least=0)
    if rank >= group.tp_size:
        raise ConfigurationError(f"OMNI_TP_RANK: {rank}, but {group.name} has ranks 0..{group.tp_size - 1}")
    rendezvous = read.optional("OMNI_RENDEZVOUS")
    if group.tp_size > 1 and rendezvous is None:
        raise ConfigurationError(f"OMNI_RENDEZVOUS is not set, and {group.name} has {group.tp_size} ranks")
    return StageSettings(
        plan=plan,
        group=group,
        coordinators=read.several("OMNI_COORDINATOR"),
        listen=listen,
        advertise=read.optional("OMNI_ADVERTISE") or listen,
        tp_rank=rank,
        tp_endpoints=_tp_endpoints(read, group),
        rendezvous=rendezvous,
        gpus=None if "OMNI_GPUS" not in environ else tuple(read.several("OMNI_GPUS", empty=True)),
        debug_values=read.flag("OMNI_DEBUG_VALUES"),
        debugged=breakpoints.TERMINAL in environ,
        **_common(read),
    )


def coordinator(environ: Mapping[str, str]) -> CoordinatorSettings:
    """Settings of ``python -m stage_runtime coordinator``.

    Raises: ConfigurationError: names the variable, and the file when it is about one.
    """
    read = _EnvironmentReader(environ)
    plan = _plan(read, CoordinatorPlan)
    listen, publish = read.text("OMNI_LISTEN"), read.text("OMNI_PUBLISH")
    return CoordinatorSettings(
        plan=plan,
        revisions=Path(read.text("OMNI_REVISIONS")),
        listen=listen,
        advertise=read.optional("OMNI_ADVERTISE") or listen,
        publish=publish,
        publish_advertise=read.optional("OMNI_PUBLISH_ADVERTISE") or publish,
        http_host=read.optional("OMNI_HTTP_HOST") or "127.0.0.1",
        http_port=read.port("OMNI_HTTP_PORT", plan.http_port),
        admin_port=read.port("OMNI_ADMIN_PORT", 0),
        probe_port=read.port("OMNI_PROBE_PORT", 0),
        api_key_file=Path(read.text("OMNI_API_KEY_FILE")) if read.optional("OMNI_API_KEY_FILE") else None,
        api_keys=_api_keys(read),
        certificate=_certificate(read),
        shown_certificate=Path(read.text("OMNI_TLS_SHOWN_FILE")) if read.optional("OMNI_TLS_SHOWN_FILE") else None,
        http_hosts=tuple(host.lower() for host in read.several("OMNI_HTTP_HOSTS", empty=True)),
        bodies_nbytes=read.integer("OMNI_HTTP_BODIES_MB", 0, least=1) << 20 or None,
        answers_nbytes=read.integer("OMNI_HTTP_ANSWERS_MB", 0, least=1) << 20 or None,
        http_quiet_s=read.integer("OMNI_HTTP_QUIET_S", HTTP_QUIET_S, least=0, most=3600),
        **_common(read),
    )


def supervisor(environ: Mapping[str, str]) -> SupervisorSettings:
    """Settings of ``python -m stage_runtime supervisor``.

    Raises: ConfigurationError: names the variable, and the file when it is about one.
    """
    read = _EnvironmentReader(environ)
    plan = _plan(read, UnitPlan)
    return SupervisorSettings(
        plan=plan,
        plan_file=Path(read.text("OMNI_PLAN")),
        coordinators=read.text("OMNI_COORDINATOR"),
        address=read.text("OMNI_POD_IP"),
        control_port=read.port("OMNI_CONTROL_PORT", CONTROL_PORT),
        probe_host=read.optional("OMNI_PROBE_HOST") or "*",
        probe_port=read.port("OMNI_PROBE_PORT", PROBE_PORT),
        termination_log=termination_log(environ),
        grace_s=plan.drain_timeout_s,
        startup_timeout_s=plan.startup_deadline_s,
        passed_on={name: environ[name] for name in (*_PASSED_ON, "OMNI_DEBUG_VALUES") if name in environ},
    )


def termination_log(environ: Mapping[str, str]) -> Path | None:
    """The file that the kubelet reads when this program ends; None: it reads none, or a supervisor reads our pipe."""
    given = environ.get("OMNI_TERMINATION_LOG")
    if given:
        return Path(given)
    usual = Path(TERMINATION_LOG)
    return usual if "OMNI_STATUS_FD" not in environ and usual.is_file() else None


def prepare(environ: MutableMapping[str, str], settings: StageSettings | CoordinatorSettings) -> None:
    """Make the environment what factories may count on, before anything of theirs is imported.

    The plan's defaults give way to what the process was started with. The status pipe is hidden from user code's
    own children, or they would hold it open after this process is dead.
    """
    for name, value in settings.plan.env_defaults.items():
        environ.setdefault(name, value)
    if isinstance(settings, StageSettings) and settings.gpus is not None:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpus)
    environ.pop("OMNI_STATUS_FD", None)
    if settings.status_fd is not None:
        os.set_inheritable(settings.status_fd, False)


class _EnvironmentReader:
    """One environment, with errors that name the variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str) -> str:
        value = self._environ.get(name, "")
        if not value:
            raise ConfigurationError(f"{name} is not set")
        return value

    def optional(self, name: str) -> str | None:
        return self._environ.get(name) or None

    def several(self, name: str, *, empty: bool = False) -> tuple[str, ...]:
        value = self._environ.get(name, "") if empty else self.text(name)
        return tuple(part.strip() for part in value.split(",") if part.strip())

    def integer(self, name: str, default: int, *, least: int, most: int | None = None) -> int:
        value = self.optional(name)
        if value is None:
            return default
        if not value.isdecimal() or int(value) < least or (most is not None and int(value) > most):
            bound = f"{least}..{most}" if most is not None else f"{least} or more"
            raise ConfigurationError(f"{name}: {value!r} is not a whole number of {bound}")
        return int(value)

    def port(self, name: str, default: int) -> int:
        return self.integer(name, default, least=0, most=65535)

    def flag(self, name: str) -> bool:
        value = self.optional(name)
        if value not in (None, "0", "1"):
            raise ConfigurationError(f"{name}: {value!r} is neither 0 nor 1")
        return value == "1"

    def content(self, name: str) -> bytes:
        path = self.text(name)
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"{name}: {path}: {error.strerror}") from error


LOG_LEVELS = ("debug", "info", "warning", "error")
_PASSED_ON = (
    "OMNI_CONTROL_KEY_FILE",
    "OMNI_PROFILE_ROOT",
    "OMNI_LOG_FORMAT",
    "OMNI_LOG_LEVEL",
    "OMNI_ARENA_MB",
    "OMNI_POD_UID",
)


def _plan(read: _EnvironmentReader, kind: type[Plan]) -> Plan:
    path = read.text("OMNI_PLAN")
    try:
        plan = msgspec.json.decode(read.content("OMNI_PLAN"), type=kind)
    except UNDECODABLE as error:
        raise ConfigurationError(f"OMNI_PLAN: {path} is not a {kind.__name__}: {error}") from error
    if plan.version > PLAN_VERSION:
        raise ConfigurationError(
            f"OMNI_PLAN: {path} is of plan version {plan.version}, this program knows {PLAN_VERSION}: use a newer image"
        )
    return plan


def _group(plan: UnitPlan, name: str) -> GroupPlan:
    for group in plan.groups:
        if group.name == name:
            return group
    known = ", ".join(group.name for group in plan.groups)
    raise ConfigurationError(f"OMNI_GROUP: {name!r} is not a process group of unit {plan.name}, which has {known}")


def _tp_endpoints(read: _EnvironmentReader, group: GroupPlan) -> tuple[str, ...]:
    if group.tp_size == 1:
        return ()
    endpoints = read.several("OMNI_TP_ENDPOINTS")
    if len(endpoints) != group.tp_size - 1:
        raise ConfigurationError(
            f"OMNI_TP_ENDPOINTS: {len(endpoints)} endpoints for ranks 1..{group.tp_size - 1} of {group.name}"
        )
    return endpoints


def _common(read: _EnvironmentReader) -> dict[str, Any]:
    log_format = read.optional("OMNI_LOG_FORMAT") or "text"
    if log_format not in ("text", "json"):
        raise ConfigurationError(f"OMNI_LOG_FORMAT: {log_format!r} is neither text nor json")
    log_level = read.optional("OMNI_LOG_LEVEL") or "info"
    if log_level not in LOG_LEVELS:
        raise ConfigurationError(f"OMNI_LOG_LEVEL: expected one of {', '.join(LOG_LEVELS)}, got {log_level!r}")
    arena_mb = read.integer("OMNI_ARENA_MB", 0, least=1)
    status_fd = read.integer("OMNI_STATUS_FD", -1, least=0)
    code_dir = read.optional("OMNI_CODE_DIR")
    return {
        "control_key": _control_key(read),
        "profile_root": Path(read.optional("OMNI_PROFILE_ROOT") or default_profile_root()),
        "log_format": log_format,
        "log_level": log_level,
        "arena_bytes": arena_mb << 20 or None,
        "status_fd": None if status_fd < 0 else status_fd,
        "code_dir": None if code_dir is None else Path(code_dir),
        "pod_uid": read.optional("OMNI_POD_UID") or "",
    }


SOCKET_FOLDER_MOST = 60  # bytes: a socket in a folder in it has 40 more, and a path at most 107


def socket_folders(environ: Mapping[str, str]) -> tuple[str, str]:
    """The folder where a process makes folders for sockets of its own, and how their names begin.

    It is in the run's folder, where it has room for a socket's path: it goes with the run. The name has the process's
    life, so that its supervisor deletes what a killed one has left (`processes.supervision.reaper`).
    """
    run, life = environ.get("OMNI_RUN", ""), environ.get("OMNI_LIFE", "")
    where = run if 0 < len(run.encode()) <= SOCKET_FOLDER_MOST and Path(run).is_dir() else tempfile.gettempdir()
    return where, f"sockets-{life}-" if life else "omni-"


def default_profile_root() -> str:
    """The folder where profiles are written by default."""
    return str(Path(tempfile.gettempdir()) / "profiles")


def _control_key(read: _EnvironmentReader) -> bytes | None:
    if read.optional("OMNI_CONTROL_KEY_FILE") is None:
        return None
    key = read.content("OMNI_CONTROL_KEY_FILE")
    if len(key) != KEY_BYTES:
        raise ConfigurationError(f"OMNI_CONTROL_KEY_FILE: {len(key)} bytes, a control key has {KEY_BYTES}")
    return key


def _certificate(read: _EnvironmentReader) -> tuple[Path, Path] | None:
    names = ("OMNI_TLS_CERT_FILE", "OMNI_TLS_KEY_FILE")
    if not any(read.optional(name) for name in names):
        return None
    chain, key = (Path(read.text(name)) for name in names)
    return chain, key


def _api_keys(read: _EnvironmentReader) -> tuple[str, ...]:
    if read.optional("OMNI_API_KEY_FILE") is None:
        return ()
    return api_keys(read.content("OMNI_API_KEY_FILE"), "OMNI_API_KEY_FILE")


def api_keys(content: bytes, place: str) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines count for nothing.

    Raises: ConfigurationError: names ``place``: the key is missing, or one that no header can carry.
    """
    try:
        keys = tuple(line.strip() for line in content.decode().splitlines() if line.strip())
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{place}: {error}") from error
    if not keys:
        raise ConfigurationError(f"{place}: expected a key, and an empty one would admit every client")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ConfigurationError(f"{place}: a key is a line of printable ASCII without spaces")
    return keys
