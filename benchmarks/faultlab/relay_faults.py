"""Faults of one relay between two pods, while transfers are under way in both directions.

The driver is the control plane: it passes facts, metadata and releases on, and tells the survivor of a death.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from benchmarks.faultlab.pods import ADDRESSES, Pod, Pods, child
from stage_runtime.transfers.receiving import STALLED_S

Fault = Literal["kill", "freeze", "link", "vanish", "restart"]

RELAYS: Final = ("nixl", "mooncake", "nccl")
FAULTS: Final[tuple[Fault, ...]] = ("kill", "freeze", "link", "vanish", "restart")
NOTICED_S: Final[dict[str, float]] = {"kill": 0.1, "freeze": 4.0, "link": 5.0, "vanish": 5.0, "restart": 0.1}
#: Without progress, of a get whose sender is hurt: this driver's own, as a member's heartbeats. A stage waits longer
#: (`transfers.receiving.STALLED_S`), for a slow sender is not a dead one.
DEADLINE_S: Final = 3.0
LATE: Final = 32 << 20  # given up on its way
KEPT: Final = 8  # transfers beside it
LARGE: Final = 96 << 20
SLOW_PER_S: Final = 200_000  # bytes, of a link
SLOW_NBYTES: Final = 3 << 20  # over it
STOPS_MOST: Final = 50  # tries to stop a process while it sends
DRAINED_S: Final = 1.0  # what is in the kernel's buffers has come, also where the relay's thread runs late
CALM_S: Final = 5.0
LIMIT_S: Final = 120.0  # of every wait for a process: far more than any takes, and less than a test may take
SETTLED_S: Final = 30.0  # until a survivor must have everything back
REUSED: Final = "its slot was reused"  # so a get fails where late bytes have overwritten its header
ENVIRONMENT: Final = {"UCX_TLS": "tcp", "UCX_MODULES": "^ib", "MC_FORCE_TCP": "1", "GLOG_minloglevel": "3"}


T = TypeVar("T")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    relay: str
    fault: str
    transfers: int  #: Checked byte by byte.
    noticed_s: float  #: Until who waited knew; of a kill, since the signal.
    reason: str
    wrong: int  #: Bytes that were somebody else's.
    held: dict[str, int]  #: What a survivor did not get back.
    exits: dict[str, int]  #: Exit codes of those that were not killed.
    closed_s: float = 0.0  #: Until the kernel had closed the connections of who was killed: nobody can know before.

    def broken(self, *, noticed: bool = True, slack_s: float = 0.0) -> list[str]:
        """The promises that do not hold. noticed: also how fast, with so much more time."""
        found = []
        if self.wrong:
            found.append(f"{self.wrong} bytes landed in memory of another transfer")
        if self.held:
            found.append(f"not given back: {self.held}")
        if any(self.exits.values()):
            found.append(f"exit codes {self.exits}")
        limit = NOTICED_S.get(self.fault)
        noticed_s = self.noticed_s - self.closed_s
        if noticed and limit is not None and noticed_s > limit + slack_s:
            found.append(f"noticed after {noticed_s:.2f} s, not {limit + slack_s} s")
        return found


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
        self.connection: socket.socket | None = None  #: Of the control plane. It breaks when the process ends.
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
        """As `ask`, of a process that may be frozen: nobody waits for the answer."""
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
        """Until the kernel has closed the connection of a process that was killed."""
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
        """What a survivor has not got back in time."""
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


async def under_way(near: End, number: int, relay: str) -> None:
    """Until bytes of the get come, or it is over."""

    async def begun() -> None:
        while not near.ends[number].done() and not (await near.ask(do="stats"))[f"{relay}_incoming_bytes"]:
            await asyncio.sleep(0)

    await within(f"first bytes of get {number} at {near.name}", begun())


async def stopped_on_the_way(far: End, near: End, relay: str) -> int:
    """Stop the far process while it sends. Returns: the number of the get that is on its way, and stays there."""
    for _ in range(STOPS_MOST):
        coming = await near.fetch(far, LARGE, 2, deadline_s=DEADLINE_S)
        await under_way(near, coming, relay)
        os.kill(far.pid, signal.SIGSTOP)
        done, _ = await asyncio.wait({near.ends[coming]}, timeout=DRAINED_S)
        if not done:
            return coming
        os.kill(far.pid, signal.SIGCONT)  # all of it was on its way already
        await _checked(near, coming, 2)  # both arenas have no room for two of them
    raise AssertionError(f"{LARGE} bytes came before their sender was stopped, {STOPS_MOST} times")


async def hurt(relay: str, fault: Fault) -> Outcome:
    """A fault of the far process while it sends, and is sent to; a third process is given the memory meanwhile."""
    async with ground(relay) as land:
        near = await land.start("near", "near")
        other = await land.start("far", "other")
        far = await land.start("far", "far")
        for sender, receiver in ((far, near), (near, far), (other, near)):  # the ways are open
            await _checked(receiver, await receiver.fetch(sender, 1 << 20, 1), 1)
        await far.fetch(near, LARGE, 2, deadline_s=DEADLINE_S)
        coming = await stopped_on_the_way(far, near, relay)
        begun, closed_s = time.monotonic(), 0.0
        match fault:
            case "kill" | "restart":
                os.kill(far.pid, signal.SIGKILL)
                await far.cut_off()
                closed_s = time.monotonic() - begun
                await near.ask(do="forget", peer="far")
                await within("end of far's output", far.dead.wait())
            case "freeze":
                pass
            case "link":
                land.pods.cut()
                os.kill(far.pid, signal.SIGCONT)
            case "vanish":  # a machine without power: nothing refuses, and nothing ever answers
                land.pods.cut()
                os.kill(far.pid, signal.SIGKILL)
                await within("end of far's output", far.dead.wait())
        end = await near.end_of(coming)
        noticed_s = max(end["at"] - begun, 0.0)
        reason = end.get("reason", "")
        wrong = transfers = 0
        if fault == "restart":
            del land.ends["far"]
            await land.held(near)
            far = await land.start("far", "far")
            wrong += await _checked(near, await near.fetch(far, 8 << 20, 3), 3)
        elif fault == "freeze":
            await near.ask(do="forget", peer="far")
            numbers = [await near.fetch(other, 8 << 20, 10 + one) for one in range(6)]
            for number in numbers:
                await near.end_of(number)
            os.kill(far.pid, signal.SIGCONT)
            await far.ask(do="forget", peer="near")
            await land.calm(near)
            for one, number in enumerate(numbers):
                wrong += await _checked(near, number, 10 + one)
                transfers += 1
        elif fault == "link":
            for here, name in ((near, "far"), (far, "near"), (near, "other"), (other, "near")):
                await here.ask(do="forget", peer=name)
            land.pods.mend()
            for here, there in ((near, far), (far, near), (near, other), (other, near)):
                assert await here.ask(do="open", peer=there.name, facts=await there.ask(do="facts"))
            wrong += await _again(near, far, 4)
        elif fault == "vanish":
            await near.ask(do="forget", peer="far")
        transfers += fault in ("restart", "link")
        exits = await land.close("other", "far")
        for name in exits:
            await near.ask(do="forget", peer=name)
        held = await land.held(near)
        exits |= await land.close("near")
    return Outcome(
        relay=relay,
        fault=fault,
        transfers=transfers,
        noticed_s=noticed_s,
        closed_s=closed_s,
        reason=reason,
        wrong=wrong,
        held=held,
        exits=exits,
    )


async def slow(relay: str) -> Outcome:
    """A link over which a transfer takes far longer than a get waits for its next bytes: nothing is given up."""
    async with ground(relay) as land:
        land.pods.slow(SLOW_PER_S)
        near, far = await land.start("near", "near"), await land.start("far", "far")
        begun = time.monotonic()
        wrong = await _checked(near, await near.fetch(far, SLOW_NBYTES, 1, deadline_s=STALLED_S), 1)
        took_s = time.monotonic() - begun
        assert took_s > STALLED_S, f"the link was not slow: {took_s:.1f} s"
        exits = await land.close("far")
        await near.ask(do="forget", peer="far")
        held = await land.held(near)
        exits |= await land.close("near")
    return Outcome(
        relay=relay, fault="slow", transfers=1, noticed_s=0.0, reason="", wrong=wrong, held=held, exits=exits
    )


async def give_up_often(relay: str, transfers: int, *, careless: bool = False, seed: int = 1) -> Outcome:
    """Gets that are given up while their sender is frozen: what it still sends comes when other gets have the memory.

    careless: without quarantine, until that has done harm.
    """
    chance = random.Random(seed)
    async with ground(relay) as land:
        near = await land.start("near", "near", *(["careless"] if careless else []))
        other = await land.start("far", "other")
        far = await land.start("far", "far")
        done = wrong = 0
        while done < transfers and not (careless and wrong):
            size = chance.choice((1 << 20, 2 << 20, 4 << 20))
            marks = [1 + (done + one) % 200 for one in range(KEPT)]
            puts = [await other.put(near, size, mark) for mark in marks]
            late = await near.fetch(far, LATE, 255, "late")
            if careless or chance.random() < 0.5:
                await under_way(near, late, relay)
            else:
                await asyncio.sleep(chance.uniform(0, 0.02))  # it is stopped anywhere, before its first byte, too
            os.kill(far.pid, signal.SIGSTOP)
            await near.ask(do="give_up", request="late")
            kept = [(await near.get(other, metadata), mark) for metadata, mark in zip(puts, marks, strict=True)]
            for number, _ in kept:
                await near.end_of(number)
            os.kill(far.pid, signal.SIGCONT)
            if (await near.end_of(late))["event"] == "here":  # it was too late to give it up
                wrong += await _checked(near, late, 255)
            # What came after the one that was given up shows that all of that is here.
            behind = await near.fetch(far, 4096, 254)
            for number, mark in ((behind, 254), *kept):
                if careless and (await near.end_of(number))["event"] != "here":  # late bytes are in its slot's header
                    wrong += REUSED in (await near.end_of(number))["reason"]
                else:
                    wrong += await _checked(near, number, mark)
            done += len(kept) + 1
            near.ends.clear()
        held = await land.held(near)
        exits = await land.close("other", "far", "near")
    return Outcome(
        relay=relay,
        fault="careless" if careless else "given up",
        transfers=done,
        noticed_s=0.0,
        reason="",
        wrong=wrong,
        held=held,
        exits=exits,
    )


async def _checked(near: End, number: int, mark: int) -> int:
    """How many bytes of a get are wrong. Raises: AssertionError: it failed."""
    end = await near.end_of(number)
    assert end["event"] == "here", end
    return int(await near.ask(do="wrong", number=number, mark=mark))


async def _again(near: End, far: End, mark: int) -> int:
    """As `_checked`, of a way that is to be made anew: a first try may still find the old one broken."""
    for _ in range(10):
        number = await near.fetch(far, 8 << 20, mark, deadline_s=DEADLINE_S)
        if (await near.end_of(number))["event"] == "here":
            return await _checked(near, number, mark)
    raise AssertionError("the way does not come back")


def _inherited() -> dict[str, str]:
    """Without what the relay nixl has set in this process: its network interface is none of a pod's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
