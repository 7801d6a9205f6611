"""The two ends of a room: what is asked for, what is sent, and what may be believed. Founding document 004's names.

A `KVReceiver` believes a piece that repeats its key, the digest of its prompt and its layout, has blocks that were
asked for and have not come, the right number of bytes, and their checksum. The transport has looked at the room, its
generation and the sender's incarnation before. All calls on the engine's thread, but for `KVManager.ready`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from stage_runtime.errors import ProtocolError
from stage_runtime.kv_transfer import records
from stage_runtime.kv_transfer.interface import KVRooms, Piece, Room
from stage_runtime.kv_transfer.layout import KVLayout
from stage_runtime.kv_transfer.records import PieceHeader, PromptAsk
from stage_runtime.rules.kv.handover import KVPoll, RoomEvent, moved

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KVArgs", "KVManager", "KVPoll", "KVReceiver", "KVSender", "KVTransferFailed"]

OVER: Final = (KVPoll.Failed, KVPoll.Success)


class KVTransferFailed(Exception):
    """A room has ended without all of its blocks."""


class KVArgs(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's pages, as bytes.

    engine_rank: 0, which speaks for all ranks. kv_data_ptrs, kv_data_lens: of each page of this rank its address and
    its bytes. kv_item_lens: of each page the bytes of a block as it crosses, with the heads of all ranks.
    num_receivers: rooms at once, 0 for as many as come. max_inflight: copies of pieces that wait to be sent, in bytes.
    max_sge: pages of a piece that are copied with one call. ib_device: "" lets the relay choose.
    """

    engine_rank: int
    kv_data_ptrs: list[int]
    kv_data_lens: list[int]
    kv_item_lens: list[int]
    num_receivers: int = 0
    ib_device: str = ""
    max_inflight: int = 256 << 20
    max_sge: int = 1
    verbose: bool = False


class KVManager:
    """One engine's side of all its rooms."""

    def __init__(self, args: KVArgs, transport: KVRooms, layout: KVLayout, *, checksum: bool = True) -> None:
        self.args = args
        self.transport = transport
        self.layout = layout
        self.checksum = checksum

    @property
    def block_nbytes(self) -> int:
        return sum(self.args.kv_item_lens)


class _End:
    """The common part of both ends."""

    def __init__(self, manager: KVManager, room: Room) -> None:
        self._manager = manager
        self.room = room
        self._state = KVPoll.Bootstrapping
        self._problem: str | None = None

    def poll(self) -> KVPoll:
        """How far it is. Never blocks."""
        return self._state

    def failure_exception(self) -> None:
        """Raises: KVTransferFailed: it has failed."""
        if self._state is KVPoll.Failed:
            raise KVTransferFailed(f"room {self.room.request_id}#{self.room.generation}: {self._problem}")

    def fail(self, problem: str, *, tell: bool = True) -> None:
        """tell: the other side does not know. Nothing arrives for the room afterwards."""
        if self._state in OVER:
            return
        self._state, self._problem = moved(self._state, RoomEvent.FAILED), problem
        if tell:
            self._manager.transport.close(self.room, problem)

    def _happen(self, event: RoomEvent) -> None:
        self._state = moved(self._state, event)


