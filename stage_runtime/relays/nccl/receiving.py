"""The nccl relay's receiving side: memory for each transfer, a thread and a world for each sender.

A transfer that was given up keeps its memory until its thread has received it, or has ended the world: then the library
has let go of it, and nothing can be written there. It runs on the loop, except where a method says otherwise.
"""

from __future__ import annotations

import asyncio
import collections
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from stage_runtime.relays.base import OnRelease, Peer, TransferKey
from stage_runtime.relays.memory.arena import PAGE, Arena
from stage_runtime.relays.memory.pins import Pins
from stage_runtime.relays.moving.gets import Get, Gets
from stage_runtime.relays.moving.pace import Pace
from stage_runtime.relays.moving.pending_transfers import GetOperation
from stage_runtime.relays.nccl import nccl_messages, worlds
from stage_runtime.relays.nccl.nccl_messages import Join, Joining, NcclFacts, NcclGrant, NcclMetadata, Withdrawn
from stage_runtime.relays.nccl.worlds import Broken, CollectiveBackend, World

GRANTED: Final = 4  # transfers that a sender knows it is to send next
CONNECT_S: Final = 3.0


class NcclGet(Get):
    """One get under way."""

    __slots__ = ("metadata", "piece_nbytes")

    def __init__(self, operation: GetOperation, metadata: NcclMetadata, request_id: str, holder: str) -> None:
        super().__init__(operation, metadata.nbytes, request_id, holder)
        self.metadata = metadata
        self.piece_nbytes = 0  #: The size as granted.


