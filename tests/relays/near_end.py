"""This process's end for tests of one relay towards `relay_pairs.FarEnd`, and what such tests look at."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stage_runtime.errors import TransferError
from stage_runtime.payloads import encoding
from stage_runtime.relays.base import RelayOperation
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from tests.relays.relay_pairs import MIB, PATIENCE_S, FarEnd

END_S = 500.0  # of an interpreter that imports torch, on a machine where each of 20 programs wants a core
WINDOW_S, WINDOWS = 2.0, 8
STILL_TIMES = 4  # once was too few on a machine with a load of 17: the relay's own thread had not run yet
_NUMBERS = itertools.count()
LARGE = 128 * MIB  # long enough on its way to be frozen there


class Near:
    """Relays of this process, open towards ``far``."""

    def __init__(self, far: FarEnd, backend: str) -> None:
        self.backend = backend
        self.released: list[tuple[str, int]] = []
        self.relays = Relays(
            loop=asyncio.get_running_loop(),
            incarnation="near",
            on_release=lambda peer, transfer: self.released.append((peer, transfer)),
            settings=RelaySettings(named=frozenset({backend}), arena_bytes=256 * MIB, prefault_bytes=0),
        )
        self.meet(far, "far")

    def meet(self, far: FarEnd, name: str) -> None:
        assert self.backend in self.relays.open(name, far.facts)
        assert self.backend in far.ask(do="open", facts=self.relays.facts())

    def stat(self, name: str) -> int:
        """A number of the backend's."""
        return self.relays.stats()[f"{self.backend}_{name}"]

    def in_use(self) -> int:
        return self.relays.stats()["arena_bytes_in_use"]

    def put(self, nbytes: int, mark: int) -> RelayOperation:
        value = encoding.extract(np.full(nbytes, mark, np.uint8))
        operation = self.relays.put(value, request_id="r", peer="far", backend=self.backend)
        assert operation is not None
        return operation

    def fetch(self, far: FarEnd, nbytes: int, mark: int, peer: str = "far") -> RelayOperation:
        metadata = base64.b64decode(far.ask(do="put", nbytes=nbytes, mark=mark, backend=self.backend))
        return self.relays.get(metadata, request_id="r", peer=peer)


async def until(condition: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0)


async def writing_to_us(near: Near, far: FarEnd, peer: str = "far") -> RelayOperation:
    """A get of ``LARGE`` bytes that has begun and was not complete when this looked; it may be a moment later."""
    while True:
        operation = near.fetch(far, LARGE, 1, peer)
        while not (operation.done() or near.stat("incoming_bytes")):
            await asyncio.sleep(0)
        if not operation.done():
            return operation
        await dropped(near, operation, operation.take(), far)


async def killed_while_it_writes_to_us(near: Near) -> tuple[RelayOperation, TransferError]:
    """A get whose sender, a far end of its own, is killed on the way, and how it failed."""
    while True:
        peer = f"killed{next(_NUMBERS)}"
        far = FarEnd(name=peer, relay=near.backend)
        try:
            near.meet(far, peer)
            operation = await writing_to_us(near, far, peer)
            far.process.kill()
            far.process.wait(PATIENCE_S)
            try:
                view = await operation.wait_for_completion(PATIENCE_S)
            except TransferError as error:
                return operation, error
            await dropped(near, operation, view)  # all of it had come before the signal
            near.relays.forget(peer)
        finally:
            far.close()


async def frozen_while_it_writes_to_us(near: Near, far: FarEnd) -> RelayOperation:
    """A get of ``LARGE`` bytes whose sender is frozen on the way. All of them may have come first on a busy machine."""
    while True:
        operation = near.fetch(far, LARGE, 1)
        while not (operation.done() or near.stat("incoming_bytes")):
            await asyncio.sleep(0)
        far.process.send_signal(signal.SIGSTOP)
        await _still(lambda: near.stat("incoming_bytes"))
        if not operation.done():
            return operation
        far.process.send_signal(signal.SIGCONT)
        await dropped(near, operation, operation.take(), far)


async def frozen_while_it_reads_from_us(near: Near, far: FarEnd) -> RelayOperation:
    """Freeze the far end as `frozen_while_it_writes_to_us` does, in a put."""
    while True:
        operation = near.put(LARGE, 1)
        ask_to_fetch(far, operation)
        await until(lambda: near.stat("outgoing_transfers") == 1 or near.stat("unreleased_transfers") == 0)
        far.process.send_signal(signal.SIGSTOP)
        await _still(lambda: near.stat("outgoing_transfers"))
        if near.stat("outgoing_transfers"):
            return operation
        far.process.send_signal(signal.SIGCONT)
        assert far.answer()["nbytes"] == LARGE
        for transfer in far.ask(do="drop"):
            near.relays.released("far", transfer)


async def _still(count: Callable[[], int]) -> None:
    """Wait until this process has seen all that had been sent before."""
    last, times = -1, 0
    while times < STILL_TIMES:
        now = count()
        last, times = now, times + 1 if now == last else 0
        await asyncio.sleep(0.25)


async def dropped(near: Near, operation: RelayOperation, view: memoryview, sender: FarEnd | None = None) -> None:
    """Let go of what has come, and release it at its sender, whose arena has room for two; None: it is dead."""
    view.release()
    near.relays.release_now()
    await until(lambda: (operation.peer, operation.transfer) in near.released)
    near.released.clear()
    if sender is not None:
        sender.ask(do="released", transfer=operation.transfer)


def ask_to_fetch(far: FarEnd, operation: RelayOperation) -> None:
    """Ask without waiting for the answer, which `FarEnd.answer` reads."""
    far.tell(do="get", metadata=base64.b64encode(operation.metadata).decode(), timeout=PATIENCE_S)


def digest(nbytes: int, mark: int) -> str:
    return hashlib.sha256(bytes([mark]) * nbytes).hexdigest()


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def processor_share(pid: int, enough: float) -> float:
    """The least share of a core that a process with nothing to do takes, in windows up to the first with ``enough``.

    Work that it was late with on a busy machine falls into the first ones.
    """
    least = 1.0
    for _ in range(WINDOWS):
        before = processor_s(pid)
        await asyncio.sleep(WINDOW_S)
        least = min(least, (processor_s(pid) - before) / WINDOW_S)
        if least <= enough:
            break
    return least


def run_to_its_end(backend: str, *, closes: bool) -> subprocess.CompletedProcess[str]:
    """An interpreter that has moved something."""
    program = f"""
import asyncio
from tests.relays.relay_pairs import Pair
import numpy as np
async def main():
    both = Pair({backend!r})
    await both.carry(np.ones(9000))
    if {closes}:
        both.close()
asyncio.run(main())
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=END_S)
