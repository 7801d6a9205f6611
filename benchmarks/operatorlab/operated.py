"""The operator as a process under its service account: starting it, its memory and metrics, its writes.

Here: only observing. Writes are read from the API server's audit log, so they are what arrived, not what was meant.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.operatorlab import ground
from benchmarks.operatorlab.ground import REPOSITORY, SYSTEM, Ground

ACCOUNT: Final = "omni-omnipipeline"
USER: Final = f"system:serviceaccount:{SYSTEM}:{ACCOUNT}"
LEASES: Final = "leases"
#: Settings of the operator that a run may change.
TUNED: Final = ("OMNI_OPERATOR_WRITES_PER_SECOND", "OMNI_OPERATOR_WRITE_BURST", "OMNI_OPERATOR_WORKERS")


class Request(msgspec.Struct, frozen=True):
    """One write that reached the API server. Times in seconds since 1970, by its clock."""

    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int
    began: float
    ended: float


class Audit:
    """Follows the audit log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size

    def new(self) -> list[Request]:
        """The writes since the last call."""
        return list(self._read())

    def _read(self) -> Iterator[Request]:
        with self._path.open("rb") as log:
            log.seek(self._at)
            for line in log:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                yield _request(json.loads(line))


def _request(line: dict[str, object]) -> Request:
    entry = msgspec.convert(line, _Entry)
    about = entry.objectRef
    return Request(
        user=entry.user.username,
        verb=entry.verb,
        resource="/".join(filter(None, (about.resource, about.subresource))),
        namespace=about.namespace,
        name=about.name,
        code=entry.responseStatus.code,
        began=datetime.fromisoformat(entry.requestReceivedTimestamp).timestamp(),
        ended=datetime.fromisoformat(entry.stageTimestamp).timestamp(),
    )


class Operated:
    """One operator process."""

    def __init__(self, ground: Ground, folder: Path, *, logs: Path) -> None:
        self._ground = ground
        self._logs = logs
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def start(self, *, profile: Path | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        profiled = ["-m", "cProfile", "-o", str(profile)] if profile else []
        with (self._logs / "operator.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *profiled, "-m", "omnipipeline_operator"],
                env=self._environment(),
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
            )

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=60)
            self._process = None

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def resident(self) -> tuple[float, float]:
        """Memory now and at its highest, MiB."""
        assert self._process is not None
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines())
        return int(fields["VmRSS"].split()[0]) / 1024, int(fields["VmHWM"].split()[0]) / 1024

    def processor_s(self) -> float:
        """Processor time so far."""
        assert self._process is not None
        return ground.processor_s(self._process.pid)

    async def metrics(self) -> dict[str, float]:
        """Sums over all labels, by the series' name without its prefix; empty while nothing answers."""
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
                text = (await http.get(f"http://127.0.0.1:{self._port}/metrics")).text
        except httpx.TransportError:
            return {}
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if "le" not in sample.labels:
                    name = sample.name.removeprefix("omnipipeline_operator_")
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    async def at_rest(self, *, quiet_s: float, limit_s: float) -> None:
        """Return when nothing has been looked at for ``quiet_s``.

        Raises: TimeoutError.
        """
        async with asyncio.timeout(limit_s):
            reconciles, since = -1.0, 0.0
            while since < quiet_s:
                await asyncio.sleep(1.0)
                now = await self.metrics()
                count = now.get("reconcile_time_seconds_count", -1.0)
                since = since + 1.0 if count == reconciles and count >= 0 else 0.0
                reconciles = count

    def _environment(self) -> dict[str, str]:
        config = self._folder / "operator.kubeconfig"
        if not config.exists():
            token = self._ground.run("kubectl", "-n", SYSTEM, "create", "token", ACCOUNT, "--duration=8h").strip()
            view = json.loads(self._ground.run("kubectl", "config", "view", "--raw", "--minify", "-o", "json"))
            view["users"] = [{"name": "operator", "user": {"token": token}}]
            view["contexts"][0]["context"]["user"] = "operator"
            config.write_text(json.dumps(view))
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self._folder),
            "KUBECONFIG": str(config),
            "OMNI_OPERATOR_STAGE_IMAGE": "localhost/omni-stage:size",
            "OMNI_OPERATOR_NAMESPACE": SYSTEM,
            "OMNI_OPERATOR_LEASE_NAME": ACCOUNT,
            "OMNI_OPERATOR_PROBE_PORT": str(self._port),
            "OMNI_OPERATOR_LOG_FORMAT": "text",
            **{name: value for name, value in os.environ.items() if name in TUNED},
        }


class _User(msgspec.Struct, frozen=True):
    username: str = ""


class _About(msgspec.Struct, frozen=True):
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""


class _Answer(msgspec.Struct, frozen=True):
    code: int = 0


class _Entry(msgspec.Struct, frozen=True):
    verb: str
    requestReceivedTimestamp: str
    stageTimestamp: str
    user: _User = _User()
    objectRef: _About = _About()
    responseStatus: _Answer = _Answer()
