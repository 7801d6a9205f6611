"""A peer that does not read what is broadcast: its own queue is bounded, others hear everything, links go on."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from stage_runtime.sockets.endpoints import opening
from stage_runtime.wire import codec
from stage_runtime.wire.messages import Abort
from tests.sockets.peers import End, ends, introduce

BATCH = 500  # far below what is queued for one subscriber
FILLER = "x" * 4000  # so that the kernel's buffers hold few


@pytest.fixture
def short_path() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="omni"))
    yield path
    shutil.rmtree(path)


def numbered_abort(number: int) -> Abort:
    return Abort(f"r{number}", 1, "hub", FILLER)


def number_of(data: bytes) -> int:
    message = codec.decode(data).message
    assert isinstance(message, Abort)
    return int(message.request_id.removeprefix("r"))


@pytest.mark.proves("broadcast-not-read")
async def test_who_does_not_read_broadcasts_loses_its_own_and_no_other_waits(short_path: Path) -> None:
    hub, reader = End("hub", f"ipc://{short_path}/hub"), End("reader", f"ipc://{short_path}/reader")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    slow = context.socket(zmq.SUB)
    slow.rcvhwm = 1
    slow.subscribe(b"")
    try:
        async with ends(hub, reader):
            introduce(hub, reader)
            publisher = hub.channels.bind_publisher(f"ipc://{short_path}/pub")
            reader.channels.subscribe(publisher)
            slow.connect(publisher)
            number = 0

            def heard() -> set[int]:
                return {int(one.request_id[1:]) for _, one in reader.listener.messages if isinstance(one, Abort)}

            while not (heard() and slow.poll(0)):  # both have subscribed; from here on, the slow one does not read
                hub.channels.publish(numbered_abort(number := number + 1))
                await asyncio.sleep(0.01)
            most = 4 * opening.BUFFERED
            while number < most:
                batch = set(range(number + 1, number + BATCH + 1))
                for one in sorted(batch):
                    hub.channels.publish(numbered_abort(one))
                number += BATCH
                await reader.listener.until(lambda batch=batch: batch <= heard())  # type: ignore[misc]
                hub.send("reader", f"after {number}")
            await reader.listener.until(lambda: reader.listener.received_words[-1:] == [f"after {number}"])

            kept = 0
            last = 0
            while last <= most:  # it reads again, and hears what is said from now on
                while slow.poll(0):
                    last = number_of(slow.recv())
                    kept += last <= most
                hub.channels.publish(numbered_abort(number := number + 1))
                await asyncio.sleep(0.01)
            assert 0 < kept < most - opening.BUFFERED, "what did not fit into its queue was kept for it"
            assert hub.listener.lost_peers == reader.listener.lost_peers == []
    finally:
        slow.close(linger=0)
        context.term()
