"""A process that answers whoever says Hello, word for word. Run by `peers.PeerProcess`: NAME ENDPOINT plain|secure."""

from __future__ import annotations

import asyncio
import sys

from stage_runtime.sockets.channels import Channels
from stage_runtime.sockets.endpoints.addresses import CurveSecurity
from stage_runtime.wire.frames import RequestRef
from stage_runtime.wire.messages import Deregister, Hello, Message


class Echo:
    def __init__(self) -> None:
        self.channels: Channels

    def introduced(self, sender: str, message: Message) -> bool:
        if not isinstance(message, Hello):
            return False
        self.channels.connect(sender, message.member.endpoint)
        return True

    def received(self, sender: str, message: Message) -> None:
        if isinstance(message, Deregister):
            self.channels.send(sender, message)

    def unreadable(self, sender: str, request: RequestRef | None, problem: str) -> None: ...

    def lost(self, peer: str) -> None: ...


async def serve(name: str, endpoint: str, secure: bool) -> None:
    echo = Echo()
    security = CurveSecurity(bytes(range(32))) if secure else None
    echo.channels = Channels(echo, incarnation=name, loop=asyncio.get_running_loop(), security=security)
    print(echo.channels.bind(endpoint), flush=True)
    await asyncio.Event().wait()


asyncio.run(serve(sys.argv[1], sys.argv[2], sys.argv[3] == "secure"))
