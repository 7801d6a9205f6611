"""A real API server for tests marked ``cluster``: the one KUBECONFIG names, else the kit beside the checkout.

Here: session fixtures ``api_server`` (control plane is enough) and ``node_cluster`` (pods run). Not here: what is
tested. Used through tests/conftest.py. A missing cluster is a failure in CI, never a skip: a test that silently does
not run proves nothing. The kit: ``$OMNI_CLUSTER_KIT``, else ../shared/cluster/cluster; a cluster that was up before
is left up, and one that a killed test run left behind is removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster_images import REPOSITORY, kit
from tests.patience import patience

__all__ = ["REPOSITORY", "Cluster", "api_server", "cluster_kit", "kit", "node_cluster"]

START_S = patience(300.0)  # the first start unpacks binaries and may install packages
COMMAND_S = patience(60.0)


@dataclass(frozen=True)
class Cluster:
    """How to talk to it."""

    kubeconfig: Path
    environment: dict[str, str]

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl; with ``check`` a failure shows what kubectl said."""
        done = subprocess.run(
            ["kubectl", *arguments],
            input=stdin,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done


def _run(program: Path, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=START_S)
    if done.returncode:
        pytest.fail(f"{program.name} {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def _answers(kubeconfig: Path, environment: dict[str, str]) -> bool:
    if not kubeconfig.is_file():
        return False
    finished = subprocess.run(
        ["kubectl", "--request-timeout=3s", "get", "--raw", "/readyz"],
        env=environment,
        capture_output=True,
        timeout=COMMAND_S,
    )
    return finished.returncode == 0


def cluster_of(printed: str) -> Cluster:
    """The cluster of the line that the kit prints: ``export KUBECONFIG=… PATH=…:$PATH``."""
    found = re.search(r"export KUBECONFIG=(\S+) PATH=(\S+?):\$PATH", printed)
    assert found is not None, printed
    kubeconfig, path = Path(found[1]), f"{found[2]}:{os.environ['PATH']}"
    # kubectl remembers by address which versions a cluster serves, and clusters in namespaces have the same address.
    known = str(kubeconfig.parent / "kubectl-cache")
    environment = {**os.environ, "KUBECONFIG": found[1], "PATH": path, "KUBECACHEDIR": known}
    return Cluster(kubeconfig=kubeconfig, environment=environment)


class _Kit:
    """The kit, started as far as the tests of this session need, stopped only if it was started here."""

    def __init__(self, program: Path) -> None:
        self.program = program
        state = Path(os.environ.get("CLUSTER_DIR", "/run/omni-cluster"))
        self._lock = open(f"{state}.lock", "w")  # held until `down`
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._unfinished = Path(f"{state}.tests")  # there while tests run, and after a run that was killed
        environment = {
            **os.environ,
            "KUBECONFIG": str(state / "admin.conf"),
            "PATH": f"{state}/bin:{os.environ['PATH']}",
        }
        if self._unfinished.exists():
            _run(self.program, "wipe")  # pods of nodes that are gone would never end, nor would their namespace
        self.was_up = _answers(state / "admin.conf", environment)
        self._unfinished.touch()

    def up(self, *arguments: str) -> Cluster:
        """Twice if need be: on a busy machine the kubelet may ask containerd too early, and end."""
        try:
            printed = _run(self.program, "up", *arguments)
        except pytest.fail.Exception:
            _run(self.program, "down")  # `up` beside a kube-proxy that runs would end it
            printed = _run(self.program, "up", *arguments)
        return cluster_of(printed)

    def down(self) -> None:
        try:
            if not self.was_up:
                _run(self.program, "down")
            self._unfinished.unlink()
        finally:
            self._lock.close()


@pytest.fixture(scope="session")
def cluster_kit() -> Iterator[_Kit | Cluster]:
    """The cluster or kit that the two fixtures below start from."""
    given = os.environ.get("KUBECONFIG")
    if given:
        yield Cluster(kubeconfig=Path(given), environment=dict(os.environ))
        return
    program = kit()
    if program is None:
        missing = "no cluster: KUBECONFIG is not set and the kit is missing ($OMNI_CLUSTER_KIT)"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    started = _Kit(program)
    try:
        yield started
    finally:
        started.down()


def _up(source: _Kit | Cluster, arguments: Sequence[str]) -> Cluster:
    return source if isinstance(source, Cluster) else source.up(*arguments)


@pytest.fixture(scope="session")
def api_server(cluster_kit: _Kit | Cluster) -> Cluster:
    """A cluster whose pods need not run."""
    return _up(cluster_kit, ["--no-node"])


@pytest.fixture(scope="session")
def node_cluster(cluster_kit: _Kit | Cluster) -> Cluster:
    """A cluster with a node that runs pods."""
    return _up(cluster_kit, [])
