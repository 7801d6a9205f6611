"""The other end of `test_relay_processes`: a process with relays of its own, which takes commands on stdin."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import sys
from typing import Any

import msgspec
import numpy as np

from stage_runtime.errors import TransferError
from stage_runtime.payloads import encoding
from stage_runtime.relays.context import RelaySettings
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.registry import RELAYS
from tests import debian
from tests.relays.relay_pairs import PATIENCE_S
from tests.relays.relay_tables import TABLE


async def main() -> None:
    loop = asyncio.get_running_loop()
    released, held = [], {}
    named = sys.argv[3]
    gpus = named == "gpu"  # on a machine with one, the relay as it is
    relays = Relays(
        loop=loop,
        incarnation=sys.argv[2],
        on_release=lambda peer, transfer: released.append(transfer),
        settings=RelaySettings(
            named=frozenset(debian.usable(RELAYS) if named in ("all", "gpu") else (named,)),
            arena_bytes=256 << 20,
            prefault_bytes=0,
            bind=sys.argv[1],
            gpus=(0,) if gpus else (),
        ),
        table=RELAYS if gpus else TABLE,
    )
    send(relays.facts())
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = msgspec.json.decode(line)
        match command.pop("do"):
            case "open":
                send(relays.open("near", command["facts"]))
            case "get":
                try:
                    operation = relays.get(base64.b64decode(command["metadata"]), request_id="r", peer="near")
                    view = await operation.wait_for_completion(command.get("timeout", PATIENCE_S))
                    there = operation.take_device()
                    held[operation.transfer] = (view, there)
                    answer = {"sha": hashlib.sha256(view).hexdigest(), "nbytes": len(view)}
                    if there is not None:
                        flat = there.flat.cpu().numpy()
                        answer |= {"gpu_sha": hashlib.sha256(flat).hexdigest(), "gpu": str(there.flat.device)}
                    send(answer)
                    del view, there, operation
                except TransferError as error:
                    send({"error": str(error)})
            case "drop":
                held.clear()
                await asyncio.sleep(0.05)
                send(released)
                released.clear()
            case "put":
                extracted = encoding.extract(np.full(command["nbytes"], command["mark"], np.uint8))
                given = relays.put(extracted, request_id="r", peer="near", backend=command["backend"])
                assert given is not None
                send(base64.b64encode(given.metadata).decode())
            case "released":
                relays.released("near", command["transfer"])
                send(True)
            case "stats":
                send(relays.stats())
    relays.close()


def send(answer: Any) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


asyncio.run(main())
