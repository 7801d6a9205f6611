"""The values that the nccl relay has put, and the threads that send them: one for each connection of a receiver.

A slot from which the library may still read stays taken, whatever has become of its put, until the thread that sends it
has ended the piece or the world.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

import msgspec

from stage_runtime.errors import NO_ROOM
from stage_runtime.relays.base import Peer
from stage_runtime.relays.memory.placing import Placed
from stage_runtime.relays.nccl import nccl_messages, worlds
from stage_runtime.relays.nccl.nccl_messages import Join, Joining, NcclGrant, Next, Withdrawn
from stage_runtime.relays.nccl.worlds import Broken, World

log = logging.getLogger(__name__)

JOIN_S: Final = 5.0  # in which a receiver that has connected sends its `Join`
CONNECTIONS: Final = 1024  # of receivers, at once
RETRY_S: Final = 0.5  # without free descriptors, each accept fails at once


class NcclPut:
    """One put; its `PutOperation.resource`."""

    __slots__ = ("is_moving", "is_over", "nbytes", "peer", "placed", "transfer")

    def __init__(self, placed: Placed, peer: Peer, transfer: int, nbytes: int) -> None:
        self.placed = placed
        self.peer = peer
        self.transfer = transfer
        self.nbytes = nbytes
        self.is_moving = False
        self.is_over = False  #: Released or given up: its slot is freed when nothing moves.


class NcclSender:
    """Puts by peer and transfer, and the connections of those that receive them. Any thread may call this."""

    def __init__(
        self,
        sent: Any,
        facts: nccl_messages.NcclFacts,
        listening: socket.socket,
        free: Callable[[NcclPut], None],
        device: str = "cpu",
    ) -> None:
        """sent: the arena as an array of bytes. free: called when a slot is used no more. device: the GPU of NCCL's."""
        self._device = device
        self._sent = sent
        self._facts = facts
        self._listening = listening
        self._free = free
        self._lock = threading.Lock()
        self._puts: dict[tuple[Peer, int], NcclPut] = {}
        self._moving: set[NcclPut] = set()
        self._sessions: set[_ReceiverSession] = set()
        self._known: Callable[[Peer], bool] = lambda peer: False
        self._closing = threading.Event()
        self.strays = 0
        self._accepting = threading.Thread(target=self._accept, name="omni-relay-nccl-accept", daemon=True)

    def start(self, known: Callable[[Peer], bool]) -> None:
        """known: whether that peer is open."""
        self._known = known
        self._accepting.start()

    def add(self, outgoing: NcclPut) -> None:
        with self._lock:
            self._puts[outgoing.peer, outgoing.transfer] = outgoing

    def free(self, outgoing: NcclPut) -> None:
        """The put is over: free its slot, now or when nothing moves any more."""
        with self._lock:
            self._puts.pop((outgoing.peer, outgoing.transfer), None)
            outgoing.is_over = True
            if outgoing.is_moving:
                return
        self._free(outgoing)

    def forget(self, peer: Peer) -> None:
        """End what is being sent to a peer."""
        with self._lock:
            sessions = [session for session in self._sessions if session.peer == peer]
        for session in sessions:
            session.end()

    def stats(self) -> dict[str, int]:
        with self._lock:
            held = [outgoing.nbytes for outgoing in self._moving if outgoing.is_over]
            return {
                "outgoing_transfers": len(self._moving),
                "quarantined_sends": len(held),
                "quarantined_send_bytes": sum(held),
            }

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            sessions = list(self._sessions)
        try:
            self._listening.shutdown(socket.SHUT_RDWR)  # `close` does not wake who accepts
        except OSError:
            pass
        self._listening.close()
        for session in sessions:
            session.end()
        for thread in (self._accepting, *(session.thread for session in sessions)):
            if thread.is_alive():
                thread.join(worlds.JOIN_S)

    # --- threads ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if error.errno in NO_ROOM:
                    self._closing.wait(RETRY_S)
                continue  # else that one is gone again, or this is the end
            with self._lock:
                refused = len(self._sessions) >= CONNECTIONS
                session = _ReceiverSession(self, connection)
                if not refused:
                    self._sessions.add(session)
            if refused:
                connection.close()
                continue
            try:
                session.thread.start()
            except RuntimeError as error:  # the machine has no thread or no memory left for one
                log.warning("nccl relay: a receiver is not served: %s", error)
                with self._lock:
                    self._sessions.discard(session)
                connection.close()

    def serve(self, session: _ReceiverSession) -> None:
        """Serves a receiver until its connection ends. A thread of its own runs it."""
        try:
            join = self._joined(session)
            if join is None:
                self.strays += 1
                return
            nccl_messages.send(session.connection, Joining())
            store = (self._facts.host, self._facts.store)
            session.world = World.join(
                join.world, join.backend, worlds.SENDER, host=self._facts.host, store=store, device=self._device
            )
            session.connection.settimeout(None)
            while not session.is_over:
                order = nccl_messages.decode_order(nccl_messages.receive(session.connection))
                if not isinstance(order, NcclGrant):
                    return
                self._send(session, order)
        except (OSError, msgspec.MsgspecError, Broken) as error:
            log.debug("nccl relay: the world with %s has ended: %s", session.peer, error)
        except Exception:  # outermost of its thread: this world ends
            log.exception("nccl relay: unexpected error while sending to %s", session.peer)
        finally:
            session.is_over = True
            session.connection.close()  # first: the peer ends its world before it meets an error of the library's
            if session.world is not None:
                session.world.abort()
            with self._lock:
                self._sessions.discard(session)

    def _joined(self, session: _ReceiverSession) -> Join | None:
        """The peer that has connected; None when that one was not opened."""
        session.connection.settimeout(JOIN_S)
        join = nccl_messages.decode_order(nccl_messages.receive(session.connection))
        if not isinstance(join, Join) or not hmac.compare_digest(join.token.encode(), self._facts.token.encode()):
            return None
        if not self._known(Peer(join.receiver)):
            return None
        session.peer = Peer(join.receiver)
        return join

    def _send(self, session: _ReceiverSession, grant: NcclGrant) -> None:
        assert session.world is not None
        with self._lock:
            outgoing = self._puts.get((session.peer, grant.transfer))
            refusal = _refusal(outgoing, grant)
            if outgoing is not None and refusal is None:
                outgoing.is_moving = True
                self._moving.add(outgoing)
        if outgoing is None or refusal is not None:
            nccl_messages.send(session.connection, Withdrawn(grant.transfer, refusal or ""))
            return
        try:
            nccl_messages.send(session.connection, Next(grant.transfer))
            start = outgoing.placed[1]
            sent = self._sent[start : start + outgoing.nbytes]
            for _ in session.world.send(sent, session.connection, grant.piece_nbytes):
                pass
        finally:
            with self._lock:
                outgoing.is_moving = False
                self._moving.discard(outgoing)
                is_over = outgoing.is_over
            if is_over:
                self._free(outgoing)


class _ReceiverSession:
    """One connection of a receiver, and the world that it has joined."""

    def __init__(self, sending: NcclSender, connection: socket.socket) -> None:
        nccl_messages.keep_alive(connection)
        self.connection = connection
        self.peer = Peer("")
        self.world: World | None = None
        self.is_over = False
        self.thread = worlds.caller("send", sending.serve, self)

    def end(self) -> None:
        """Its thread's waits fail, and it ends the world. Any thread may call this."""
        self.is_over = True
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def _refusal(outgoing: NcclPut | None, grant: NcclGrant) -> str | None:
    """Why a grant is not served; None when it is."""
    if outgoing is None:
        return "its sender has already released it"
    if outgoing.is_moving:
        return "it was granted before"
    if grant.nbytes != outgoing.nbytes:
        return f"{grant.nbytes} bytes were granted for {outgoing.nbytes}"
    return None
