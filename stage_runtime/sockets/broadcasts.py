"""Broadcasts of a coordinator to all its members: PUB at one end, SUB at the other. They may be lost.

Called by `channels`, on the process's I/O thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import zmq

from stage_runtime.sockets.endpoints.opening import Sockets, closed_on_failure
from stage_runtime.sockets.frames.reading import Reading
from stage_runtime.wire import codec
from stage_runtime.wire.frames import FRAME_LIMIT, PROTOCOL, Envelope, Frame
from stage_runtime.wire.messages import Message


class Broadcasts:
    """The broadcasts that one process publishes and subscribes to."""

    def __init__(
        self,
        me: str,
        *,
        sockets: Sockets,
        reading: Reading,
        counters: Counter[str],
        deliver: Callable[[Envelope], None],
    ) -> None:
        """me: the incarnation of this process. deliver: called with each broadcast that comes."""
        self._me = me
        self._sockets = sockets
        self._reading = reading
        self._counters = counters
        self._deliver = deliver
        self._publisher: zmq.Socket[bytes] | None = None
        self._subscriptions: dict[str, zmq.Socket[bytes]] = {}  #: Sockets by the publisher's endpoint.

    def bind(self, endpoint: str) -> str:
        """Publish there. Returns the endpoint as bound."""
        publisher = self._sockets.make(zmq.PUB, accepts=True)
        bound = self._sockets.bind(publisher, endpoint)
        self._publisher = publisher
        return bound

    def publish(self, message: Message) -> None:
        if self._publisher is not None:
            frame = codec.encode(Frame(PROTOCOL, self._me, "", 0, 0, 0, 0, message))
            try:
                self._publisher.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                self._counters["publish_dropped"] += 1

    def subscribe(self, endpoint: str) -> None:
        if endpoint in self._subscriptions:
            return
        subscription = self._sockets.make(zmq.SUB)
        with closed_on_failure(subscription):
            subscription.maxmsgsize = FRAME_LIMIT
            subscription.subscribe(b"")
            self._sockets.connect(subscription, endpoint)
        self._subscriptions[endpoint] = subscription
        self._sockets.read(subscription, lambda: self._reading.drain(subscription, subscription.recv, self._take))

    def unsubscribe(self, endpoint: str) -> None:
        subscription = self._subscriptions.pop(endpoint, None)
        if subscription is not None:
            self._sockets.forget(subscription)

    def close(self) -> None:
        for subscription in self._subscriptions.values():
            self._sockets.forget(subscription)
        self._subscriptions.clear()
        if self._publisher is not None:
            self._publisher.close(linger=0)

    def _take(self, data: bytes) -> None:
        frame = self._reading.opened(data)
        if frame is not None:
            self._deliver(frame)
