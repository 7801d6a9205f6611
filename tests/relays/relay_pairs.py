"""Two ends of the relays for tests: both in this process, or one of them a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stage_runtime.payloads import encoding
from stage_runtime.payloads.pack import Extracted
from stage_runtime.relays import registry
from stage_runtime.relays.base import RelayOperation
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.named import Put
from stage_runtime.sockets.endpoints.addresses import CurveSecurity
from tests.patience import patience
from tests.relays.relay_tables import TABLE

MIB = 1 << 20
PATIENCE_S = patience(60.0)  # far more than anything takes, also on a busy machine
SMALL = RelaySettings(arena_bytes=64 * MIB, prefault_bytes=0, piece_bytes=MIB, whole_bytes=2 * MIB)


class Pair:
    """``a`` and ``b`` of one process; what one releases is reported to the other at once."""

    def __init__(self, backend: str, settings: RelaySettings = SMALL, security: CurveSecurity | None = None) -> None:
        self.backend = backend
        self.released: list[tuple[str, str, int]] = []
        self.ends: dict[str, Relays] = {}
        settings = msgspec.structs.replace(settings, named=frozenset({backend}))
        for name in "ab":
            self.ends[name] = Relays(
                loop=asyncio.get_running_loop(),
                incarnation=name,
                on_release=functools.partial(self._record_release, name),
                settings=settings,
                security=security,
                table=TABLE,
            )
        self.a, self.b = self.ends["a"], self.ends["b"]
        self.introduce()

    def introduce(self) -> None:
        assert self.backend in self.a.open("b", self.b.facts())
        assert self.backend in self.b.open("a", self.a.facts())

    def _record_release(self, receiver: str, sender: str, transfer: int) -> None:
        self.released.append((receiver, sender, transfer))
        self.ends[sender].released(receiver, transfer)

    def put(self, value: Any, request_id: str = "r", **options: Any) -> tuple[Extracted, Put]:
        """Extract ``value`` and put it from a to b."""
        extracted = encoding.extract(value)
        return extracted, self.put_again(extracted, request_id, **options)

    def put_again(self, extracted: Extracted, request_id: str = "r", **options: Any) -> Put:
        """Put what is extracted already from a to b."""
        operation = self.a.put(extracted, request_id=request_id, peer="b", backend=self.backend, **options)
        assert operation is not None, "it found no room"
        return operation

    async def get(self, operation: RelayOperation, request_id: str = "r", timeout: float = PATIENCE_S) -> memoryview:
        return await self.b.get(operation.metadata, request_id=request_id, peer="a").wait_for_completion(timeout)

    async def carry(self, value: Any) -> Any:
        extracted, operation = self.put(value)
        return encoding.restore(extracted.value_bytes, extracted.refs, await self.get(operation))

    def held(self) -> int:
        """The bytes and transfers that a's stats say it has not got back."""
        stats = self.a.stats()
        return stats["arena_bytes_in_use"] + sum(
            stats[f"{name}_unreleased_transfers"] for name in registry.to_open({self.backend})
        )

    def kept(self) -> int:
        """Bytes that have come to b and that nobody has fetched."""
        return sum(count for name, count in self.b.stats().items() if name.endswith("_unclaimed_bytes"))

    async def release_another(self) -> tuple[str, str, int]:
        """Carry a small value and release it: what was released before is reported before. Returns its release."""
        _, operation = self.put(b"x" * 9000, "another")
        await self.get(operation, "another")
        await operation.wait_for_completion(PATIENCE_S)
        return ("b", "a", operation.transfer)

    async def until(self, condition: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
        async with asyncio.timeout(timeout):
            while not condition():
                await asyncio.sleep(0.002)

    def close(self) -> None:
        for end in self.ends.values():
            end.close()


@contextlib.contextmanager
def pair(backend: str, **options: Any) -> Iterator[Pair]:
    both = Pair(backend, **options)
    try:
        yield both
    finally:
        both.close()


class FarEnd:
    """`far_end.py` as a process: it obeys commands, one line at a time."""

    def __init__(self, bind: str = "tcp://127.0.0.1:*", name: str = "far", relay: str = "all") -> None:
        """relay: the only one that is named; ``all``, or ``gpu``: cuda_ipc of a machine with a GPU, and all others."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.relays.far_end", bind, name, relay],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=Path(__file__).parents[2],
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._commands, self._answers = self.process.stdin, self.process.stdout
        try:
            self.facts = self.answer()
        except BaseException:  # the test's time is over: it leaves no process
            self.close()
            raise

    def ask(self, **command: Any) -> Any:
        self.tell(**command)
        return self.answer()

    def tell(self, **command: Any) -> None:
        """The same as `ask`, without waiting for the answer."""
        self._commands.write(msgspec.json.encode(command) + b"\n")

    def end_input(self) -> None:
        """It ends when it has obeyed all commands."""
        self._commands.close()

    def answer(self) -> Any:
        line = self._answers.readline()
        assert line, "the far end is dead"
        return msgspec.json.decode(line)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self._commands.close()
        self._answers.close()
