"""The values that the nixl relay has put: each is written once into the memory that its receiver grants, and held until
released.

A slot from which bytes may still be read stays taken, whatever has become of its put: NIXL cannot cancel a transfer,
and what came into the slot meanwhile would reach the peer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from stage_runtime.relays.base import Peer
from stage_runtime.relays.memory.placing import Placed
from stage_runtime.relays.nixl.nixl_messages import Cancel, NixlGrant, TransferStopped, Written, encode
from stage_runtime.relays.nixl.worker import Move, NixlRoute, Worker


class NixlPut:
    """One put; its `PutOperation.resource`."""

    __slots__ = ("granted", "is_over", "nbytes", "peer", "placed", "transfer")

    def __init__(self, placed: Placed, peer: Peer, transfer: int, nbytes: int, *, read: bool) -> None:
        """read: by its receiver, which grants nothing."""
        self.placed = placed
        self.peer = peer
        self.transfer = transfer
        self.nbytes = nbytes
        self.granted = read or not nbytes
        self.is_over = False  #: Released or given up: its slot is freed when nothing moves.


class NixlSender:
    """Puts by peer and transfer. `add` and `free` may be called from any thread."""

    def __init__(self, address: int, free: Callable[[NixlPut], None]) -> None:
        """address: of the arena, as it is registered. free: called, in any thread, when a slot is used no more."""
        self._address = address
        self._free = free
        self._lock = threading.Lock()
        self._puts: dict[tuple[Peer, int], NixlPut] = {}
        self._ungranted = 0  #: The count of ``_puts`` that are not granted.
        self._moving: dict[tuple[Peer, int], tuple[NixlPut, Move]] = {}

    def add(self, outgoing: NixlPut) -> None:
        with self._lock:
            self._puts[outgoing.peer, outgoing.transfer] = outgoing
            self._ungranted += not outgoing.granted

    def free(self, outgoing: NixlPut) -> None:
        """The put is over: free its slot, now or when nothing moves any more."""
        key = (outgoing.peer, outgoing.transfer)
        with self._lock:
            if self._puts.pop(key, None) is not None:
                self._ungranted -= not outgoing.granted
            outgoing.is_over = True
            moving = self._moving.get(key)
            if moving is not None:
                moving[1].stopping = moving[1].stopping or "its sender has given it up"
                return
        self._free(outgoing)

    @property
    def expects(self) -> bool:
        """Whether some peer is to grant something."""
        return self._ungranted > 0

    def stats(self) -> dict[str, int]:
        with self._lock:
            held = [outgoing.nbytes for outgoing, _ in self._moving.values() if outgoing.is_over]
            return {
                "outgoing_transfers": len(self._moving),
                "quarantined_sends": len(held),
                "quarantined_send_bytes": sum(held),
            }

    # --- in the worker's thread ---------------------------------------------------------------------------------

    def granted(self, worker: Worker, route: NixlRoute, grant: NixlGrant) -> None:
        """A receiver has memory for a transfer: write it."""
        move: Move | None = None
        with self._lock:
            outgoing = self._puts.get((route.peer, grant.transfer))
            refusal = _refusal(outgoing, route, grant)
            if outgoing is not None and refusal is None:
                outgoing.granted = True
                self._ungranted -= 1
                move = self._move(worker, route, outgoing, grant)
                self._moving[route.peer, grant.transfer] = (outgoing, move)
        if move is not None:
            worker.move(move)
        elif refusal is not None:
            worker.notify(route, TransferStopped(route.token, grant.transfer, grant.generation, True, refusal))

    def cancelled(self, worker: Worker, route: NixlRoute, cancel: Cancel) -> None:
        """A receiver gives a transfer up. It is notified when nothing moves: now, or by `_ended`."""
        reason = "its receiver has given it up"
        with self._lock:
            outgoing = self._puts.get((route.peer, cancel.transfer))
            if outgoing is not None and not outgoing.granted:
                outgoing.granted = True  # the grant was overtaken: it is not served
                self._ungranted -= 1
            moving = self._moving.get((route.peer, cancel.transfer))
        if moving is not None:
            moving[1].stopping = moving[1].stopping or reason
            route.pace.gave_up()  # it may have been too slow
        else:
            worker.notify(route, TransferStopped(route.token, cancel.transfer, cancel.generation, True, reason))

    def _move(self, worker: Worker, route: NixlRoute, outgoing: NixlPut, grant: NixlGrant) -> Move:
        def over(move: Move, reason: str | None) -> None:
            self._ended(outgoing)
            if reason is not None:
                notice = TransferStopped(route.token, grant.transfer, grant.generation, not move.broken, reason)
                worker.notify(route, notice)

        def message(nbytes: int) -> bytes:
            return encode(Written(route.token, grant.transfer, grant.generation, nbytes))

        placed = outgoing.placed
        ours = self._address + placed.offset
        theirs = route.facts.receives.address + grant.offset
        nbytes, filling = outgoing.nbytes, placed.filling
        return Move(route, ours, theirs, nbytes, write=True, over=over, message=message, filling=filling)

    def _ended(self, outgoing: NixlPut) -> None:
        with self._lock:
            del self._moving[outgoing.peer, outgoing.transfer]
            is_over = outgoing.is_over
        if is_over:
            self._free(outgoing)


def _refusal(outgoing: NixlPut | None, route: NixlRoute, grant: NixlGrant) -> str | None:
    """Why a grant is not served; None when it is."""
    if outgoing is None:
        return "its sender has already released it"
    if outgoing.granted:
        return "it was granted before"
    if grant.nbytes != outgoing.nbytes or not route.facts.receives.holds(grant.offset, grant.nbytes):
        return f"{grant.nbytes} bytes at {grant.offset} were granted for {outgoing.nbytes}"
    return None
