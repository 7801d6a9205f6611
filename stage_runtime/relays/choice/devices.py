"""The devices of this machine, or of this container of it: the facts by which a relay is chosen.

Read from the kernel; no library is loaded for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

NAMESPACES: Final = ("pid", "ipc", "net", "mnt")
VERBS: Final = Path("/sys/class/infiniband_verbs")
VERBS_NODES: Final = Path("/dev/infiniband")
NVIDIA: Final = Path("/proc/driver/nvidia/gpus")


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def namespaces() -> dict[str, int]:
    """Inode of each namespace of this process. Two containers of a pod share ``net`` and ``ipc`` only."""
    return {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in NAMESPACES}


def rdma_devices(verbs: Path = VERBS, nodes: Path = VERBS_NODES) -> tuple[str, ...]:
    """Names of the RDMA devices that this process can use, such as ``mlx5_0``: those whose node can be opened. ``/sys``
    has all of the machine, also in a pod that was given none.
    """
    return tuple(sorted(_rdma_devices(verbs, nodes)))


def _rdma_devices(verbs: Path, nodes: Path) -> Iterator[str]:
    try:
        found = [path for path in verbs.iterdir() if path.name.startswith("uverbs")]
    except OSError:
        return
    for path in found:
        try:
            name = (path / "ibdev").read_text().strip()
            os.close(os.open(nodes / path.name, os.O_RDWR | os.O_CLOEXEC))
        except OSError:  # it is not this container's
            continue
        if name:
            yield name


def gpus(root: Path = NVIDIA, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """UUIDs of NVIDIA's GPUs that this container has; none when ``CUDA_VISIBLE_DEVICES`` hides all."""
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ()
    return tuple(sorted(_uuids(root)))


def _uuids(root: Path) -> Iterator[str]:
    try:
        files = [path / "information" for path in root.iterdir()]
    except OSError:
        return
    for file in files:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        yield from (line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID"))
