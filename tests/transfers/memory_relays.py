"""`relays.dispatch.Relays` in memory, as processes and request managers of a test use it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from stage_runtime.errors import TransferError, ValueRefused
from stage_runtime.payloads import pack


class MemoryPut:
    """`relays.base.RelayOperation` of the sender."""

    def __init__(self, peer: str, transfer: int, data: bytes) -> None:
        self.peer = peer
        self.transfer = transfer
        self.transfers = (transfer,)
        self.backend = "memory"
        self.copied_nbytes = 0
        self.data = data
        self.metadata = transfer.to_bytes(8, "big")

    def fill(self) -> None:
        pass


class MemoryRelays:
    """The relays of one process. slots: how many transfers its peers may hold. `get` is a subclass's: here it fails."""

    def __init__(self, slots: int = 1000) -> None:
        self._slots = slots
        self._ids = itertools.count(1)
        self.held: dict[tuple[str, int], MemoryPut] = {}  #: (peer, transfer) -> what it holds of ours
        self.most_nbytes = 1 << 40  #: A larger payload never has room.
        self.unreachable: set[str] = set()
        self.prepared: list[str] = []  #: Peers, as `prepare` was called.
        self.cleaned: list[str] = []  #: Names of dropped payloads, as given to `put` and `get`.

    def facts(self) -> dict[str, Any]:
        return {}

    def open(self, peer: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
        return ("memory",)

    def transport(self, peer: str, backend: str = "auto") -> tuple[str, str]:
        return ("memory", "memory")

    def prepare(self, peer: str, backend: str = "auto") -> None:
        self.prepared.append(peer)

    def put(
        self,
        extracted: pack.Extracted,
        *,
        request_id: str,
        peer: str,
        backend: str = "auto",
        slot_nbytes: int | None = None,
        early: bool = False,
    ) -> MemoryPut | None:
        if peer in self.unreachable:
            raise TransferError(f"no relay reaches {peer}")
        if len(self.held) >= self._slots or extracted.nbytes > self.most_nbytes:
            return None
        assert extracted.pack is not None
        put = MemoryPut(peer, next(self._ids), bytes(pack.flatten(extracted.pack)))
        self.held[peer, put.transfer] = put
        return put

    def check(self, extracted: pack.Extracted, *, peer: str, backend: str, slot_nbytes: int) -> None:
        if extracted.nbytes > self.most_nbytes:
            raise ValueRefused("payload", f"{extracted.nbytes} bytes, and at most {self.most_nbytes}")

    def when_room(self, again: Callable[[], None]) -> None: ...

    def get(self, metadata: bytes, *, request_id: str, peer: str, holder: str = "") -> Any:
        raise TransferError("the slot is gone")

    def decline(self, metadata: bytes, *, peer: str) -> None: ...

    def released(self, peer: str, transfer: int) -> None:
        self.held.pop((peer, transfer), None)

    def discard(self, operation: MemoryPut) -> None:
        self.held.pop((operation.peer, operation.transfer), None)

    def cleanup(self, request_id: str) -> None:
        self.cleaned.append(request_id)

    def forget(self, peer: str) -> None:
        self.held = {key: put for key, put in self.held.items() if key[0] != peer}

    def letting_go(self) -> None: ...

    def settle(self) -> None: ...

    def release_now(self) -> None: ...

    def stats(self) -> dict[str, int]:
        return {}

    def pins(self) -> list[Any]:
        return []
