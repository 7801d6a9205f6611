"""The limits of a hop on this machine: a copy, a raw TCP connection, one ZeroMQ message with one hand-off."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import time

import numpy as np
import zmq


def memcpy_us(nbytes: int, rounds: int = 30) -> float:
    source = np.ones(max(nbytes, 1), np.uint8)
    target = np.ones_like(source)
    return _median_us(lambda: np.copyto(target, source), rounds)


TCP_PEER = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
n = int(sys.argv[2]); buffer = memoryview(bytearray(n))
while True:
    got = 0
    while got < n:
        k = s.recv_into(buffer[got:])
        if not k: sys.exit()
        got += k
    s.sendall(b"k")
"""


def raw_tcp_us(nbytes: int, rounds: int = 30) -> float:
    """One way: the message there and one byte back, less half of a one-byte round trip."""
    there_and_one_back = _tcp_round_us(max(nbytes, 1), rounds)
    return there_and_one_back - _tcp_round_us(1, rounds) / 2


def _tcp_round_us(nbytes: int, rounds: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        child = subprocess.Popen([sys.executable, "-c", TCP_PEER, str(port), str(nbytes)])
        connection, _ = server.accept()
    data = bytes(nbytes)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def trip() -> None:
            connection.sendall(data)
            connection.recv(1)

        figure = _median_us(trip, rounds)
    child.wait()
    return figure


ZMQ_PEER = """
import asyncio, queue, sys, threading, uvloop, zmq
async def main():
    context, work = zmq.Context(), queue.SimpleQueue()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.connect(sys.argv[1]); push.connect(sys.argv[2])
    threading.Thread(target=lambda: [push.send(data) for data in iter(work.get, b"")], daemon=True).start()
    def drain():
        try:
            while True: work.put(pull.recv(zmq.NOBLOCK))
        except zmq.Again: pass
    asyncio.get_running_loop().add_reader(pull.getsockopt(zmq.FD), drain); drain()
    await asyncio.sleep(3600)
uvloop.run(main())
"""


async def zmq_one_way_us(rounds: int = 2000) -> float:
    """Half a round trip of 300 bytes: descriptors drained on uvloop, one hand-off to a thread at the far end."""
    loop = asyncio.get_running_loop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (push, pull)]
    peer = [sys.executable, "-c", ZMQ_PEER, *(f"tcp://127.0.0.1:{port}" for port in ports)]
    child = subprocess.Popen(peer)
    back = asyncio.Event()

    def drain() -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                pull.recv(zmq.NOBLOCK)
                back.set()

    descriptor = int(pull.getsockopt(zmq.FD))
    loop.add_reader(descriptor, drain)
    times = []
    for _ in range(rounds):
        back.clear()
        start = time.perf_counter()
        push.send(b"x" * 300)
        drain()
        await back.wait()
        times.append(time.perf_counter() - start)
    loop.remove_reader(descriptor)
    child.kill()
    child.wait()
    context.destroy(linger=0)
    return statistics.median(times) * 1e6 / 2


def _median_us(call: object, rounds: int) -> float:
    assert callable(call)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6
