"""Two ends of the relays for tests: both in this process, or one of them a process of its own."""

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import msgspec

from stage_runtime.payloads import encoding
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.registry import RELAYS

MIB = 1 << 20
SMALL = RelaySettings(arena_bytes=64 * MIB, prefault_bytes=0, piece_bytes=MIB, whole_bytes=2 * MIB)


class Pair:
    """``a`` and ``b`` of one process; what one releases is told to the other at once."""

    def __init__(self, backend, settings=SMALL, security=None):
        self.backend = backend
        self.told = []
        self.ends = {}
        for name in "ab":
            self.ends[name] = Relays(
                loop=asyncio.get_running_loop(),
                incarnation=name,
                on_release=lambda peer, transfer, name=name: self._tell(name, peer, transfer),
                settings=settings,
                security=security,
            )
        self.a, self.b = self.ends["a"], self.ends["b"]
        assert backend in self.a.open("b", self.b.facts())
        assert backend in self.b.open("a", self.a.facts())

    def _tell(self, receiver, sender, transfer):
        self.told.append((receiver, sender, transfer))
        self.ends[sender].released(receiver, transfer)

    def put(self, value, request_id="r", **options):
        """Extract ``value`` and put it from a to b."""
        extracted = encoding.extract(value)
        operation = self.a.put(extracted, request_id=request_id, peer="b", backend=self.backend, **options)
        return extracted, operation

    async def get(self, operation, request_id="r", timeout=10):
        return await self.b.get(operation.metadata, request_id=request_id, peer="a").wait_for_completion(timeout)

    async def carry(self, value):
        extracted, operation = self.put(value)
        return encoding.restore(extracted.value_bytes, extracted.refs, await self.get(operation))

    def held(self):
        """What a's stats say it has not got back."""
        stats = self.a.stats()
        return stats["arena_bytes_in_use"] + sum(stats[f"{name}_unreleased_transfers"] for name in RELAYS)

    def kept(self):
        """Bytes that have come to b and that nobody has fetched."""
        return sum(count for name, count in self.b.stats().items() if name.endswith("_unclaimed_bytes"))

    async def until(self, condition, timeout=5.0):
        async with asyncio.timeout(timeout):
            while not condition():
                await asyncio.sleep(0.002)

    def close(self):
        for end in self.ends.values():
            end.close()


@contextlib.contextmanager
def pair(backend, **options):
    both = Pair(backend, **options)
    try:
        yield both
    finally:
        both.close()


class FarEnd:
    """`far_end.py` as a process: it does what it is told, one line at a time."""

    def __init__(self, bind="tcp://127.0.0.1:*"):
        script = Path(__file__).with_name("far_end.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), bind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.facts = self.answer()

    def ask(self, **command):
        self.process.stdin.write(msgspec.json.encode(command) + b"\n")
        return self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, "the far end is dead"
        return msgspec.json.decode(line)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()
