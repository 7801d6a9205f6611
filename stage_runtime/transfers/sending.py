"""Sending payloads: inline when small, else by relay, within each edge's credits. Any thread.

One queue per (source, target, peer). A payload that finds no credit or no slot waits in its own queue, so a stopped
receiver delays no other. It waits as a copy: its giver may write into its buffers again once `ship` has returned.
Called by `stage` and `coordinator`; the messages around a payload are theirs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Final, Protocol, TypeAlias

import msgspec

from omnipipeline_spec.types.plan import RelayPlan
from stage_runtime.errors import NoConnection, RelayFailed, RelayRefused, TransferError
from stage_runtime.payloads.pack import Extracted
from stage_runtime.profiler.recording.recorder import recorder
from stage_runtime.relays.dispatch import Relays
from stage_runtime.relays.named import Put
from stage_runtime.rules.flow.credits import Reservation, Window
from stage_runtime.transfers import recording
from stage_runtime.transfers.accounts import Accounts, Carried, EdgeNumbers, InFlightTransfer
from stage_runtime.wire import codec
from stage_runtime.wire.messages import Message
from stage_runtime.wire.parts import Body

log = logging.getLogger(__name__)

PeerEdge: TypeAlias = tuple[str, str, str]  #: source stage, target stage, the peer's incarnation
Send: TypeAlias = Callable[[str, Message], bool]  #: (peer, message) -> whether there is a link; any thread
Make: TypeAlias = Callable[[Body], Message]
Lost: TypeAlias = Callable[[BaseException], None]

#: Bytes of one edge that may be under way without a credit, if no payload is over `SMALL_NBYTES`: 64 payloads of 1 MiB.
#: Larger payloads may use an eighth of it. One that waits for a credit is copied twice, each time into fresh memory.
SHARED_NBYTES: Final = 64 << 20
SMALL_NBYTES: Final = 2 << 20
SLOT_NBYTES: Final = RelayPlan().slot_bytes
PIECE_LIMIT: Final = 128  # bytes of it for each further piece of a large payload
METADATA_LIMIT: Final = 512  # bytes of a relay's metadata; shm and tcp take fewer than 100


class SendOwner(Protocol):
    """The request that a payload belongs to."""

    @property
    def owner(self) -> str:
        """The coordinator that admitted it, by incarnation."""

    @property
    def request_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def aborted(self) -> bool:
        """Its request was aborted. A value that a stage has finished and still waits to be sent is sent."""


class PendingSend(msgspec.Struct):
    """A payload on its way out, and the message that will announce it."""

    work: SendOwner
    extracted: Extracted
    make: Make
    backend: str
    lost: Lost  #: Called, in any thread, when it waited and then could not be sent: its request must fail.


def attempt_key(owner: str, request_id: str, attempt: int) -> str:
    """The key by which relays call a request's transfers: the abort of one attempt must not free those of another one.

    Request ids are chosen by clients, so two coordinators may use the same id at the same time. An abort comes from the
    coordinator and a payload of the next attempt from a stage, in any order.
    """
    return f"{owner}/{request_id}#{attempt}"


class SendQueue:
    """One edge to one peer. Its lock orders what is sent on it; nothing else is held meanwhile."""

    def __init__(self, edge: PeerEdge, credits: int, shared_nbytes: int, slot_nbytes: int) -> None:
        """slot_nbytes: a larger payload goes in pieces."""
        self.edge = edge
        self.slot_nbytes = slot_nbytes
        self.window = Window(credits, shared_nbytes, small_nbytes=SMALL_NBYTES)
        self.waiting: deque[PendingSend] = deque()
        self.lock = Lock()
        self.closed = False


class Outstanding(msgspec.Struct):
    """A payload that its receiver has not released yet."""

    operation: Put  #: Kept until then.
    queue: SendQueue
    reservation: Reservation
    nbytes: int
    recorded: recording.RecordedTransfer | None  #: The record for a profile.
    unreleased: int  #: Transfers of it; more than one when it went in pieces.
    request: tuple[str, str, int]  #: Its owner, id and attempt.
    begun_s: float  #: A time of `time.monotonic`.
    aborted: bool = False  #: Its request was: it is in quarantine.


class SendQueues:
    """All payloads that this process sends."""

    def __init__(
        self, relays: Relays, send: Send, *, announce: Send | None = None, shared_nbytes: int = SHARED_NBYTES
    ) -> None:
        """announce: the same as ``send``, for messages that must not wait for others to leave with them."""
        self._relays = relays
        self._send = send
        self._announce = announce or send
        self._shared_nbytes = shared_nbytes
        self._queues: dict[PeerEdge, SendQueue] = {}
        self._out: dict[tuple[str, int], Outstanding] = {}  #: Puts by (peer, transfer).
        #: Send queues that found no slot, whatever their credits; the one that has waited longest first.
        self._starved: dict[PeerEdge, None] = {}
        self._accounts = Accounts()
        self._lock = Lock()

    def ship(self, edge: PeerEdge, pending: PendingSend, *, credits: int, slot_nbytes: int = SLOT_NBYTES) -> bool:
        """Send it now, or as soon as a credit and a slot are free. False or TransferError: nothing reaches the peer.

        Messages of one edge may overtake each other (inline ones the waiting): receivers order chunks by number.
        Raises: ValueRefused: its message is over the limit, or it is larger than what its relay carries at once. Known
        before it waits: later no caller would get the exception.
        """
        extracted = pending.extracted
        refs = extracted.refs
        if extracted.is_inline:
            return self._send(edge[2], pending.make(Body(extracted.value_bytes, refs, extracted.flat())))
        queue = self._queue(edge, credits, slot_nbytes)
        with queue.lock:
            if queue.closed:
                return False
            try:
                if not queue.waiting and self._start(queue, pending):
                    return True
            except TransferError:
                self._drop_unused(queue)
                raise
        self._relays.check(extracted, peer=edge[2], backend=pending.backend, slot_nbytes=slot_nbytes)
        most = METADATA_LIMIT + PIECE_LIMIT * (extracted.nbytes // slot_nbytes)
        codec.check(pending.make(Body(extracted.value_bytes, refs, transfer=bytes(most), copy_now=True)))
        extracted.hold()  # without the lock, which the I/O thread takes, too
        with queue.lock:
            if queue.closed:
                return False
            if queue.waiting or not self._start(queue, pending):
                queue.waiting.append(pending)
        return True

    def prepare(self, source: str, target: str, peer: str, backend: str) -> None:
        """``peer`` may be sent to on this edge soon: begin to connect, if payloads of the edge go by relay."""
        with self._lock:
            by_relay = self._accounts.has_sent(source, target)
        if by_relay:
            self._relays.prepare(peer, backend)

    def released(self, peer: str, transfers: tuple[int, ...]) -> None:
        """A receiver has released transfers: copy and send the payloads that waited for that. It runs on the I/O
        thread.
        """
        freed: dict[PeerEdge, SendQueue] = {}
        for transfer in transfers:
            with self._lock:
                found = self._out.pop((peer, transfer), None)
            if found is None:
                continue  # repeated, or of a life that is over
            queue = found.queue
            self._relays.released(peer, transfer)
            found.unreleased -= 1
            if found.unreleased:
                continue
            recording.released(found.recorded)
            with queue.lock:
                queue.window.give(found.reservation, found.nbytes)
            freed[queue.edge] = queue
        self._go_on(freed)

    def cut(self, peer: str) -> None:
        """The connection to the peer broke: nothing waits for it. Memory that it may still look at stays as it is."""
        with self._lock:
            gone = [edge for edge in self._queues if edge[2] == peer]
            queues = [self._queues.pop(edge) for edge in gone]
            for edge in gone:
                self._starved.pop(edge, None)
            self._accounts.forget(gone)
        for queue in queues:
            with queue.lock:
                queue.closed = True
                queue.waiting.clear()

    def forget(self, peer: str) -> None:
        """The peer is gone: nothing waits for it, and what it held is freed."""
        self.cut(peer)
        with self._lock:
            for key in [key for key in self._out if key[0] == peer]:
                del self._out[key]
        self._relays.forget(peer)

    def abort(self, owner: str, request_id: str, attempt: int) -> None:
        """Drop what waits for this attempt or an earlier one, also of stages that have finished it.

        Payloads that waited behind it go on. It runs on the I/O thread, as `released`.
        """

        def over(work: SendOwner) -> bool:
            return (work.owner, work.request_id) == (owner, request_id) and work.attempt <= attempt

        with self._lock:
            for each in self._out.values():
                if each.request[:2] == (owner, request_id) and each.request[2] <= attempt:
                    each.aborted = True
        for queue in list(self._queues.values()):
            if queue.waiting:
                with queue.lock:
                    left = deque(one for one in queue.waiting if not one.work.aborted and not over(one.work))
                    is_shorter = len(left) < len(queue.waiting)
                    queue.waiting = left
                if is_shorter:
                    self._advance(queue)

    def waits(self, edge: PeerEdge) -> bool:
        """Whether something waits on this edge for a credit or a slot."""
        queue = self._queues.get(edge)
        return queue is not None and bool(queue.waiting)

    def waiting_of(self, owner: str) -> set[tuple[str, int]]:
        """The requests, by id and attempt, of that coordinator's for which something waits here."""
        found = set[tuple[str, int]]()
        for queue in list(self._queues.values()):
            with queue.lock:
                found.update(
                    (one.work.request_id, one.work.attempt) for one in queue.waiting if one.work.owner == owner
                )
        return found

    @property
    def outstanding(self) -> int:
        """Transfers that no receiver has released yet."""
        return len(self._out)

    @property
    def queued(self) -> int:
        """Payloads that wait for a credit or a slot."""
        return sum(len(queue.waiting) for queue in list(self._queues.values()))

    def edges(self) -> dict[Carried, EdgeNumbers]:
        """(source, target, relay) -> what was sent so far and what is in flight now."""
        with self._lock:
            return self._accounts.numbers(
                InFlightTransfer((*each.queue.edge[:2], each.operation.backend), each.begun_s, each.aborted)
                for each in self._out.values()
            )

    def _queue(self, edge: PeerEdge, credits: int, slot_nbytes: int) -> SendQueue:
        queue = self._queues.get(edge)
        if queue is None:
            with self._lock:
                queue = self._queues.setdefault(edge, SendQueue(edge, credits, self._shared_nbytes, slot_nbytes))
        return queue

    def _drop_unused(self, queue: SendQueue) -> None:
        """Nothing reaches its peer, which may be gone: nobody would cut the queue later. Its lock is held."""
        if queue.window.used:
            return
        with self._lock:
            if self._queues.get(queue.edge) is queue:
                del self._queues[queue.edge]
                self._starved.pop(queue.edge, None)
        queue.closed = True

    def _go_on(self, freed: Mapping[PeerEdge, SendQueue]) -> None:
        """Room came back: advance those that found none, then those send queues. It runs on the I/O thread."""
        if self._starved:
            with self._lock:
                starved, self._starved = self._starved, {}
                found = [self._queues[edge] for edge in starved if edge in self._queues]
            served = [queue.edge for queue in found if self._advance(queue)]
            with self._lock:
                for edge in served:
                    if edge in self._starved:  # again: it is the last one now
                        del self._starved[edge]
                        self._starved[edge] = None
        for queue in freed.values():  # also one whose edge has another queue since `cut`
            self._advance(queue)

    def _look_for_room(self) -> None:
        """`Relays.when_room` calls it."""
        self._go_on({})

    def _advance(self, queue: SendQueue) -> bool:
        """Send what may go now. A pending send that fails does not stay at the head of its queue.

        Returns: whether anything left the queue.
        """
        lost: list[tuple[PendingSend, BaseException]] = []
        any_left = False
        with queue.lock:
            while queue.waiting:
                pending = queue.waiting[0]
                try:
                    if not pending.work.aborted and not self._start(queue, pending):
                        break
                except (RelayRefused, RelayFailed) as error:  # the peer is alive: nobody else would end the request
                    lost.append((pending, error))
                except TransferError:
                    log.info(
                        "a payload to %s is not sent: no relay or link reaches that instance; when it is reported "
                        "dead, its requests are retried or fail",
                        queue.edge[2],
                    )
                except BaseException as error:
                    lost.append((pending, error))
                queue.waiting.popleft()
                any_left = True
        for pending, why in lost:  # without the lock: to fail a request drops what else waits for it
            try:
                pending.lost(why)
            except Exception:  # one failure must not end the queue that others wait in
                log.exception("request %s could not be failed", pending.work.request_id)
        return any_left

    def _start(self, queue: SendQueue, pending: PendingSend) -> bool:
        """Move one payload. The queue's lock is held. False: no credit or no slot now.

        Raises: TransferError: nothing reaches the peer.
        """
        peer = queue.edge[2]
        extracted = pending.extracted
        nbytes = extracted.nbytes
        reservation = queue.window.take(nbytes)
        if reservation is None:
            return False
        begun_ns = time.time_ns() if recorder.active else 0
        try:
            operation = self._put(queue, pending)
        except BaseException:
            queue.window.give(reservation, nbytes)
            raise
        if operation is None:
            queue.window.give(reservation, nbytes)
            return False
        keys, named = [(peer, int(transfer)) for transfer in operation.transfers], queue.edge[:2]
        recorded = None
        if begun_ns:
            recorded = recording.put(pending.work, named, operation.metadata, nbytes, begun_ns)
        with self._lock:
            work = pending.work
            request = (work.owner, work.request_id, work.attempt)
            outstanding = Outstanding(
                operation, queue, reservation, nbytes, recorded, len(keys), request, time.monotonic()
            )
            for key in keys:
                self._out[key] = outstanding
        refs = extracted.refs
        last = reservation is Reservation.LAST_CREDIT
        body = Body(extracted.value_bytes, refs, transfer=operation.metadata, copy_now=last)
        # Announced before the transfer is complete: a relay that waits for its receiver would never finish otherwise.
        sent = False
        try:
            sent = self._announce(peer, pending.make(body))
        finally:
            operation.fill()
            recording.filled(recorded)
            if not sent:
                with self._lock:
                    for key in keys:
                        self._out.pop(key, None)
                queue.window.give(reservation, nbytes)
                self._relays.discard(operation)
        if not sent:
            raise NoConnection(f"no connection to {peer}", peer)
        with self._lock:
            retried = work.attempt > 1
            self._accounts.sent(queue.edge, operation.backend, nbytes, operation.copied_nbytes, retried=retried)
        return True

    def _put(self, queue: SendQueue, pending: PendingSend) -> Put | None:
        """Take a slot. None: all are taken, and this queue is advanced when one may be free."""
        request_id = attempt_key(pending.work.owner, pending.work.request_id, pending.work.attempt)
        peer, backend = queue.edge[2], pending.backend
        most = queue.slot_nbytes
        operation = self._relays.put(
            pending.extracted, request_id=request_id, peer=peer, backend=backend, slot_nbytes=most, early=True
        )
        if operation is None:
            with self._lock:
                self._starved[queue.edge] = None
            self._relays.when_room(self._look_for_room)
            # Again: the last slot may have been released before this queue was known to wait, and none after it.
            operation = self._relays.put(
                pending.extracted, request_id=request_id, peer=peer, backend=backend, slot_nbytes=most, early=True
            )
        return operation
