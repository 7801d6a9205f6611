"""All relays of a process as one: which of them serves a peer, and the names that go with a transfer.

`Relays` is what the stage layer and the coordinator hold. Metadata begins with the backend's name, so a receiver
needs nothing else. Which relays there are is `registry`'s table.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Mapping
from typing import Any, Final

from stage_runtime.errors import ConfigurationError, TransferError
from stage_runtime.payloads.pack import Extracted, Pack
from stage_runtime.relays import registry
from stage_runtime.relays.arena import Arena
from stage_runtime.relays.base import Peer, Relay, RelayOperation, Release, TransferId
from stage_runtime.relays.context import RelayContext, RelaySettings, Security
from stage_runtime.relays.pins import Pin
from stage_runtime.relays.registry import RELAYS, Entry

log = logging.getLogger(__name__)

TRIM_S: Final = 5.0  # long against the gaps in a stage's load, short enough for other programs of a full machine


class Relays:
    """Every relay of this process. On ``loop``, except where a method names another thread."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        incarnation: str,
        on_release: Release,
        security: Security | None = None,
        settings: RelaySettings | None = None,
        table: Mapping[str, Entry] = RELAYS,
    ) -> None:
        """on_release: called, in any thread, when the last view of a received transfer has died: send a Release.

        Opened are the relays of ``table`` that `auto` may choose, and those that ``settings.asked`` names.
        Raises: ConfigurationError: one that is required, or needs no extra, cannot be opened.
        """
        settings = settings or RelaySettings()
        self._thread = threading.local()  #: `RelayContext.thread`
        self.arena = Arena(settings.arena_bytes, prefault_nbytes=settings.prefault_bytes)
        context = RelayContext(
            loop=loop,
            incarnation=Peer(incarnation),
            on_release=on_release,
            thread=self._thread,
            ids=itertools.count(1),
            arena=self.arena,
            security=security,
            settings=settings,
        )
        self._table = table
        self._relays: dict[str, Relay] = {}  #: Best first, as the table has them.
        try:
            for name in registry.to_open(settings.asked, table):
                self._open(name, context)
        except ConfigurationError:
            self._close_all()
            raise
        self._reach: dict[Peer, tuple[str, ...]] = {}
        self._warned: set[tuple[Peer, str]] = set()
        self._late_releases = 0
        self._loop = loop
        self._trimming = loop.call_later(TRIM_S, self._trim)

    def facts(self) -> dict[str, Any]:
        """What a peer's `open` needs, for Hello: plain data."""
        return {name: relay.facts() for name, relay in self._relays.items()}

    def open(self, peer: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
        """Learn how to reach an incarnation. Repeated calls change nothing.

        Returns: the backends that reach it, best first; empty when none does.
        """
        known = self._reach.get(Peer(peer))
        if known:
            return known
        reach = []
        for name, relay in self._relays.items():
            peer_facts = facts.get(name)
            if isinstance(peer_facts, Mapping) and relay.open(Peer(peer), peer_facts):
                reach.append(name)
        self._reach[Peer(peer)] = tuple(reach)
        log.info("relays to %s: %s", peer, ", ".join(reach) or "none")
        return tuple(reach)

    def choose(self, peer: str, backend: str = "auto") -> str:
        """The backend for what goes to ``peer``: the one that the plan asks for, else the best that reaches it.

        Raises: TransferError: none reaches it.
        """
        reach = self._reach.get(Peer(peer), ())
        if not reach:
            raise TransferError(f"no relay reaches {peer}")
        if backend in reach:
            return backend
        best = next((name for name in reach if self._table[name].auto), reach[0])
        if backend != "auto" and (Peer(peer), backend) not in self._warned:
            self._warned.add((Peer(peer), backend))
            log.warning("relay %s does not reach %s: using %s", backend, peer, best)
        return best

    def put(self, extracted: Extracted, *, request_id: str, peer: str, backend: str = "auto") -> RelayOperation | None:
        """Start moving the parts of ``extracted``; from any thread. None when there is no room now.

        Put to several peers, one `Extracted` takes one slot. Never announce `metadata` twice.
        Raises: TransferError: no relay reaches ``peer``.
        """
        name = self.choose(peer, backend)
        like = extracted.placed.get(name)
        operation = self._relays[name].put(_pack(extracted), request_id=request_id, peer=Peer(peer), like=like)
        if operation is None:
            return None
        extracted.placed[name] = operation
        return _Named(name, operation)

    async def put_async(
        self, extracted: Extracted, *, request_id: str, peer: str, backend: str = "auto"
    ) -> RelayOperation:
        """As `put`, waiting for room."""
        operation = self.put(extracted, request_id=request_id, peer=peer, backend=backend)
        if operation is not None:
            return operation
        name = self.choose(peer, backend)
        return _Named(
            name, await self._relays[name].put_async(_pack(extracted), request_id=request_id, peer=Peer(peer))
        )

    def get(self, metadata: bytes, *, request_id: str, peer: str, holder: str = "") -> RelayOperation:
        """Fetch what ``peer`` put. holder: the stage that will look at it, for `pins`.

        Raises: TransferError: it is no transfer of that peer's.
        """
        relay, rest = self._announced(metadata, peer)
        return relay.get(rest, request_id=request_id, peer=Peer(peer), holder=holder)

    def decline(self, metadata: bytes, *, peer: str) -> None:
        """Let go of what ``peer`` has announced without fetching it: its request is not known here, or over.

        Raises: TransferError: it is no transfer of that peer's.
        """
        relay, rest = self._announced(metadata, peer)
        relay.decline(rest, peer=Peer(peer))

    def released(self, peer: str, transfer: int) -> None:
        """A Release by ``peer`` came in. Late, unknown and repeated ones change nothing."""
        for relay in self._relays.values():
            if relay.released(Peer(peer), TransferId(transfer)):
                return
        self._late_releases += 1

    def discard(self, operation: RelayOperation) -> None:
        """A put whose metadata was read but never sent: the receiver cannot know of it, so it is over."""
        assert isinstance(operation, _Named)
        self._relays[operation.backend].released(operation.peer, operation.transfer)

    def cleanup(self, request_id: str) -> None:
        """A request was aborted: what was not announced is freed; the rest is quarantined until its receivers
        release it or are gone; what arrived and was not fetched is dropped.
        """
        for relay in self._relays.values():
            relay.cleanup(request_id)

    def forget(self, peer: str) -> None:
        """That incarnation is proven gone."""
        self._reach.pop(Peer(peer), None)
        self._warned = {(name, backend) for name, backend in self._warned if name != peer}
        for relay in self._relays.values():
            relay.forget(Peer(peer))

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A torch tensor in the arena, which shm sends without a copy; in ordinary memory when there is no room.
        From any thread.
        """
        tensor = self.arena.allocate_tensor(shape, dtype)
        if tensor is None:
            import torch

            tensor = torch.empty(shape, dtype=dtype)
        return tensor

    def letting_go(self) -> None:
        """This thread drops what it has received now, and calls `settle` next. From any thread."""
        self._thread.lets_go = True

    def settle(self) -> None:
        """As `arena.Arena.settle`; in the thread that has put or received something, before its author goes on."""
        self.arena.settle()
        self._thread.lets_go = False
        for relay in self._relays.values():
            relay.let_go()

    def release_now(self) -> None:
        """Report what is not referenced any more: its sender waits for it. From any thread."""
        for relay in self._relays.values():
            relay.release_now()

    def pins(self) -> list[Pin]:
        """Received buffers that are still referenced, of all backends."""
        return [pin for relay in self._relays.values() for pin in relay.pins]

    def stats(self) -> dict[str, int]:
        """For /metrics: ``<backend>_<name>`` of each relay's, and the arena's."""
        merged = {
            f"{name}_{key}": value for name, relay in self._relays.items() for key, value in relay.stats().items()
        }
        return {**merged, **self.arena.stats(), "late_releases": self._late_releases}

    def close(self) -> None:
        self._trimming.cancel()
        self._close_all()

    def _open(self, name: str, context: RelayContext) -> None:
        try:
            self._relays[name] = registry.load(name, self._table)(context)
        except ConfigurationError as error:
            if name in context.settings.asked or self._table[name].extra is None:
                raise
            log.info("auto does without: %s", error)

    def _close_all(self) -> None:
        for relay in self._relays.values():
            relay.close()
        self.arena.close()

    def _announced(self, metadata: bytes, peer: str) -> tuple[Relay, bytes]:
        name, _, rest = bytes(metadata).partition(b":")
        relay = self._relays.get(name.decode("ascii", "replace"))
        if relay is None:
            raise TransferError(f"transfer from {peer} by the relay {name[:40]!r}, which is not open here")
        return relay, rest

    def _trim(self) -> None:
        self._trimming = self._loop.call_later(TRIM_S, self._trim)  # armed first, should this one raise
        self.arena.trim()


class _Named:
    """A put whose metadata names its relay."""

    __slots__ = ("_operation", "backend")

    def __init__(self, backend: str, operation: Any) -> None:
        self.backend = backend
        self._operation = operation

    @property
    def metadata(self) -> bytes:
        return self.backend.encode() + b":" + bytes(self._operation.metadata)

    @property
    def transfer(self) -> TransferId:
        return TransferId(self._operation.transfer)

    @property
    def peer(self) -> Peer:
        return Peer(self._operation.peer)

    async def wait_for_completion(self, timeout: float | None = None) -> memoryview:
        view: memoryview = await self._operation.wait_for_completion(timeout)
        return view

    def take(self) -> memoryview:
        view: memoryview = self._operation.take()
        return view

    def done(self) -> bool:
        return bool(self._operation.done())


def _pack(extracted: Extracted) -> Pack:
    return extracted.pack if extracted.pack is not None else Pack((), (), 0)
