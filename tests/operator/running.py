"""A real operator process against a real API server, as its own service account with the chart's RBAC.

Here: starting, stopping and killing it, what it wrote (from the audit log), and waiting. Not here: any assertion.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from omnipipeline_operator.desired import history
from tests import cluster_objects
from tests.cluster_kit import REPOSITORY, Cluster
from tests.patience import patience
from tests.ports import free_port

T = TypeVar("T")

ACCOUNT = "omni-omnipipeline"
SYSTEM = "omni-system"
FAKE_GROUP = "pool"
TOLERATED = [{"key": "fake", "operator": "Exists"}]


def eventually(probe: Callable[[], T | Literal[False]], *, within_s: float = 90.0, what: str = "") -> T:
    """The first truthy answer. Raises: AssertionError: with the last answer, when none comes in time."""
    until = time.monotonic() + patience(within_s)
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > until:
            raise AssertionError(f"not within {within_s:g} s: {what or probe}; last answer: {answer!r}")
        time.sleep(0.2)


@dataclass
class Kube:
    """kubectl in one namespace; objects are read without it."""

    cluster: Cluster
    namespace: str

    def __call__(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        done = self.cluster.kubectl("-n", self.namespace, *arguments, stdin=stdin, check=check)
        return done.stdout

    def apply(self, *manifests: Mapping[str, Any]) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        self("apply", "-f", "-", stdin=text)

    def get(self, kind: str, name: str) -> Any:
        """The object; None when it does not exist."""
        return cluster_objects.of(self.cluster.kubeconfig).get(kind, name, self.namespace)

    def all(self, kinds: str, selector: str = "") -> list[Any]:
        return cluster_objects.of(self.cluster.kubeconfig).list(kinds, self.namespace, selector)

    def names(self, kind: str, selector: str = "omnipipeline.dev/pipeline") -> set[str]:
        return {each["metadata"]["name"] for each in self.all(kind, selector)}

    def condition(self, pipeline: str, kind: str) -> dict[str, Any]:
        """A condition of a pipeline; empty when it has none yet."""
        found = self.get("omnipipeline", pipeline) or {}
        conditions = found.get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def wait_ready(self, pipeline: str, within_s: float = 150.0) -> Any:
        """The pipeline once it is Ready in its present generation."""

        def probe() -> Any:
            found = self.get("omnipipeline", pipeline)
            conditions = {each["type"]: each for each in found.get("status", {}).get("conditions", [])}
            ready = conditions.get("Ready", {})
            is_now = ready.get("observedGeneration") == found["metadata"]["generation"]
            done = conditions.get("Progressing", {}).get("reason") == "RolledOut"
            return found if ready.get("status") == "True" and is_now and done else None

        return eventually(probe, within_s=within_s, what=f"{pipeline} is ready")

    def wait_recorded(self, pipeline: str) -> None:
        """Wait until the operator has written all that it writes of a pipeline that has become Ready."""

        def recorded() -> bool:
            revisions = self.get("configmap", f"{pipeline}-revisions")
            return history.RECORDED in revisions["metadata"].get("annotations", {})

        eventually(recorded, what=f"the history of {pipeline} is recorded")


@dataclass
class OperatorProcess:
    """One operator process."""

    environment: dict[str, str]
    log: Path
    program: tuple[str, ...] = ("-m", "omnipipeline_operator")
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    port: int = field(default=0, init=False)
    _log_start: int = field(default=0, init=False)  #: Length of the log when the process was started.

    def start(self, **more: str) -> OperatorProcess:
        self.port = free_port()
        environment = self.environment | {"OMNI_OPERATOR_PROBE_PORT": str(self.port)} | more
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, *self.program], env=environment, stdout=output, stderr=output, cwd=REPOSITORY
            )
        return self

    def managing(self) -> OperatorProcess:
        """Wait until it has a complete list and leads."""
        eventually(lambda: b"managing" in self.log.read_bytes()[self._log_start :], what="the operator leads")
        return self

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(timeout=30)
        self.process = None
        return code

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=30)
        self.process = None

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()


class Audit:
    """The writes of one user since a moment, from the API server's audit log."""

    def __init__(self, path: Path, user: str) -> None:
        self._path = path
        self._user = user
        self._from = path.stat().st_size

    def mark(self) -> None:
        self._from = self._path.stat().st_size

    def writes(self) -> list[tuple[str, str, str, int]]:
        """(verb, resource, name, code) of every write but those of the Lease."""
        found = []
        for entry in self._entries():
            about = entry["objectRef"]
            resource = "/".join(filter(None, (about.get("resource"), about.get("subresource"))))
            found.append((entry["verb"], resource, about.get("name", ""), entry["responseStatus"]["code"]))
        return found

    def writers(self) -> list[str]:
        """The token of each of these writes, in the order of their arrival."""
        entries = sorted(self._entries(), key=lambda entry: str(entry["requestReceivedTimestamp"]))
        return [entry["user"]["extra"]["authentication.kubernetes.io/credential-id"][0] for entry in entries]

    def _entries(self) -> list[dict[str, Any]]:
        with self._path.open("rb") as log:
            log.seek(self._from)
            whole, _, _ = log.read().rpartition(b"\n")  # an incomplete line is read next time
        entries = [json.loads(line) for line in whole.splitlines()]
        return [
            entry
            for entry in entries
            if entry["user"]["username"] == self._user and entry.get("objectRef", {}).get("resource") != "leases"
        ]


