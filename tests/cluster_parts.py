"""Runs the tests marked ``cluster`` (``make cluster-test``), with CLUSTER_PARTS in parts, each with its own cluster.

The tests of ``tests/cluster`` need a node that runs pods: they have the machine's network. All others need an API
server alone. The kit's ports are fixed, so each cluster of theirs has namespaces of its own (network, mounts,
processes), and ends with them. Every part waits most of the time, so together they take as long as the longest.

One part after the other by default, where KUBECONFIG names a cluster, and where namespaces cannot be made.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests import index
from tests.cluster_images import kit

TESTS: Final = Path(__file__).parent
WITH_PODS: Final = "cluster"  # the folder of the tests that need a node
#: Pods go first: their starts have deadlines. The other tests wait longer then (`patience`).
BESIDE: Final = ("nice", "-n", "5")
NAMESPACES: Final = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
#: `cluster down` unmounts and deletes below these folders: an empty one hides those of the cluster with pods.
HIDDEN: Final = ("/run/netns", "/sys/fs/cgroup")


def modules(tests: Path = TESTS) -> list[Path]:
    """Test modules with a test marked ``cluster``; those that need pods are not among them."""
    return [each for each in index.marked("cluster", tests) if each.parent != tests / WITH_PODS]


def paths(tests: Path = TESTS) -> list[Path]:
    """All that pytest has to look into; it takes 45 s of a processor to import every test and find nothing in most."""
    return [*modules(tests), tests / WITH_PODS]


def shares(found: Sequence[Path], count: int) -> list[list[Path]]:
    """Divide the modules, the longest first, so that each is in one share; fewer shares where modules are few."""
    by_length = sorted(found, key=lambda each: (-each.stat().st_size, each))
    return [by_length[first::count] for first in range(min(count, len(by_length)))]


def isolated(command: Sequence[str]) -> list[str]:
    """The command in namespaces of its own, where the loopback is up."""
    hiding = (f"mkdir -p {each} && mount -t tmpfs tmpfs {each}" for each in HIDDEN)
    return [*NAMESPACES, "sh", "-c", " && ".join(["ip link set lo up", *hiding, f"exec {shlex.join(command)}"])]


def _pytest(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "cluster", "--durations", "30", *map(str, arguments)]


def _can_isolate() -> bool:
    """Only root can; some containers forbid it."""
    return os.geteuid() == 0 and subprocess.run(isolated(["true"]), capture_output=True).returncode == 0


def _have_packages() -> None:
    """Install what the kit needs for its first start: a part has no network."""
    program = kit()
    if program is not None and shutil.which("containerd") is None:
        for command in (["up", "--no-node"], ["down"]):
            subprocess.run([program, *command], check=True)


def _begun(share: Sequence[Path], state: Path) -> subprocess.Popen[bytes]:
    """A part beside the one with pods. state: a new folder, for its cluster and its output."""
    state.mkdir()
    environment = os.environ | {"CLUSTER_DIR": str(state / "cluster")}
    with (state / "output").open("w") as output:
        command = [*BESIDE, *isolated(_pytest(*share))]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _side_by_side(folder: Path, beside: Sequence[Sequence[Path]]) -> int:
    """The first exit code that is not 0. The output of the parts beside the one with pods is shown when all have
    ended.
    """
    _have_packages()
    states = [folder / str(number) for number in range(len(beside))]
    running = [_begun(share, state) for share, state in zip(beside, states, strict=True)]
    try:
        codes = [subprocess.run(_pytest(TESTS / WITH_PODS)).returncode, *(each.wait() for each in running)]
    finally:
        for each in running:
            each.kill()
            each.wait()
        for state in states:
            print((state / "output").read_text(), flush=True)
    return next((code for code in codes if code), 0)


def main(count: int) -> int:
    """Run all parts; the exit code. count: how many there are beside that with pods."""
    if count < 1 or "KUBECONFIG" in os.environ or not _can_isolate():
        return subprocess.run(_pytest(*paths())).returncode
    with tempfile.TemporaryDirectory(prefix="omni-cluster-") as folder:
        return _side_by_side(Path(folder), shares(modules(), count))


if __name__ == "__main__":
    sys.exit(main(int(os.environ.get("CLUSTER_PARTS", "0"))))
