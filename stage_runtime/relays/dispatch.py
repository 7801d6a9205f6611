"""All relays of a process as one: which of them serves a peer, and the names that go with a transfer.

`Relays` is what the stage layer and the coordinator hold. Metadata begins with the backend's name, so a receiver
needs nothing else. `registry`'s table lists the relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, ParamSpec

import msgspec

from stage_runtime.errors import ConfigurationError, RelayFailed, TransferError, ValueRefused
from stage_runtime.payloads.pack import Extracted, Pack
from stage_runtime.relays import registry
from stage_runtime.relays.base import Fetch, OnRelayFailed, OnRelease, Peer, Relay, TransferId
from stage_runtime.relays.choice import choosing, devices
from stage_runtime.relays.choice.choices import Choices
from stage_runtime.relays.choice.choosing import PROCESS, ProcessFacts, Reached
from stage_runtime.relays.context import RelayContext, RelaySettings, SocketDoors, SocketSecurity
from stage_runtime.relays.memory import locking
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.memory.locking import MemoryLock
from stage_runtime.relays.memory.pins import Pin
from stage_runtime.relays.memory.room import RoomWaiting
from stage_runtime.relays.moving import pieces
from stage_runtime.relays.named import Named, Put
from stage_runtime.relays.registry import RELAYS, RelayEntry
from stage_runtime.rules.flow import ticks

Arguments = ParamSpec("Arguments")

log = logging.getLogger(__name__)

FAILED_S: Final = 1.0  # after a relay failed: a peer that has died with it is known to be gone by then
TRIM_S: Final = 5.0  # long against the gaps in a stage's load, short enough for other programs of a full machine


class Relays:
    """Every relay of this process. It runs on ``loop``, except where a method names another thread."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        incarnation: str,
        on_release: OnRelease,
        on_failed: OnRelayFailed = lambda peer, relay, reason: None,
        security: SocketSecurity | None = None,
        doors: SocketDoors | None = None,
        settings: RelaySettings | None = None,
        table: Mapping[str, RelayEntry] = RELAYS,
    ) -> None:
        """on_release: called, in any thread, when the last view of a received transfer has died: send a Release.
        on_failed: called, in any thread, when a relay is found not to reach a peer: notify the peer.

        Opened are the relays of ``table`` that `auto` may choose, and those that ``settings.named`` has.
        Raises: ConfigurationError: one that is required, or needs no extra, cannot be opened.
        """
        settings = settings or RelaySettings()
        here = _process_facts(incarnation, settings)
        names = registry.to_open(settings.named, table, has=here.has)
        locks = [name for name in names if table[name].needs == "rdma" and here.rdma]
        lock = msgspec.structs.replace(settings.memory_lock or locking.of_process(), relays=len(locks))
        settings = _lockable(settings, lock)
        self._thread = threading.local()  #: `RelayContext.thread`
        self._room = RoomWaiting(loop, settings.room_s)
        self.arena = Arena(settings.arena_bytes, prefault_nbytes=settings.prefault_bytes)
        context = RelayContext(
            loop=loop,
            incarnation=Peer(incarnation),
            on_release=on_release,
            thread=self._thread,
            failed=_weakly(self.fail),
            freed=_weakly(self._room.freed),
            ids=itertools.count(1),
            arena=self.arena,
            rdma=here.rdma,
            memory_lock=lock,
            security=security,
            doors=doors,
            settings=settings,
        )
        self._table = table
        self._transfer_bytes = settings.transfer_bytes
        self._on_failed = on_failed
        self._relays: dict[str, Relay] = {}  #: Best first, as the table has them.
        self._refused: dict[str, str] = {}  #: Relays that were to be opened and did not start -> why.
        self._late_releases = 0
        self._loop = loop
        self._cutting = asyncio.Lock()
        self._open_all(names, context, here)
        self.process = msgspec.structs.replace(here, started=tuple(self._relays), refused=self._refused)
        self._choices = Choices(self.process, allow_tcp=settings.allow_tcp)
        self._trimming = loop.call_later(TRIM_S, self._trim)

    def facts(self) -> dict[str, Any]:
        """The facts that a peer's `open` needs, for Hello: plain data."""
        relays = {name: relay.facts() for name, relay in self._relays.items()}
        return {**relays, PROCESS: msgspec.to_builtins(self.process)}

    def open(self, peer: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
        """Learn how to reach an incarnation. Repeated calls change nothing.

        Returns: the backends that reach it, best first; empty when none does.
        """
        known = self._choices.known(Peer(peer))
        if not known:
            theirs = choosing.process_facts(facts)
            self._choices.open(Peer(peer), theirs, self._reached(Peer(peer), facts, theirs))
            known = self._choices.known(Peer(peer))
        return known or ()

    def choose(self, peer: str, backend: str = "auto") -> str:
        """The backend for what goes to ``peer``: the one that the plan asks for, or the best that reaches it.

        Raises: TransferError: none reaches it. RelayRefused: the one that is asked for does not, or none that is
        allowed.
        """
        return self._choices.choose(Peer(peer), backend).relay

    def transport(self, peer: str, backend: str = "auto") -> tuple[str, str]:
        """The relay that `choose` gives, and the medium of its bytes; ``refused`` and ``none`` where it gives none."""
        try:
            choice = self._choices.choose(Peer(peer), backend)
        except TransferError:
            return "refused", "none"
        return choice.relay, choice.medium

    def prepare(self, peer: str, backend: str = "auto") -> None:
        """A put to ``peer`` comes soon: begin what it would wait for. Any thread may call this."""
        with contextlib.suppress(TransferError):
            self._relays[self.choose(peer, backend)].prepare(Peer(peer))

    def fail(self, peer: str, relay: str, reason: str, *, notify: bool = True) -> None:
        """A relay does not reach a peer that may be alive: the next one is used. Any thread may call this.

        notify: the peer does not know it yet.
        """
        if self._choices.fail(Peer(peer), relay, reason):
            try:
                self._loop.call_soon_threadsafe(
                    self._loop.call_later, FAILED_S, self._choices.count, Peer(peer), relay, reason
                )
            except RuntimeError:  # the loop is closed
                return
            if notify:
                self._on_failed(Peer(peer), relay, reason)

    def put(
        self,
        extracted: Extracted,
        *,
        request_id: str,
        peer: str,
        backend: str = "auto",
        slot_nbytes: int | None = None,
        early: bool = False,
    ) -> Put | None:
        """Start moving the parts of ``extracted``; from any thread. None when it finds no room now.

        early: some may be copied later: `Put.fill` follows, when the put is announced, and before the parts change.
        slot_nbytes: a larger pack goes as several transfers of that size. Put to several peers, one `Extracted` takes
        one slot. Never announce `metadata` twice.
        Raises: TransferError: no relay reaches ``peer``, or the last one has failed. ValueRefused: as `check`.
        """
        while True:
            name = self.choose(peer, backend)
            relay = self._relays[name]
            pack = _pack(extracted, from_device=self._table[name].sends_from_gpus)
            try:
                if slot_nbytes is not None and pack.host_part().nbytes > slot_nbytes:
                    pack = _pack(extracted, from_device=False)
                    cut = pieces.put(relay, pack, slot_nbytes, request_id=request_id, peer=Peer(peer))
                    if cut is not None:
                        return Named(name, cut)
                    self._refuse(extracted, relay, slot_nbytes)
                    return None
                like = extracted.placed.get(name)
                begin = relay.put_early if early else relay.put
                operation = begin(pack, request_id=request_id, peer=Peer(peer), like=like)
            except RelayFailed as error:
                self.fail(peer, name, str(error))
                if self.choose(peer, backend) == name:  # no other one reaches it
                    raise
                continue
            if operation is None:
                self._refuse(extracted, relay, slot_nbytes)
                return None
            extracted.placed[name] = operation
            return Named(name, operation, early=early)

    def check(self, extracted: Extracted, *, peer: str, backend: str = "auto", slot_nbytes: int | None = None) -> None:
        """Called before a wait for room: there must be some, at times, for a copy of ``extracted``. Any thread may call
        it.

        Raises: ValueRefused: its relay never carries as much at once. Names both sizes, and what to do.
        """
        with contextlib.suppress(TransferError):  # a put says so
            self._refuse(extracted, self._relays[self.choose(peer, backend)], slot_nbytes)

    def _refuse(self, extracted: Extracted, relay: Relay, slot_nbytes: int | None) -> None:
        nbytes = extracted.nbytes
        refusal = relay.refusal(nbytes, 1 if slot_nbytes is None else max(-(-nbytes // slot_nbytes), 1))
        if refusal is not None:
            path = max(extracted.refs, key=lambda ref: ref.nbytes).path if extracted.refs else "payload"
            raise ValueRefused(path, f"part of a payload of {nbytes} bytes, and {refusal}")

    def when_room(self, again: Callable[[], None]) -> None:
        """A put found no room: call ``again`` once, on the loop, when some may have come back without a Release. Any
        thread may call this.

        That is when a relay reports room, and after ``room_s``.
        """
        self._room.wait(again)

    async def put_async(
        self,
        extracted: Extracted,
        *,
        request_id: str,
        peer: str,
        backend: str = "auto",
        slot_nbytes: int | None = None,
    ) -> Put:
        """The same as `put`, but it waits for room: for all pieces of a pack that is cut. The I/O thread calls it."""
        is_cut = slot_nbytes is not None and extracted.nbytes > slot_nbytes
        # One at a time: what one gives back when not all of it finds room would wake the others.
        async with self._cutting if is_cut else contextlib.nullcontext():
            while True:
                operation = self.put(
                    extracted, request_id=request_id, peer=peer, backend=backend, slot_nbytes=slot_nbytes
                )
                if operation is not None:
                    return operation
                await self._relays[self.choose(peer, backend)].room()

    def get(self, metadata: bytes, *, request_id: str, peer: str, holder: str = "") -> Fetch:
        """Fetch what ``peer`` put. holder: the stage that will look at it, for `pins`.

        Raises: TransferError: it is not a transfer of that peer's.
        """
        relay, rest = self._announced(metadata, peer)
        if rest.startswith(pieces.MARK):
            announced = pieces.announced(rest, self._transfer_bytes)
            return pieces.get(relay, announced, rest, request_id=request_id, peer=Peer(peer), holder=holder)
        return relay.get(rest, request_id=request_id, peer=Peer(peer), holder=holder)

    def report(self, metadata: bytes, *, peer: str, error: RelayFailed) -> None:
        """The values that ``peer`` put do not come: by its relay, nothing more is sent between the two."""
        name, _, _ = bytes(metadata).partition(b":")
        self.fail(peer, name.decode("ascii", "replace"), str(error))

    def decline(self, metadata: bytes, *, peer: str) -> None:
        """Let go of what ``peer`` has announced without fetching it: its request is not known here, or over.

        Raises: TransferError: it is not a transfer of that peer's.
        """
        relay, rest = self._announced(metadata, peer)
        if rest.startswith(pieces.MARK):
            for piece in pieces.announced(rest, self._transfer_bytes).pieces:
                relay.decline(piece, peer=Peer(peer))
        else:
            relay.decline(rest, peer=Peer(peer))

    def released(self, peer: str, transfer: int) -> None:
        """A Release by ``peer`` came in. Late, unknown and repeated ones change nothing."""
        for relay in self._relays.values():
            if relay.released(Peer(peer), TransferId(transfer)):
                return
        self._late_releases += 1

    def discard(self, operation: Put) -> None:
        """A put whose metadata was read but never sent: the receiver cannot know of it, so it is over."""
        for transfer in operation.transfers:
            self._relays[operation.backend].released(operation.peer, transfer)

    def cleanup(self, request_id: str) -> None:
        """A request was aborted: what was not announced is freed; the rest is quarantined until its receivers
        release it or are gone; what arrived and was not fetched is dropped.
        """
        for relay in self._relays.values():
            relay.cleanup(request_id)

    def forget(self, peer: str) -> None:
        """That incarnation is proven gone."""
        self._choices.forget(Peer(peer))
        for relay in self._relays.values():
            relay.forget(Peer(peer))

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A torch tensor in the arena, which relays send without a copy; in ordinary memory when the arena is full.
        Any thread may call this.
        """
        tensor = self.arena.allocate_tensor(shape, dtype)
        if tensor is None:
            import torch

            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        return tensor

    def letting_go(self) -> None:
        """This thread drops what it has received now, and calls `settle` next. Any thread may call this."""
        self._thread.lets_go = True

    def settle(self) -> None:
        """Does `arena.Arena.settle` for the relays, too. A thread that has put or received something calls it, before
        its author goes on.
        """
        self.arena.settle()
        self._thread.lets_go = False
        for relay in self._relays.values():
            relay.let_go()

    def release_now(self) -> None:
        """Report what is not referenced any more: its sender waits for it. Any thread may call this."""
        for relay in self._relays.values():
            relay.release_now()

    def pins(self) -> list[Pin]:
        """Received buffers that are still referenced, of all backends."""
        return [pin for relay in self._relays.values() for pin in relay.pins]

    def stats(self) -> dict[str, int]:
        """Numbers for /metrics: those of each relay as ``<backend>_<name>``, and the arena's."""
        merged = {
            f"{name}_{key}": value
            for name, relay in self._relays.items()
            for key, value in {**relay.stats(), "failovers": self._choices.failovers[name]}.items()
        }
        return {**merged, **self.arena.stats(), "late_releases": self._late_releases}

    def close(self) -> None:
        self._room.close()
        self._trimming.cancel()
        self._close_all()

    def _open_all(self, names: Sequence[str], context: RelayContext, here: ProcessFacts) -> None:
        """Raises: ConfigurationError: one that is required does not start; all are closed then."""
        try:
            for name in sorted(context.settings.named - self._table.keys()):
                registry.load(name, self._table)  # raises
            for name in names:
                if self._table[name].needs == "gpu" and not here.gpus:
                    self._refused[name] = "no stage of this process has a GPU"
                else:
                    self._open(name, context)
        except ConfigurationError:
            self._close_all()
            raise

    def _open(self, name: str, context: RelayContext) -> None:
        try:
            self._relays[name] = registry.load(name, self._table)(context)
        except ConfigurationError as error:
            if name in context.settings.named or self._table[name].extra is None:
                raise
            self._refused[name] = str(error)
            log.info("relay %s is not used by auto: %s", name, error)

    def _reached(self, peer: Peer, facts: Mapping[str, Any], theirs: ProcessFacts) -> Iterator[Reached]:
        for name, relay in self._relays.items():
            entry = self._table[name]
            if entry.ranks and not choosing.share_world(self.process, theirs):
                continue
            peer_facts = facts.get(name)
            if isinstance(peer_facts, Mapping) and relay.open(peer, peer_facts):
                yield Reached(relay=name, medium=relay.medium(peer), auto=entry.auto, needs=entry.needs)

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
        # Armed first, should this one raise.
        self._trimming = self._loop.call_later(ticks.next_s(time.time(), TRIM_S), self._trim)
        self.arena.trim()


def _weakly(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Calls a method without keeping its object.

    Relays hold the context that holds this: a process that goes on as another incarnation frees the old one's arena at
    once, not when the next garbage collection finds the cycle.
    """
    weak = weakref.WeakMethod(method)

    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> None:
        alive = weak()
        if alive is not None:
            alive(*arguments, **options)

    return call


def _pack(extracted: Extracted, *, from_device: bool) -> Pack:
    pack = extracted.pack if from_device else extracted.on_host()
    return pack if pack is not None else Pack((), (), 0)


def _lockable(settings: RelaySettings, lock: MemoryLock) -> RelaySettings:
    """The settings with an arena that the relays may lock as a whole."""
    arena_bytes = lock.arena_nbytes(settings.arena_bytes)
    if arena_bytes < settings.arena_bytes:
        log.warning("the arena has %d bytes, not %d: no more can be locked", arena_bytes, settings.arena_bytes)
    prefault_bytes = min(settings.prefault_bytes, arena_bytes)
    return msgspec.structs.replace(settings, arena_bytes=arena_bytes, prefault_bytes=prefault_bytes)


def _process_facts(incarnation: str, settings: RelaySettings) -> ProcessFacts:
    return ProcessFacts(
        incarnation=incarnation,
        pod=settings.pod,
        boot=devices.boot_id(),
        namespaces=devices.namespaces(),
        gpus=devices.gpus() if settings.gpus else (),
        rdma=devices.rdma_devices() if settings.rdma is None else settings.rdma,
        rank=settings.rank,
        world_size=settings.world_size,
        coordinator=settings.coordinator,
    )