class NcclRoute:
    """The route from one peer, with the thread that receives from it: begun by the first get."""

    def __init__(
        self,
        peer: Peer,
        facts: NcclFacts,
        own: NcclFacts,
        own_name: str,
        backend: CollectiveBackend,
        device: str = "cpu",
    ) -> None:
        """device: the GPU of NCCL's."""
        self.peer = peer
        self.facts = facts
        self.backend = backend
        self.gone = False
        self.moved_at = 0.0  #: When something last came from it, on `time.monotonic`.
        self.pace = Pace(nccl_messages.MOST_NBYTES)
        self.due: queue.SimpleQueue[NcclGet | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self._own = own
        self._device = device
        self._own_name = own_name
        self._connection: socket.socket | None = None
        self._world: World | None = None

    def end(self) -> None:
        """Its thread's waits fail, and it ends the world. Any thread may call this."""
        connection = self._connection
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    # --- in its thread ------------------------------------------------------------------------------------------

    def connected(self) -> tuple[socket.socket, World]:
        """The connection and the world, which are made if they do not exist.

        Raises: OSError, Broken: the sender is not reached.
        """
        if self._connection is None or self._world is None:
            name = secrets.token_hex(16)
            where = (self.facts.host, self.facts.orders)
            self._connection = socket.create_connection(where, timeout=CONNECT_S)
            nccl_messages.keep_alive(self._connection)
            nccl_messages.send(self._connection, Join(self.facts.token, self._own_name, name, self.backend))
            # A sender that has forgotten us closes the connection. The library would wait `worlds.JOIN_S` for it.
            if not isinstance(nccl_messages.decode_answer(nccl_messages.receive(self._connection)), Joining):
                raise Broken("it does not join")
            store = (self.facts.host, self.facts.store)
            self._world = World.join(
                name, self.backend, worlds.RECEIVER, host=self._own.host, store=store, device=self._device
            )
            self._connection.settimeout(worlds.STALL_S)
        if self.gone:
            raise Broken("it is gone")
        return self._connection, self._world

    def drop(self) -> None:
        """Nothing comes on the connection any more."""
        if self._connection is not None:
            self._connection.close()  # first: the peer ends its world before it meets an error of the library's
        if self._world is not None:
            self._world.abort()
        self._connection = self._world = None


class NcclReceiver:
    """Gets by peer and transfer. Each is waiting for memory, coming, or quarantined."""

    def __init__(self, loop: asyncio.AbstractEventLoop, memory: Arena, pins: Pins, on_release: OnRelease) -> None:
        self._loop = loop
        self._memory = memory
        self._on_release = on_release
        #: All of it: what the library may hold for longer keeps no transfer's memory.
        self._bytes: np.ndarray[Any, Any] = np.frombuffer(memory.map_again(), np.uint8)
        self._routes: set[NcclRoute] = set()
        self._gets: Gets[NcclRoute, NcclGet] = Gets(
            loop, memory, pins, on_release, room_nbytes=2 * PAGE, begin=self._begun
        )
        self.claim = self._gets.claim
        self.stats = self._gets.stats

    def last_moved(self, route: NcclRoute, key: TransferKey) -> float:
        """When something last came from that peer, on `time.monotonic`. A get that waits for memory here
        does not wait for its peer.
        """
        return route.moved_at if key in self._gets.in_progress else time.monotonic()

    def cleanup(self, request_id: str) -> None:
        """A request was aborted: what is to come for it is dropped. A value that comes already is received to its
        end.
        """
        self._give_up(lambda _, incoming: incoming.request_id == request_id, "its request was aborted")

    def forget(self, route: NcclRoute) -> None:
        """A peer is gone: nothing is awaited from it."""
        self._give_up(lambda other, _: other is route, f"its sender {route.peer} is gone")
        self._end(route)

    def close(self) -> None:
        self._gets.close()
        self._give_up(lambda *_: True, "the relay was closed")
        routes = list(self._routes)
        for route in routes:
            self._end(route)
        for route in routes:
            if route.thread is not None:
                route.thread.join(2 * worlds.JOIN_S)
        self._gets.quarantined.clear()

    # --- on the loop --------------------------------------------------------------------------------------------

    def _begun(self, route: NcclRoute, incoming: NcclGet) -> bool:
        if not self._started(route):
            return False
        incoming.region = self._memory.allocate_region(incoming.nbytes)
        if incoming.region is None:
            return False
        route.moved_at = max(route.moved_at, time.monotonic())
        self._gets.in_progress[incoming.key] = (route, incoming)
        route.due.put(incoming)
        return True

    def _started(self, route: NcclRoute) -> bool:
        """Start the route's thread, if it has none. False: the machine has no thread or no memory left for one."""
        if route.thread is None:
            thread = worlds.caller("receive", self._run, route)
            try:
                thread.start()
            except RuntimeError:
                return False
            route.thread = thread
            self._routes.add(route)
        return True

    def _give_up(self, which: Callable[[NcclRoute, NcclGet], bool], why: str) -> None:
        self._gets.fail_waiting(which, why)
        for pair in [pair for pair in self._gets.in_progress.values() if which(*pair)]:
            incoming = pair[1]
            incoming.fail(why)
            del self._gets.in_progress[incoming.key]
            self._gets.quarantined[incoming.key] = pair

    def _end(self, route: NcclRoute) -> None:
        route.gone = True
        if route in self._routes:
            self._routes.discard(route)
            route.due.put(None)
            route.end()

    def _over(self, route: NcclRoute, incoming: NcclGet, reason: str | None, broken: bool = False) -> None:
        """Its thread has finished with it: nothing is written there any more. broken: the sender is not reached."""
        region, incoming.region = incoming.region, None
        was_given_up = self._gets.quarantined.pop(incoming.key, None) is not None
        self._gets.in_progress.pop(incoming.key, None)
        if reason is None and not was_given_up:
            self._gets.landed(incoming, region)
            return
        if reason is not None:
            incoming.fail(reason, broken=broken)
        if not route.gone:
            self._on_release(*incoming.key)

    # --- in the thread of a route ---------------------------------------------------------------------------------

    def _run(self, route: NcclRoute) -> None:
        granted: collections.deque[NcclGet] = collections.deque()
        while True:
            incoming: NcclGet | None = None
            try:
                incoming = self._next(route, granted)
                if incoming is None:
                    break
                reason = self._receive(route, incoming)
            except (OSError, Broken, msgspec.MsgspecError) as error:
                reason = f"{route.peer} is not reached: {error}"[:200]
            except Exception as error:  # outermost of its thread: the gets fail, and it goes on
                reason = f"{type(error).__name__}: {error}"[:200]
            else:
                granted.popleft()
                self._on_loop(self._over, route, incoming, reason)
                continue
            route.drop()
            while granted:  # what was granted on that connection does not come
                self._on_loop(self._over, route, granted.popleft(), reason, True)
        route.drop()
        while granted:  # the route has ended between two transfers
            self._on_loop(self._over, route, granted.popleft(), f"its sender {route.peer} is gone")

    def _next(self, route: NcclRoute, granted: collections.deque[NcclGet]) -> NcclGet | None:
        """The next transfer to receive, granted. None: the route has ended."""
        while len(granted) < GRANTED:
            try:
                found = route.due.get(block=not granted)
            except queue.Empty:
                break
            if found is None:
                return None
            granted.append(found)
            connection, _ = route.connected()
            found.piece_nbytes = route.pace.next_nbytes()
            nccl_messages.send(connection, NcclGrant(found.metadata.transfer, found.nbytes, found.piece_nbytes))
        return granted[0]

    def _receive(self, route: NcclRoute, incoming: NcclGet) -> str | None:
        """Returns: why it does not come; None when it is here."""
        connection, world = route.connected()
        answer = nccl_messages.decode_answer(nccl_messages.receive(connection))
        if isinstance(answer, Joining) or answer.transfer != incoming.metadata.transfer:
            raise Broken(f"it sends {answer} for {incoming.metadata.transfer}")
        if isinstance(answer, Withdrawn):
            return answer.reason[:200]
        route.moved_at = time.monotonic()
        start = incoming.region.ctypes.data - self._memory.address
        into = self._bytes[start : start + incoming.nbytes]
        try:
            for nbytes in world.receive(into, connection, incoming.piece_nbytes):
                before, route.moved_at = route.moved_at, time.monotonic()
                route.pace.took(nbytes, route.moved_at - before)
                incoming.here_nbytes += nbytes
        except Broken:
            route.pace.gave_up()
            raise
        return None

    def _on_loop(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: nothing waits for it
            pass
