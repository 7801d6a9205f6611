"""A pack that is larger than a slot: several transfers of one relay, announced together and copied together on arrival.

Used by `dispatch`; no relay knows of it. Each piece is released by its receiver as soon as it was copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from stage_runtime.errors import UNDECODABLE, TransferError
from stage_runtime.payloads.pack import Arrived, Pack
from stage_runtime.relays.base import Peer, Relay, RelayOperation, TransferId
from stage_runtime.relays.memory import pages

MARK: Final = b"+"  #: The mark behind a relay's name: what follows is `PiecesAnnouncement`.


class PiecesAnnouncement(msgspec.Struct, frozen=True, array_like=True):
    """nbytes: of all pieces together. pieces: the relay's metadata of each, in order."""

    nbytes: int
    pieces: tuple[bytes, ...]


def cut(pack: Pack, most: int) -> Iterator[Pack]:
    """The pack as packs of ``most`` bytes, the last one of the rest; gaps between its parts are kept."""
    for start in range(0, pack.nbytes, most):
        end = min(start + most, pack.nbytes)
        parts: list[memoryview] = []
        offsets: list[int] = []
        private: list[int] = []
        for index, (part, offset) in enumerate(zip(pack.parts, pack.offsets, strict=True)):
            first, last = max(offset, start), min(offset + len(part), end)
            if first < last:
                if index in pack.private:
                    private.append(len(parts))
                parts.append(part[first - offset : last - offset])
                offsets.append(first - start)
        yield Pack(parts, offsets, end - start, frozenset(private))


class PutPieces:
    """The puts of one pack. `base.RelayOperation`, with the ids of all transfers in ``transfers``."""

    def __init__(self, operations: Sequence[RelayOperation], nbytes: int) -> None:
        self.operations = tuple(operations)
        self.nbytes = nbytes

    @property
    def metadata(self) -> bytes:
        pieces = tuple(operation.metadata for operation in self.operations)
        return MARK + msgspec.msgpack.encode(PiecesAnnouncement(self.nbytes, pieces))

    @property
    def transfers(self) -> tuple[TransferId, ...]:
        return tuple(operation.transfer for operation in self.operations)

    @property
    def copied_nbytes(self) -> int:
        return sum(operation.copied_nbytes for operation in self.operations)

    @property
    def transfer(self) -> TransferId:
        return self.operations[0].transfer

    @property
    def peer(self) -> Peer:
        return self.operations[0].peer

    async def wait_for_completion(self, timeout: float | None = None) -> memoryview:
        for operation in self.operations:
            await operation.wait_for_completion(timeout)
        return memoryview(b"")

    def take(self) -> memoryview:
        return memoryview(b"")

    def done(self) -> bool:
        return all(operation.done() for operation in self.operations)


class GetPieces:
    """The gets of one pack, begun together; each is copied and let go when it is here."""

    def __init__(
        self,
        operations: Sequence[RelayOperation],
        announced: PiecesAnnouncement,
        metadata: bytes,
        let_go: Callable[[], None],
    ) -> None:
        self._operations = list(operations)
        self._nbytes = announced.nbytes
        self.copied_nbytes = announced.nbytes
        self._let_go = let_go
        self._region: Any = None
        self._filled = 0
        self.metadata = metadata
        self.transfer = operations[0].transfer
        self.peer = operations[0].peer

    async def wait_for_completion(self, timeout: float | None = None) -> memoryview:
        while self._operations:
            self._copy(await self._operations[0].wait_for_completion(timeout))
            self._operations.pop(0)
        return self.take()

    def take(self) -> memoryview:
        while self._operations:
            self._copy(self._operations.pop(0).take())
        if self._filled != self._nbytes or self._region is None:
            raise TransferError(
                f"transfer {self.transfer} from {self.peer}: {self._filled} of {self._nbytes} bytes came"
            )
        region, self._region = self._region, None
        return memoryview(region).cast("B")

    def take_device(self) -> Arrived | None:
        """None: pieces are cut from the host's memory."""
        return None

    def done(self) -> bool:
        return all(operation.done() for operation in self._operations)

    def _copy(self, piece: memoryview) -> None:
        if self._region is None:
            self._region = pages.fresh(self._nbytes)
        end = self._filled + len(piece)
        if end > self._nbytes:
            raise TransferError(f"transfer {self.transfer} from {self.peer}: more than {self._nbytes} bytes came")
        memoryview(self._region).cast("B")[self._filled : end] = piece
        self._filled = end
        piece.release()
        del piece
        self._let_go()


def announced(rest: bytes, limit: int) -> PiecesAnnouncement:
    """The pieces that a `PutPieces` of a peer has announced.

    Raises: TransferError: it is not an announcement of pieces, or of more than ``limit`` bytes."""
    try:
        found = msgspec.msgpack.decode(rest[len(MARK) :], type=PiecesAnnouncement)
    except UNDECODABLE as error:
        raise TransferError(f"an announcement of pieces cannot be read: {error}") from None
    if not found.pieces or not 0 < found.nbytes <= limit:
        raise TransferError(f"an announcement of {len(found.pieces)} pieces with {found.nbytes} bytes")
    return found


def put(relay: Relay, pack: Pack, most: int, *, request_id: str, peer: Peer) -> PutPieces | None:
    """Put all pieces; from any thread. None: not all of them find room now."""
    puts = relay.put_all(list(cut(pack, most)), request_id=request_id, peer=peer)
    return PutPieces(puts, pack.nbytes) if puts is not None else None


def get(
    relay: Relay, announced: PiecesAnnouncement, metadata: bytes, *, request_id: str, peer: Peer, holder: str
) -> GetPieces:
    """Fetch all pieces. Raises: TransferError: one is not a transfer of that peer's; those before it let go."""
    gets = [relay.get(piece, request_id=request_id, peer=peer, holder=holder) for piece in announced.pieces]
    return GetPieces(gets, announced, metadata, relay.release_now)
