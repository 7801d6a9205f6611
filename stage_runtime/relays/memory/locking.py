"""How much memory this process may lock, which a relay with an RDMA device does with all that it registers.

Pure but for `of_process`. Made once by `dispatch`, which caps the arena; a relay asks `MemoryLock.require` before it
registers anything: the libraries report no more than a failure.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

import msgspec

from stage_runtime.errors import ConfigurationError

STATUS: Final = Path("/proc/self/status")
CAP_IPC_LOCK: Final = 14
RESERVE_NBYTES: Final = 32 << 20  # for what the libraries register themselves
LEAST_NBYTES: Final = 256 << 20  # an arena is made no smaller than this to fit: large payloads would be refused
MIB: Final = 1 << 20


class MemoryLock(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that the kernel lets this process lock."""

    limit_nbytes: int | None = None  #: RLIMIT_MEMLOCK; None: unlimited.
    capable: bool = False  #: It has the capability IPC_LOCK, for which the limit does not count.
    relays: int = 1  #: That share it.

    @property
    def most_nbytes(self) -> int | None:
        """The most that one relay may lock; None: as much as it likes."""
        if self.capable or self.limit_nbytes is None:
            return None
        return max(self.limit_nbytes - RESERVE_NBYTES, 0) // max(self.relays, 1)

    def arena_nbytes(self, wanted: int) -> int:
        """How large an arena may be: each relay registers it, and as much again to receive into.

        ``wanted`` where that is more than there is room for by far: then no relay registers it (`require`), and the
        others need it.
        """
        most = self.most_nbytes
        if most is None or not self.relays:
            return wanted
        each = most // 2 - 2 * resource.getpagesize()
        return min(wanted, each) if each >= min(wanted, LEAST_NBYTES) else wanted

    def require(self, relay: str, nbytes: int) -> None:
        """A relay calls it before it registers ``nbytes``.

        Raises: ConfigurationError: it may not. Names the limit, the capability and what to do.
        """
        most = self.most_nbytes
        if most is None or nbytes <= most:
            return
        assert self.limit_nbytes is not None
        raise ConfigurationError(
            f"relay {relay!r}: with RDMA it locks {nbytes / MIB:.0f} MiB of memory, and may lock {most / MIB:.0f}: "
            f"RLIMIT_MEMLOCK is {self.limit_nbytes / MIB:.1f} MiB, and CapEff has no IPC_LOCK. Raise LimitMEMLOCK of "
            "the container runtime on the nodes with RDMA devices, or lower OMNI_ARENA_MB"
        )


def of_process(status: Path = STATUS) -> MemoryLock:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return MemoryLock(limit_nbytes=None if limit == resource.RLIM_INFINITY else limit, capable=_is_capable(status))


def _is_capable(status: Path) -> bool:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    found = next((line.partition(":")[2] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(found, 16) >> CAP_IPC_LOCK & 1)
