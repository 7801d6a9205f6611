"""Two pods with processes that a driver of `relay_faults` orders about: the driver is their control plane."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from benchmarks.faultlab.pods import ADDRESSES, Pod, Pods, child

CALM_S: Final = 5.0
LIMIT_S: Final = 600.0  # of every wait for a process: far more than any takes, and less than a test may take
SETTLED_S: Final = 30.0  # until a survivor must have everything back
ENVIRONMENT: Final = {"UCX_TLS": "tcp", "UCX_MODULES": "^ib", "MC_FORCE_TCP": "1", "GLOG_minloglevel": "3"}

T = TypeVar("T")


async def within(what: str, awaited: Awaitable[T], limit_s: float = LIMIT_S) -> T:
    """Raises: TimeoutError: it took longer; says what was awaited."""
    try:
        return await asyncio.wait_for(awaited, limit_s)
    except TimeoutError:
        raise TimeoutError(f"{what}: not within {limit_s:g} s") from None


class End:
    """A process in a pod. It answers orders one after the other."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.pid = 0
        #: The connection of the control plane. It breaks when the process ends.
        self.connection: socket.socket | None = None
        self.dead = asyncio.Event()
        self.ends: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.released: Callable[[str, int], None] = lambda peer, transfer: None
        self._asked: collections.deque[asyncio.Future[Any] | None] = collections.deque()  #: None: nobody waits for it.
        self._numbers = iter(range(1, 1 << 30))

    async def ask(self, **order: Any) -> Any:
        """Raises: TimeoutError: it does not answer. RuntimeError: it is dead."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._write(order, answer)
        return await within(f"answer of {self.name} to {order}", answer)

    def tell(self, **order: Any) -> None:
        """The same as `ask`, for a process that may be frozen: nobody waits for the answer."""
        if not self.dead.is_set():
            self._write(order, None)

    def _write(self, order: dict[str, Any], answer: asyncio.Future[Any] | None) -> None:
        if self.dead.is_set():
            raise RuntimeError(f"{self.name} is dead")
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._asked.append(answer)

    async def end_of(self, number: int) -> dict[str, Any]:
        """How a get has ended. Raises: TimeoutError: it has not."""
        return await within(f"end of get {number} at {self.name}", asyncio.shield(self.ends[number]))

    async def fetch(
        self, sender: End, nbytes: int, mark: int, request: str = "get", *, deadline_s: float = LIMIT_S
    ) -> int:
        """Have it get what the sender puts. Returns: its number in ``ends``."""
        return await self.get(sender, await sender.put(self, nbytes, mark), request, deadline_s=deadline_s)

    async def put(self, receiver: End, nbytes: int, mark: int) -> str:
        """Returns: the metadata."""

        async def placed() -> str:
            while (metadata := await self.ask(do="put", peer=receiver.name, nbytes=nbytes, mark=mark)) is None:
                await asyncio.sleep(0.005)
            return str(metadata)

        return await within(f"room for {nbytes} bytes at {self.name}", placed())

    async def get(self, sender: End, metadata: str, request: str = "get", *, deadline_s: float = LIMIT_S) -> int:
        number = next(self._numbers)
        self.ends[number] = asyncio.get_running_loop().create_future()
        order = {"number": number, "peer": sender.name, "metadata": metadata, "request": request}
        await self.ask(do="get", timeout=deadline_s, **order)
        return number

    async def cut_off(self) -> None:
        """Waits until the kernel has closed the connection of a process that was killed."""
        assert self.connection is not None
        ended = asyncio.get_running_loop().sock_recv(self.connection, 1)
        with contextlib.suppress(ConnectionResetError):
            assert await within(f"end of {self.name}'s connection", ended) == b""

    async def listen(self) -> None:
        assert self.process.stdout is not None
        try:
            while (line := await self.process.stdout.readline()).endswith(b"\n"):  # else it died within a line
                self._heard(msgspec.json.decode(line))
        finally:
            self.dead.set()
            for answer in self._asked:
                if answer is not None and not answer.done():
                    answer.set_exception(RuntimeError(f"{self.name} is dead"))

    def _heard(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "answer":
                answer = self._asked.popleft()
                if answer is not None and not answer.done():
                    answer.set_result(event["answer"])
            case "release":
                self.released(event["peer"], event["transfer"])
            case _:
                self.ends[event["number"]].set_result(event)


class Ground:
    """Both pods and their processes."""

    def __init__(self, relay: str, pods: Pods, path: str) -> None:
        """path: of the socket that each process connects to, as it would to its peers."""
        self.relay = relay
        self.pods = pods
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.setblocking(False)
        self._connections = [self._listener]
        self.ends: dict[str, End] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, pod: Pod, name: str, *options: str) -> End:
        program = str(Path(__file__).with_name("relay_end.py"))
        process = await asyncio.create_subprocess_exec(
            *self.pods.command(pod, [sys.executable, program, self.relay, ADDRESSES[pod], name, self._path, *options]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**_inherited(), **ENVIRONMENT},
            limit=1 << 20,
        )
        end = self.ends[name] = End(name, process)
        end.released = lambda peer, transfer: self._release(peer, end.name, transfer)
        self._listen(end)
        facts = await end.ask(do="facts")
        end.connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)  # it connected before
        end.connection.setblocking(False)
        self._connections.append(end.connection)
        end.pid = child(process.pid) or 0
        for other in self.ends.values():
            if other is not end and not other.dead.is_set():
                assert await other.ask(do="open", peer=name, facts=facts)
                assert await end.ask(do="open", peer=other.name, facts=await other.ask(do="facts"))
        return end

    async def close(self, *names: str) -> dict[str, int]:
        """Let these end, if they live. Returns: exit codes."""
        codes = {}
        for end in [self.ends[name] for name in names if name in self.ends]:
            if not end.dead.is_set():
                assert end.process.stdin is not None
                end.process.stdin.close()
                codes[end.name] = await within(f"end of {end.name}", end.process.wait())
        return codes

    async def calm(self, end: End) -> None:
        """Wait until nothing is in quarantine, or so long that what is sent late has come."""
        until = time.monotonic() + CALM_S
        while time.monotonic() < until:
            if not (await end.ask(do="stats"))[f"{self.relay}_quarantined_receives"]:
                return
            await asyncio.sleep(0.05)

    async def held(self, end: End) -> dict[str, int]:
        """The slots that a survivor has not got back in time."""
        until = time.monotonic() + SETTLED_S
        while True:
            stats = await end.ask(do="stats")
            names = ("receive_bytes_in_use", "quarantined_receives", "unreleased_transfers")
            found = {name: stats[f"{self.relay}_{name}"] for name in names}
            found["arena_bytes_in_use"] = stats["arena_bytes_in_use"]
            left = {name: count for name, count in found.items() if count}
            if not left or time.monotonic() > until:
                return left
            await asyncio.sleep(0.05)

    def disconnect(self) -> None:
        for connection in self._connections:
            connection.close()

    def _listen(self, end: End) -> None:
        task = asyncio.ensure_future(end.listen())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _release(self, sender: str, receiver: str, transfer: int) -> None:
        end = self.ends.get(sender)
        if end is not None:
            end.tell(do="released", peer=receiver, transfer=transfer)


@contextlib.asynccontextmanager
async def ground(relay: str) -> AsyncIterator[Ground]:
    pods = Pods()
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        found = Ground(relay, pods, f"{folder}/s")
        try:
            yield found
        finally:
            for end in found.ends.values():
                if not end.dead.is_set():
                    end.process.kill()  # its child with it
                    await end.process.wait()
            found.disconnect()
            pods.close()


def _inherited() -> dict[str, str]:
    """The environment without variables that the relay nixl has set in this process: a pod has another interface."""
    return {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
