"""One process of `relay_faults`: relays of its own, ordered about by lines of JSON on stdin, telling what happens.

    python relay_end.py RELAY ADDRESS NAME SOCKET [careless]

SOCKET: the path of a Unix socket to be connected to as long as the process lives: its end shows a death to the driver.

careless: memory of a get that was given up is used again at once, as if memory were never quarantined.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np

from stage_runtime.errors import TransferError
from stage_runtime.payloads import encoding
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays

ARENA_NBYTES = 128 << 20
_telling = threading.Lock()


def tell(**event: Any) -> None:
    with _telling:
        os.write(1, msgspec.json.encode(event) + b"\n")


class End:
    def __init__(self, relay: str, address: str, name: str, careless: bool) -> None:
        self.relay = relay
        self.careless = careless
        self.relays = Relays(
            loop=asyncio.get_running_loop(),
            incarnation=name,
            on_release=lambda peer, transfer: tell(event="release", peer=peer, transfer=transfer),
            settings=RelaySettings(
                named=frozenset({relay}), arena_bytes=ARENA_NBYTES, prefault_bytes=0, bind=f"tcp://{address}:*"
            ),
        )
        self.views: dict[int, memoryview] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def put(self, peer: str, nbytes: int, mark: int) -> Any:
        extracted = encoding.extract(np.full(nbytes, mark, np.uint8))
        operation = self.relays.put(extracted, request_id="put", peer=peer, backend=self.relay)
        return None if operation is None else base64.b64encode(operation.metadata).decode()

    def get(self, number: int, peer: str, metadata: str, request: str, timeout: float) -> None:
        operation = self.relays.get(base64.b64decode(metadata), request_id=request, peer=peer)

        async def fetch() -> None:
            try:
                view = await operation.wait_for_completion(timeout)
            except TransferError as error:
                tell(event="failed", number=number, reason=str(error), at=time.monotonic())
            else:
                self.views[number] = view
                tell(event="here", number=number, nbytes=len(view), at=time.monotonic())

        task = asyncio.ensure_future(fetch())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def wrong(self, number: int, mark: int) -> int:
        """How many bytes of a get are not the mark; it is let go of."""
        return int(np.count_nonzero(np.frombuffer(self.views.pop(number), np.uint8) != mark))

    def give_up(self, request: str) -> None:
        self.relays.cleanup(request)
        self._let_go()

    def forget(self, peer: str) -> None:
        self.relays.forget(peer)
        self._let_go()

    def _let_go(self) -> None:
        """The behaviour of a relay without quarantine."""
        if not self.careless:
            return
        # The same bytes, by a view that the arena does not know of.
        relay: Any = self.relays._relays[self.relay]
        memory = relay._received
        gets = (relay._reading if self.relay == "mooncake" else relay._receiving)._gets
        for _, get in [*gets.quarantined.values(), *gets.in_progress.values()]:
            if get.operation.done() and get.region is not None:
                start = get.region.ctypes.data - memory.address
                get.region = np.frombuffer(memory._map, np.uint8)[start : start + len(get.region)]

    def do(self, order: dict[str, Any]) -> Any:
        match order.pop("do"):
            case "facts":
                return self.relays.facts()
            case "open":
                return self.relay in self.relays.open(**order)
            case "put":
                return self.put(**order)
            case "get":
                return self.get(**order)
            case "wrong":
                return self.wrong(**order)
            case "released":
                return self.relays.released(**order)
            case "give_up":
                return self.give_up(**order)
            case "forget":
                return self.forget(**order)
            case "stats":
                self.relays.release_now()
                return self.relays.stats()


async def main(relay: str, address: str, name: str, path: str, *careless: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    end = End(relay, address, name, bool(careless))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        tell(event="answer", answer=end.do(msgspec.json.decode(line)))
    end.relays.close()
    connection.close()


asyncio.run(main(*sys.argv[1:]))
