"""How much memory relays may lock for an RDMA device, and what a process says that may not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from stage_runtime.errors import ConfigurationError
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.memory import locking
from stage_runtime.relays.memory.locking import MemoryLock
from stage_runtime.relays.registry import RELAYS

MIB = 1 << 20
GIB = 1 << 30
CONTAINERD = MemoryLock(limit_nbytes=8 * MIB)  # its default
SETTINGS = RelaySettings(arena_bytes=512 * MIB, prefault_bytes=0, rdma=("mlx5_0",))


@pytest.mark.parametrize(
    ("lock", "arena"),
    [
        (MemoryLock(), 4 * GIB),
        (MemoryLock(limit_nbytes=8 * MIB, capable=True), 4 * GIB),
        (MemoryLock(limit_nbytes=16 * GIB), 4 * GIB),
        (MemoryLock(limit_nbytes=2 * GIB), GIB - 16 * MIB - 8192),
        (MemoryLock(limit_nbytes=2 * GIB, relays=2), GIB // 2 - 8 * MIB - 8192),
        (MemoryLock(limit_nbytes=256 * MIB), 4 * GIB),  # shm and tcp need it; the relays with RDMA refuse
        (CONTAINERD, 4 * GIB),
        (msgspec.structs.replace(CONTAINERD, relays=0), 4 * GIB),
    ],
)
def test_an_arena_is_as_large_as_may_be_locked(lock: MemoryLock, arena: int) -> None:
    assert lock.arena_nbytes(4 * GIB) == arena


def test_what_was_capped_may_be_registered() -> None:
    lock = MemoryLock(limit_nbytes=2 * GIB, relays=2)
    lock.require("nixl", 2 * (lock.arena_nbytes(4 * GIB) + 4096))
    with pytest.raises(ConfigurationError):
        lock.require("nixl", 2 * GIB)


def test_the_kernel_says_whether_the_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "with").write_text("Name:\tx\nCapEff:\t0000000000004000\nCapBnd:\t0000000000004000\n")
    (tmp_path / "without").write_text("CapEff:\t0000000000000000\nCapBnd:\t0000000000004000\n")
    assert locking.of_process(tmp_path / "with").capable
    assert not locking.of_process(tmp_path / "without").capable
    assert not locking.of_process(tmp_path / "none").capable


@pytest.mark.parametrize("relay", ["nixl", "mooncake"])
async def test_a_relay_that_may_not_lock_its_memory_names_the_limit_and_the_capability(
    relay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UCX_TLS", "UCX_MODULES", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    locked = msgspec.structs.replace(
        SETTINGS, named=frozenset({relay}), memory_lock=CONTAINERD, mooncake_protocol="rdma"
    )
    with pytest.raises(ConfigurationError) as refused:
        Relays(loop=asyncio.get_running_loop(), incarnation="x", on_release=lambda *_: None, settings=locked)
    assert str(refused.value) == (
        f"relay '{relay}': with RDMA it locks 1024 MiB of memory, and may lock 0: RLIMIT_MEMLOCK is 8.0 MiB, and "
        "CapEff has no IPC_LOCK. Raise LimitMEMLOCK of the container runtime on the nodes with RDMA devices, or lower "
        "OMNI_ARENA_MB"
    )


async def test_auto_goes_without_relays_that_may_not_lock_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_MODULES", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    relays = Relays(
        loop=asyncio.get_running_loop(),
        incarnation="x",
        on_release=lambda *_: None,
        settings=msgspec.structs.replace(SETTINGS, memory_lock=CONTAINERD),
        table={name: RELAYS[name] for name in ("shm", "nixl", "mooncake", "tcp")},
    )
    assert relays.process.started == ("shm", "tcp")
    assert all("RLIMIT_MEMLOCK" in relays.process.refused[name] for name in ("nixl", "mooncake"))
    assert relays.arena.nbytes > 512 * MIB
    relays.close()