class KVReceiver(_End):
    """Decode's end. ``ask`` and ``tensors``: see `records.PromptAsk`."""

    def __init__(
        self, manager: KVManager, bootstrap_addr: str, bootstrap_room: Room, ask: PromptAsk, tensors: Sequence[Tensor]
    ) -> None:
        """bootstrap_addr: the incarnation of the prefill instance to which the request is bound."""
        super().__init__(manager, bootstrap_room)
        self._peer = bootstrap_addr
        self._ask = ask
        self._tensors = tensors
        self._prompt = records.prompt_digest(ask, tensors)
        self._missing: set[int] = set()

    def init(self, kv_indices: Sequence[int], aux_index: int | None = None) -> None:
        """The blocks of the prompt that are wanted have memory now: ask. aux_index: nothing comes beside blocks."""
        self._missing = set(kv_indices)
        self._happen(RoomEvent.INIT)
        self._manager.transport.ask(self.room, self._peer, records.encode(self._ask), self._tensors)

    def accept(self, header: PieceHeader, tensors: Sequence[Tensor]) -> Tensor:
        """The bytes of its blocks. Raises: ProtocolError: it is not what was asked for; the room is to be closed."""
        wanted = (self._ask.key, self._prompt, self._ask.layout.digest)
        if (header.key, header.prompt, header.layout) != wanted:
            raise ProtocolError("a piece of another ask, prompt or layout")
        blocks = range(header.first, header.first + header.count)
        if not 0 < header.count <= len(self._missing) or not self._missing.issuperset(blocks):
            raise ProtocolError(f"blocks {blocks.start} to {blocks.stop} were not asked for, or came twice")
        nbytes = header.count * self._manager.block_nbytes
        if len(tensors) != 1 or str(tensors[0].dtype) != "torch.uint8" or tensors[0].numel() != nbytes:
            raise ProtocolError(f"{header.count} blocks have {nbytes} bytes, and something else came")
        if self._ask.checksum and header.checksum is None:
            raise ProtocolError("a piece without a checksum")
        self._missing.difference_update(blocks)
        self._happen(RoomEvent.MOVED)
        return tensors[0].view(-1)

    @property
    def end(self) -> int:
        """The block behind the last one that was asked for."""
        return self._ask.end

    def complete(self) -> None:
        """All has been written: the room ends."""
        self._happen(RoomEvent.COMPLETE)
        self._manager.transport.close(self.room, None)


class KVSender(_End):
    """Prefill's end of one ask."""

    def __init__(
        self, manager: KVManager, bootstrap_addr: str, bootstrap_room: Room, ask: PromptAsk, prompt: bytes
    ) -> None:
        """bootstrap_addr: the decode instance that has asked. prompt: `prompt_digest` of what came."""
        super().__init__(manager, bootstrap_room)
        self.peer = bootstrap_addr
        self._ask = ask
        self._prompt = prompt
        self._next = ask.first
        self._end = ask.end

    def init(self, num_kv_indices: int) -> None:
        """So many of the prompt's blocks will be sent. Raises: ProtocolError: other ones were asked for."""
        if num_kv_indices != self._end - self._next:
            raise ProtocolError(f"{num_kv_indices} blocks of the {self._end - self._next} that were asked for")
        self._happen(RoomEvent.INIT)

    def unsent(self, computed: int) -> range:
        """Blocks that are asked for and not sent, of the first ``computed`` ones."""
        return range(self._next, min(computed, self._end))

    def send(self, kv_indices: range, *, computed_s: float = 0.0) -> PieceHeader:
        """These blocks, the next ones, are being copied. Returns: the header of their piece, for `ship`.

        computed_s: see `records.PieceHeader`.
        """
        assert kv_indices.start == self._next
        self._next = kv_indices.stop
        self._happen(RoomEvent.MOVED)
        if self._next == self._end:
            self._happen(RoomEvent.COMPLETE)
        return PieceHeader(
            key=self._ask.key,
            prompt=self._prompt,
            layout=self._manager.layout.digest,
            first=kv_indices.start,
            count=len(kv_indices),
            computed_s=computed_s,
        )

    def ship(self, header: PieceHeader, flat: Tensor, sent: Callable[[], None]) -> None:
        """Send a copy of blocks. Any thread may call it. sent: called once in any case, when the copy's memory is free.

        flat: the copy. It is not changed any more.
        """
        if self._ask.checksum:
            header = msgspec.structs.replace(header, checksum=records.checksum(header, flat))
        self._manager.transport.ship(self.room, Piece(records.encode(header), [flat], sent, final=True))


def new_key() -> bytes:
    return secrets.token_bytes(records.KEY_BYTES)
