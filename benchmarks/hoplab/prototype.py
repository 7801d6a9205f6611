"""The limit for a hop of this design: the same path with nothing around it.

It has this in common with the runtime: processes connected by ZeroMQ over TCP, read by descriptor on a uvloop thread;
control messages of msgspec array-like structs with a header and bindings; one worker thread per stage, which sends its
result itself; payloads up to 72 KiB in the message, larger ones in a shared-memory arena that peers map once, read
where they lie and give back by one message. It lacks checks of values, acknowledgements, retries, credits,
aborts, streams, timings, metrics, fan-in, tracing, heartbeats and every error path.

`Pipeline` starts the processes and is the request manager of one. Run as a program, this file is one stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import mmap
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec
import numpy as np
import uvloop
import zmq

INLINE_NBYTES: Final = 72 << 10  # as in the runtime
ARENA_NBYTES: Final = 4 << 30  # sparse, as in the runtime
PREFAULTED_NBYTES: Final = 32 << 20  # as in the runtime
PAGE: Final = 4096


class Header(msgspec.Struct, array_like=True):
    request_id: str
    attempt: int
    owner: str
    bindings: dict[str, str]
    remaining_ms: int | None = None
    traceparent: str | None = None


class Ref(msgspec.Struct, array_like=True):
    path: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    kind: str = "torch"


class Payload(msgspec.Struct, array_like=True, tag=1):
    """A request's value on its way. Its tensor lies inline, or in the sender's arena at ``start``."""

    header: Header
    source: str
    target: str
    value: bytes
    refs: tuple[Ref, ...] = ()
    inline: bytes = b""
    start: int = -1
    generation: int = 0


class Returned(msgspec.Struct, array_like=True, tag=2):
    """The receiver has let go of a slot."""

    start: int
    generation: int


class Frame(msgspec.Struct, array_like=True):
    protocol: int
    sender: str
    receiver: str
    seq: int
    message: Payload | Returned


class Tensor(msgspec.Struct):
    """A request's tensor where torch is not imported."""

    shape: tuple[int, ...]
    dtype: str
    data: Any


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode
_value = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Arena:
    """Slots in a memfd, the lowest address first, so that the same pages stay warm."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("hops")
        os.ftruncate(self.fd, ARENA_NBYTES)
        self.map = mmap.mmap(self.fd, ARENA_NBYTES)
        self.bytes: np.ndarray[Any, Any] = np.frombuffer(self.map, np.uint8)
        self.bytes[:PREFAULTED_NBYTES] = 0
        self._generations = itertools.count(1)
        self._free: dict[int, list[int]] = {}  #: size -> starts, last used last
        self._used: dict[int, tuple[int, int]] = {}  #: start -> (size, generation)
        self._end = 0
        self._lock = threading.Lock()

    def put(self, data: Any) -> tuple[int, int]:
        size = -(-len(data) // PAGE) * PAGE
        with self._lock:
            free = self._free.get(size)
            if free:
                start = free.pop()
            else:
                start, self._end = self._end, self._end + size
            generation = next(self._generations)
            self._used[start] = (size, generation)
        self.bytes[start : start + len(data)] = np.frombuffer(data, np.uint8)
        return start, generation

    def returned(self, start: int, generation: int) -> None:
        with self._lock:
            size, used_by = self._used.pop(start)
            assert used_by == generation
            self._free.setdefault(size, []).append(start)


class Process:
    """One process's ends of both planes."""

    def __init__(self, name: str, taken: Callable[[str, Payload], None]) -> None:
        self.name = name
        self.arena = Arena()
        self._taken = taken
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._pull = self._context.socket(zmq.PULL)
        self._pull.linger = 0
        self._pull.bind("tcp://127.0.0.1:*")
        self._links: dict[str, tuple[zmq.Socket[bytes], threading.Lock, Any]] = {}
        self._mapped: dict[str, mmap.mmap] = {}

    def facts(self) -> dict[str, Any]:
        endpoint = bytes(self._pull.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        return {"name": self.name, "endpoint": endpoint, "pid": os.getpid(), "fd": self.arena.fd}

    def connect(self, facts: dict[str, Any]) -> None:
        push = self._context.socket(zmq.PUSH)
        push.linger = 0
        push.connect(facts["endpoint"])
        self._links[facts["name"]] = (push, threading.Lock(), itertools.count(1))
        fd = os.open(f"/proc/{facts['pid']}/fd/{facts['fd']}", os.O_RDWR)
        self._mapped[facts["name"]] = mmap.mmap(fd, ARENA_NBYTES)
        os.close(fd)

    def read(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(int(self._pull.getsockopt(zmq.FD)), self._drain)
        loop.call_soon(self._drain)

    def close(self, loop: asyncio.AbstractEventLoop | None) -> None:
        if loop is not None:
            loop.remove_reader(int(self._pull.getsockopt(zmq.FD)))
        self._context.destroy(linger=0)

    def push(self, peer: str, message: Payload | Returned) -> None:
        """Any thread."""
        push, lock, numbers = self._links[peer]
        with lock:
            push.send(_encode(Frame(3, self.name, peer, next(numbers), message)))

    def send(self, header: Header, target: str, peer: str, fields: dict[str, Any]) -> None:
        """Any thread. The tensor at ``data``, if there is one, travels as bytes."""
        data = fields["data"]
        if data is None:
            self.push(peer, Payload(header, self.name, target, _encode(fields)))
            return
        if isinstance(data, Tensor):
            shape, dtype, flat = data.shape, data.dtype, data.data
        else:
            shape, dtype = tuple(data.shape), str(data.dtype).removeprefix("torch.")
            flat = memoryview(data.numpy().reshape(-1).view(np.uint8))
        value = _encode({**fields, "data": msgspec.msgpack.Ext(1, b"\0\0\0\0")})
        refs = (Ref("payload.data", shape, dtype, 0, len(flat)),)
        if len(flat) <= INLINE_NBYTES:
            self.push(peer, Payload(header, self.name, target, value, refs, bytes(flat)))
            return
        start, generation = self.arena.put(flat)
        self.push(peer, Payload(header, self.name, target, value, refs, b"", start, generation))

    def open(self, sender: str, message: Payload, *, torch: bool) -> dict[str, Any]:
        fields = _value(message.value)
        if message.refs:
            ref = message.refs[0]
            buffer: Any = bytearray(message.inline)
            if message.start >= 0:
                buffer = memoryview(self._mapped[sender])[message.start : message.start + ref.nbytes]
            fields["data"] = _tensor(ref, buffer) if torch else Tensor(ref.shape, ref.dtype, buffer)
        return fields

    def give_back(self, sender: str, message: Payload) -> None:
        """Every view of the message's tensor is gone. Any thread."""
        if message.start >= 0:
            self.push(sender, Returned(message.start, message.generation))

    def _drain(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frame = _decode(self._pull.recv(zmq.NOBLOCK))
                message = frame.message
                if isinstance(message, Returned):
                    self.arena.returned(message.start, message.generation)
                else:
                    self._taken(frame.sender, message)


def _tensor(ref: Ref, buffer: Any) -> Any:
    import torch

    return torch.frombuffer(buffer, dtype=getattr(torch, ref.dtype)).view(ref.shape)


class Pipeline:
    """Stages in processes of their own, and the request manager in this one."""

    def __init__(self, stages: int) -> None:
        self.stages = [f"s{index}" for index in range(stages)]
        self.pids: list[int] = []
        self._process = Process("coordinator", self._finished)
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._attempts = itertools.count(1)
        self._bindings = {name: secrets.token_hex(8) for name in self.stages}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Pipeline]:
        children = [
            subprocess.Popen([sys.executable, __file__, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for name in self.stages
        ]
        try:
            facts = {"coordinator": self._process.facts()}
            for name, child in zip(self.stages, children, strict=True):
                assert child.stdout is not None
                facts[name] = json.loads(await asyncio.to_thread(child.stdout.readline))
            for index, child in enumerate(children):
                assert child.stdin is not None
                before = facts[self.stages[index - 1] if index else "coordinator"]
                after = facts[self.stages[index + 1] if index + 1 < len(children) else "coordinator"]
                child.stdin.write(json.dumps({"before": before, "after": after}).encode() + b"\n")
                child.stdin.flush()
            for name in {self.stages[0], self.stages[-1]}:
                self._process.connect(facts[name])
            self._process.read(asyncio.get_running_loop())
            self.pids = [child.pid for child in children]
            yield self
        finally:
            for child in children:
                child.kill()
                child.wait()
            self._process.close(asyncio.get_running_loop())

    async def once(self, inputs: Tensor | None) -> None:
        request_id = secrets.token_hex(8)
        header = Header(request_id, next(self._attempts), self._process.name, self._bindings, 600_000)
        self._waiting[request_id] = asyncio.get_running_loop().create_future()
        request = {"id": request_id, "kind": "pipeline", "params": {}, "modalities": [], "stream": False}
        self._process.send(header, self.stages[0], self.stages[0], {"request": request, "data": inputs})
        await self._waiting[request_id]

    def _finished(self, sender: str, message: Payload) -> None:
        fields = self._process.open(sender, message, torch=False)
        self._waiting.pop(message.header.request_id).set_result(None)
        del fields
        self._process.give_back(sender, message)


async def stage(name: str) -> None:
    """One stage that gives what it gets, until its standard input ends."""
    import torch

    torch.set_num_threads(1)
    work: queue.SimpleQueue[tuple[str, Payload]] = queue.SimpleQueue()
    process = Process(name, lambda sender, message: work.put((sender, message)))
    print(json.dumps(process.facts()), flush=True)
    neighbours = json.loads(sys.stdin.readline())
    after = neighbours["after"]["name"]
    for facts in {one["name"]: one for one in neighbours.values()}.values():
        process.connect(facts)

    def compute() -> None:
        while True:
            sender, message = work.get()
            fields = process.open(sender, message, torch=True)
            process.send(message.header, after, after, fields)
            del fields
            process.give_back(sender, message)

    threading.Thread(target=compute, daemon=True).start()
    process.read(asyncio.get_running_loop())
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(stage(sys.argv[1]))
