"""The one interface of all relays: moving a flat buffer from this process to another.

A relay knows transport mechanics only: no routing, no fan-in, no payload format (`payloads`), no other relay.
The stage layer owns the control messages around it: what `put` returns as ``metadata`` travels in a control
message, what the receiver releases travels back in one.

Life of a transfer: the sender's `put` (a slot is FILLING, then IN_FLIGHT) → control message → the receiver's
`get` → its buffer, and views of it → the last view dies → ``on_release(peer, transfer)`` at the receiver → a
Release message → the sender's `released` (the slot is FREE). A peer whose incarnation is proven gone: `forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NewType, Protocol

from stage_runtime.payloads.pack import Arrived, Pack
from stage_runtime.relays.choice.choosing import Medium

Peer = NewType("Peer", str)  #: The incarnation of the process at the other end.
TransferId = NewType("TransferId", int)  #: Unique per sending process and relay; never used twice.
OnRelease = Callable[[Peer, TransferId], None]  #: Called in any thread, soon after the last view has died.
TransferKey = tuple[Peer, TransferId]
#: (peer, relay, reason): called in any thread. Another relay is used then.
OnRelayFailed = Callable[[Peer, str, str], None]


class RelayOperation(Protocol):
    """A transfer under way. Keep a reference until `wait_for_completion` has returned."""

    @property
    def metadata(self) -> bytes:
        """The metadata that the other end's `Relay.get` needs, opaque to all others. Reading it counts as announcing
        it: until then no peer can know of the transfer.
        """

    @property
    def copied_nbytes(self) -> int:
        """Bytes that this process copied for it: of a put into memory that the relay reads, of a get none."""

    @property
    def transfer(self) -> TransferId: ...

    @property
    def peer(self) -> Peer: ...

    async def wait_for_completion(self, timeout: float | None = None) -> memoryview:
        """A put: until the receiver has released it (gives an empty view). A get: until the bytes are here.

        Returns: of a get, the flat buffer; the slot behind it is released when its last view dies.
        Raises:  TransferError: the peer is gone, the metadata is false, or nothing came for ``timeout`` seconds.
        """

    def take(self) -> memoryview:
        """The buffer of a get that is done, without waiting. Once, as `wait_for_completion` gives it.

        Raises: TransferError: it failed, or was taken already.
        """

    def done(self) -> bool:
        """True when `wait_for_completion` would not wait."""


class EarlyPut(RelayOperation, Protocol):
    """A put that may have to be filled."""

    def fill(self) -> None:
        """Copy what was not copied yet. Called once, in the thread that has put it, also if the transfer failed."""


class Fetch(RelayOperation, Protocol):
    """A get under way."""

    def take_device(self) -> Arrived | None:
        """The end of the flat buffer of a get that is done, where that lies on a GPU. Once; None: nothing does."""


class Relay(Protocol):
    """One backend in one process, towards all peers."""

    name: str

    def facts(self) -> dict[str, Any]:
        """The facts that peers must know to reach this process; they go into Hello."""

    def open(self, peer: Peer, facts: Mapping[str, Any]) -> bool:
        """Learn a peer's facts. True when this relay can move bytes to and from it; never raises for bad facts."""

    def medium(self, peer: Peer) -> Medium:
        """The medium that the bytes to and from an open peer go through. Both ends give the same."""

    def prepare(self, peer: Peer) -> None:
        """Prepare for a put to ``peer``, for example connect. Any thread may call this."""

    def put(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> RelayOperation | None:
        """Start moving ``pack`` to ``peer``; from any thread. None when no slot is free now: try after a release.
        The receiver gets what the parts hold now, whatever is written into them later. ``pack.on_device`` is None,
        unless the relay's line in `registry` has ``sends_from_gpus``.

        like: this relay's operation for the same pack towards another peer, which may share what it holds.
        """

    def put_early(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> EarlyPut | None:
        """The same as `put`, but it may leave the copying to `EarlyPut.fill`, which is called when the transfer was
        announced and before anything is written into the parts. So a relay can send the first bytes while it copies
        the others.
        """

    def put_all(self, packs: Sequence[Pack], *, request_id: str, peer: Peer) -> Sequence[RelayOperation] | None:
        """The same as `put`, for packs that are announced together. None: not all of them find room."""

    def refusal(self, nbytes: int, pieces: int) -> str | None:
        """Why there is never room for ``nbytes`` in so many packs that are put together; None when there may be.
        Any thread may call this.
        """

    async def put_async(self, pack: Pack, *, request_id: str, peer: Peer) -> RelayOperation:
        """The same as `put`, but it waits for a slot."""

    async def room(self) -> None:
        """Wait until something was released: a put that found no slot may find one. It runs on the I/O thread."""

    def get(self, metadata: bytes, *, request_id: str, peer: Peer, holder: str = "") -> Fetch:
        """Fetch what ``peer`` put; on the I/O thread.

        holder: who will look at the buffer, for `pins`.
        Raises: TransferError: the metadata is not a transfer of that peer's.
        """

    async def get_async(self, metadata: bytes, *, request_id: str, peer: Peer) -> Fetch:
        """The same as `get`, but it waits for the bytes."""

    def decline(self, metadata: bytes, *, peer: Peer) -> None:
        """Let go of an announced transfer that is not wanted, without a `get`: it is released at once.

        Raises: TransferError: the metadata is not a transfer of that peer's.
        """

    def released(self, peer: Peer, transfer: TransferId) -> bool:
        """``peer`` has released a transfer of ours. Unknown, late or repeated ids change nothing.

        Returns: whether it was a transfer of this relay's that ``peer`` had.
        """

    def cleanup(self, request_id: str) -> None:
        """A request was aborted: drop what was put for it and never announced, and what arrived unasked for.

        A put that was announced stays until its receiver releases it or is forgotten: it may be in use.
        """

    def forget(self, peer: Peer) -> None:
        """``peer``'s incarnation is proven gone: free all that it held of ours, fail what we await from it."""

    def let_go(self) -> None:
        """Report the received buffers that this thread has dropped, as far as the loop will not do so soon anyway."""

    def release_now(self) -> None:
        """Report all received buffers that are not referenced any more: their sender waits for them. Any thread may
        call this.
        """

    @property
    def pins(self) -> Iterable[Any]:
        """Received buffers that are still referenced (`operations.Pin`)."""

    def stats(self) -> dict[str, int]:
        """Counters and gauges for /metrics: bytes and transfers sent and received, slots and bytes in use."""

    def close(self) -> None:
        """Free everything; nothing may be used afterwards."""