class Election:
    """The operators' Lease, as it is now."""

    def __init__(self, cluster: Cluster) -> None:
        self._system = Kube(cluster=cluster, namespace=SYSTEM)

    def _spec(self) -> dict[str, object]:
        lease = self._system.get("lease", ACCOUNT) or {}
        spec: dict[str, object] = lease.get("spec", {})
        return spec

    def holder(self) -> str:
        return str(self._spec().get("holderIdentity", ""))

    def acquired_at(self) -> float:
        return datetime.fromisoformat(str(self._spec()["acquireTime"])).timestamp()

    def transitions(self) -> int:
        return int(str(self._spec()["leaseTransitions"]))

    def close(self) -> None:
        self._system("delete", "lease", ACCOUNT, "--ignore-not-found")


def token(cluster: Cluster) -> str:
    """A new one of the operator's service account; the audit log tells it from its others."""
    return cluster.kubectl("-n", SYSTEM, "create", "token", ACCOUNT, "--duration=4h").stdout.strip()


def environment(cluster: Cluster, folder: Path, *, namespaces: str = "", lease: bool = False) -> dict[str, str]:
    """The operator's own environment: its service account's token, nothing of the administrator's."""
    config = folder / "operator.kubeconfig"
    if not config.exists():
        text = cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json").stdout
        view = json.loads(text)
        view["users"] = [{"name": "operator", "user": {"token": token(cluster)}}]
        view["contexts"][0]["context"]["user"] = "operator"
        config.write_text(json.dumps(view))
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "KUBECONFIG": str(config),
        "PYTHONPATH": os.pathsep.join(str(REPOSITORY / part) for part in ("crds", "operator", ".")),
        "OMNI_OPERATOR_STAGE_IMAGE": "localhost/omni-stage:test",
        "OMNI_OPERATOR_NAMESPACE": SYSTEM,
        "OMNI_OPERATOR_LEASE_NAME": ACCOUNT,
        "OMNI_OPERATOR_LEASE": "1" if lease else "0",
        "OMNI_OPERATOR_WATCH": namespaces,
        "OMNI_OPERATOR_LOG_FORMAT": "text",
    }


def pipeline(name: str = "duo", *, stages: list[dict[str, Any]] | None = None, **spec: Any) -> dict[str, Any]:
    """A pipeline of two CPU stages and one coordinator whose pods fit on fake nodes."""
    stages = stages or [
        {"name": "first", "process": "first", "factory": "some.module:first", "next": ["last"]},
        {"name": "last", "process": "last", "factory": "some.module:last", "terminal": True},
    ]
    groups = {each["name"]: each for each in spec.pop("processGroups", [])}
    processes = dict.fromkeys(stage.get("process", stage["name"]) for stage in stages)
    placement = {"tolerations": TOLERATED, "nodeSelector": {"fake": FAKE_GROUP}}
    return {
        "apiVersion": "omnipipeline.dev/v1alpha1",
        "kind": "OmniPipeline",
        "metadata": {"name": name},
        "spec": {
            "stages": stages,
            "coordinator": {"replicas": 1, "placement": placement},
            "processGroups": [{"name": each, "placement": placement, **groups.get(each, {})} for each in processes],
            **spec,
        },
    }
