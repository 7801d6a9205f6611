"""The limit of descriptors of a running process, lowered as no operator does: at once, below what it has open.

A process looks at its limit each second; until then libzmq accepts whoever comes, and aborts the process when a Unix
socket finds no descriptor (`sockets.endpoints.doors`). So tests wait until the process has seen the new limit.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
from pathlib import Path

from tests.e2e.local_pipelines import eventually


async def allow(pid: int, soft: int, hard: int) -> None:
    """Let the process open so many, and wait until it has seen that."""
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    async def seen() -> bool:
        return accepts_one_at_a_time(pid)

    await eventually(seen, what=f"process {pid} must see its new limit")


def accepts_one_at_a_time(pid: int) -> bool:
    """Every Unix socket that the process listens at. It asks for that at its next look at its limit of descriptors."""
    listening = {
        line.split()[6] for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines() if " 00010000 " in line
    }
    descriptors = Path(f"/proc/{pid}/fd")
    kinds = {}
    for name in os.listdir(descriptors):
        with contextlib.suppress(OSError):  # closed meanwhile
            kinds[name] = os.readlink(descriptors / name)
    asked = {}
    for name in (name for name, kind in kinds.items() if kind == "anon_inode:[eventpoll]"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/fdinfo/{name}").read_text().splitlines():
                match line.split():
                    case ["tfd:", target, "events:", events, *_]:
                        asked[target] = int(events, 16)
    own = {name for name, kind in kinds.items() if kind.removeprefix("socket:[").removesuffix("]") in listening}
    return bool(own) and all(asked.get(name, 0) & select.EPOLLONESHOT for name in own)
