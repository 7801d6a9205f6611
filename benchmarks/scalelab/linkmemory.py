"""The cost of a link at one end: memory and descriptors, by who sends on it. Real `Channels` over Unix sockets.

One process has one end of all links, another one the other ends. A third of the links is used before the first look, so
that what the process itself takes is not counted. Called by `benchmarks/scale.py`, and started by it as both processes.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from typing import Any, Final

import msgspec

from benchmarks.scalelab import children
from benchmarks.scalelab.children import Child
from stage_runtime.sockets.channels import Channels
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import Deregister, Message

LINKS: Final = 300
MESSAGES: Final = 1000  # on each link and in each direction: libzmq's queues have used all that they keep
BURST: Final = 5  # on each link at once; of more, what waits to be sent and acknowledged is measured, too
PAUSE_S: Final = 0.01
SETTLED_S: Final = 2.5  # late acks have gone out
MESSAGE: Final = Deregister("x" * 64)


class LinkMemory(msgspec.Struct, frozen=True):
    """The cost of one link at an end that sends, receives or does both; on average."""

    sends: bool
    receives: bool
    nbytes: float
    descriptors: float

    @property
    def end(self) -> str:
        both = "an end that sends and receives"
        return both if self.sends and self.receives else f"the end that {'sends' if self.sends else 'receives'}"


async def measure(*, sends: bool, receives: bool, links: int = LINKS, messages: int = MESSAGES) -> LinkMemory:
    """Measures at the end that has all links."""
    with tempfile.TemporaryDirectory(prefix="links-") as folder:
        here, there = [await Child.start(__name__, folder) for _ in range(2)]
        try:
            (one,) = (await here.ask("listen", count=1))["ends"].items()
            others = list((await there.ask("listen", count=links))["ends"].items())
            await here.ask("know", ends=dict(others))
            await there.ask("know", ends=dict([one]))

            async def use(some: list[tuple[str, str]]) -> dict[str, Any]:
                if sends:
                    await here.ask("send", senders=[one[0]], receivers=[name for name, _ in some], messages=messages)
                if receives:
                    await there.ask("send", senders=[name for name, _ in some], receivers=[one[0]], messages=messages)
                await asyncio.sleep(SETTLED_S)
                return await here.ask("usage")

            before = await use(others[: links // 3])
            after = await use(others[links // 3 :])
        finally:
            await asyncio.gather(here.kill(), there.kill())
    more = links - links // 3
    assert after["links"] == links
    assert after["received"] == (links * messages if receives else 0)
    memory, descriptors = ((after[what] - before[what]) / more for what in ("memory_bytes", "descriptors"))
    return LinkMemory(sends, receives, memory, descriptors)


class End:
    """One process's end of its links. `sockets.frames.receiving.Handler`."""

    def __init__(self, folder: str, known: dict[str, str]) -> None:
        self.name = secrets.token_hex(8)
        self.received_messages = 0
        self._known = known
        self.channels = Channels(self, incarnation=self.name, loop=asyncio.get_running_loop())
        self.endpoint = self.channels.bind(f"ipc://{folder}/{self.name}")

    def introduced(self, sender: str, message: Message) -> bool:
        self.channels.connect(sender, self._known[sender], asleep=True)
        return True

    def received(self, sender: str, message: Message) -> None:
        self.received_messages += 1

    def unreadable(self, sender: str, request: RequestRef | None, problem: str) -> None:
        raise AssertionError(problem)

    def lost(self, peer: str) -> None:
        raise AssertionError(peer)


class Ends:
    """The orders of a process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._known: dict[str, str] = {}  #: Endpoints of the other process, by name.
        self._ends: dict[str, End] = {}

    async def listen(self, count: int) -> dict[str, Any]:
        made = [End(self._folder, self._known) for _ in range(count)]
        self._ends |= {end.name: end for end in made}
        return {"ends": {end.name: end.endpoint for end in made}}

    async def know(self, ends: dict[str, str]) -> dict[str, Any]:
        self._known.update(ends)
        return {}

    async def send(self, senders: list[str], receivers: list[str], messages: int) -> dict[str, Any]:
        """So many from each of them to each of the others."""
        links = [self._ends[one].channels.connect(other, self._known[other]) for one in senders for other in receivers]
        for _ in range(messages // BURST):
            for link in links:
                for _ in range(BURST):
                    link.send(MESSAGE)
            await asyncio.sleep(PAUSE_S)
        return {}

    async def usage(self) -> dict[str, Any]:
        return {
            **children.own_usage(),
            "links": sum(len(end.channels.peers) for end in self._ends.values()),
            "received": sum(end.received_messages for end in self._ends.values()),
        }


def main() -> None:
    (folder,) = sys.argv[1:]

    def make() -> dict[str, Any]:
        made = Ends(folder)
        return {"listen": made.listen, "know": made.know, "send": made.send, "usage": made.usage}

    children.serve(make)


if __name__ == "__main__":
    main()
