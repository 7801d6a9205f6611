"""The kit's cluster with Kubernetes' own PodGroups, which are alpha: its control plane starts again with their gates.

Here: a context in which the API server, the controllers and the scheduler have the gates. Not here: what is tested. The
kit has no option for it. It starts what lies in its ``bin``: meanwhile, scripts that add the flags.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from tests.cluster_kit import START_S, Cluster
from tests.operator.running import eventually

#: Program -> the kit's name of its process; the API server ends last.
PROGRAMS: Final = {"kube-scheduler": "scheduler", "kube-controller-manager": "kcm", "kube-apiserver": "apiserver"}
GATES: Final = "--feature-gates=GenericWorkload=true,GangScheduling=true"
SERVED: Final = "--runtime-config=scheduling.k8s.io/v1alpha2=true"
#: The kit's one binary is the program that it is called by.
SCRIPT: Final = '#!/bin/bash\nexec -a {program} "${{0%/*}}/hyperkube" "$@" {flags}\n'


@contextmanager
def gang_scheduling(cluster: Cluster, kit: Path) -> Iterator[None]:
    """The scheduler places gangs; afterwards the cluster is as it was."""
    programs = cluster.kubeconfig.parent / "bin"
    for program in PROGRAMS:
        flags = f"{GATES} {SERVED}" if program == "kube-apiserver" else GATES
        (programs / program).unlink()
        (programs / program).write_text(SCRIPT.format(program=program, flags=flags))
        (programs / program).chmod(0o755)
    try:
        _start_again(cluster, kit)
        yield
    finally:
        for program in PROGRAMS:
            (programs / program).unlink()
            (programs / program).symlink_to("hyperkube")
        _start_again(cluster, kit)


def _start_again(cluster: Cluster, kit: Path) -> None:
    """End the programs, and have the kit start what it then finds."""
    for name in PROGRAMS.values():
        known = cluster.kubeconfig.parent / "run" / f"{name}.pid"
        process = int(known.read_text())
        os.kill(process, signal.SIGKILL)  # otherwise the API server waits for its watches, for a minute
        eventually(partial(_has_ended, process), what=f"{name} ends")
        known.unlink()
    shutil.rmtree(cluster.environment["KUBECACHEDIR"], ignore_errors=True)  # kubectl keeps for hours what is served
    subprocess.run([kit, "up", "--no-node"], env=cluster.environment, capture_output=True, timeout=START_S, check=True)


def _has_ended(process: int) -> bool:
    """Whether a process is gone; one whose parent has not taken note is a zombie."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"
