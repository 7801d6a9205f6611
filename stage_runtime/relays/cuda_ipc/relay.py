"""The relay between processes that compute on the same GPU: what lies there is copied once, on the GPU, and read there.

The copy goes into memory of this relay's, which every peer opens once (CUDA IPC, by torch); what of a payload lies in
the host's memory goes by the arena, as by shm. A part that a peer cannot reach (another GPU), or for which the GPU has
no room, is copied to the host and goes by the arena, too. A receiver releases a transfer when its GPU has done all that
it was asked while views of it lived: their deaths show that no more is asked, not that all was done.

Not tried on a GPU so far: its tests use host memory as `memory.DeviceMemory`; those with the mark ``gpu`` use CUDA's.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import mmap
import queue
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from stage_runtime.errors import RelayFailed, TransferError
from stage_runtime.payloads import buffers, tensors
from stage_runtime.payloads.pack import Arrived, Pack
from stage_runtime.relays.abstract import AbstractRelay
from stage_runtime.relays.base import Peer, RelayOperation, TransferId, TransferKey
from stage_runtime.relays.context import RelayContext
from stage_runtime.relays.cuda_ipc import cuda_ipc_messages
from stage_runtime.relays.cuda_ipc.chunks import ChunkPool, GpuPlace
from stage_runtime.relays.cuda_ipc.cuda_ipc_messages import CudaIpcFacts, CudaIpcMetadata, GpuProbe, OnGpu
from stage_runtime.relays.cuda_ipc.memory import CudaMemory, DeviceLost, DeviceMemory, Unshared
from stage_runtime.relays.memory import peer_arenas
from stage_runtime.relays.memory.arena import Arena
from stage_runtime.relays.memory.placing import Placed
from stage_runtime.relays.moving.pending_transfers import GetOperation, PutOperation, TransferCompletion

log = logging.getLogger(__name__)

RETRY_S: Final = 0.1  # after a wait for the GPU failed, or its thread could not start
CHUNKS: Final = 64  # most that a peer's transfers may make this process open


class CudaIpcRoute(NamedTuple):
    """The route to one peer."""

    mapping: mmap.mmap
    gpus: frozenset[str]  #: UUIDs of those that both use.
    chunks: dict[int, tuple[str, Any]]  #: Chunks of the peer that are open here: their GPU and memory.


class Resource(NamedTuple):
    """The resource that a put holds."""

    host: Placed
    host_nbytes: int
    there: GpuPlace | None


class _Held:
    """The object that the buffers of the host and of the GPU keep alive: its death is the transfer's end."""

    __slots__ = ("__weakref__",)


class _Region(np.ndarray[Any, Any]):
    """A `pages.region` that keeps a `_Held` alive. Its base is the mapping itself: numpy's views skip other bases."""

    held: _Held


class CudaIpcRelay(AbstractRelay[CudaIpcRoute, CudaIpcMetadata]):
    """Moves payloads between processes that use the same GPU of one machine."""

    name = "cuda_ipc"
    MEDIUM = "gpu"

    def __init__(self, context: RelayContext, memory: DeviceMemory | None = None) -> None:
        """memory: CUDA's, unless another one is given.

        Raises: ConfigurationError: torch is missing, or finds no GPU.
        """
        self._memory = memory if memory is not None else CudaMemory()
        self._report = context.on_release
        super().__init__(msgspec.structs.replace(context, on_release=self._let_go_of), CudaIpcMetadata)
        self._arena: Arena = context.arena
        self._devices = {self._memory.uuid(gpu): f"cuda:{gpu}" for gpu in context.settings.gpus}
        self._chunks = ChunkPool(self._memory, context.settings.gpu_bytes, self._devices.values())
        self._uuids = {device: uuid for uuid, device in self._devices.items()}
        self._token = secrets.token_bytes(cuda_ipc_messages.TOKEN_NBYTES)
        self._kept: list[Any] = []  #: The memory of the probes.
        self._probes = dict(self._marked())
        self._looked_at: dict[TransferKey, str] = {}  #: Transfers here that lie on a GPU, and on which.
        self._waiting: queue.SimpleQueue[tuple[str, TransferKey] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._counts = dict.fromkeys(("received_transfers", "received_bytes", "staged_bytes"), 0)

    def facts(self) -> dict[str, Any]:
        facts = CudaIpcFacts(peer_arenas.own_facts(self._arena), tuple(self._devices), self._probes)
        return msgspec.to_builtins(facts)  # type: ignore[no-any-return]

    def put(
        self, pack: Pack, *, request_id: str, peer: Peer, like: RelayOperation | None = None
    ) -> PutOperation | None:
        """Implements `base.Relay.put`. like: an operation of the same pack by this relay, whose slots can be shared."""
        route = self._route(peer)
        resource = self._shared(route, like) or self._placed(route, pack)
        if resource is None:
            return None
        slot, offset, copied, _ = resource.host
        transfer = next(self._context.ids)
        try:
            there = self._announced(resource, peer)
        except Unshared as error:
            self._release(resource)
            raise RelayFailed(f"memory of a GPU cannot be shared with {peer}: {error}") from error
        metadata = CudaIpcMetadata(transfer, slot.start, offset, resource.host_nbytes, slot.generation, there)
        return self._accounted(metadata, pack, resource, request_id=request_id, peer=peer, copied=copied)

    def get(self, metadata: bytes, *, request_id: str, peer: Peer, holder: str = "") -> GetOperation:
        announced, route = self._incoming(metadata, peer)
        key = (peer, TransferId(announced.transfer))
        region = peer_arenas.region(route.mapping, announced, self.name, peer)
        nbytes, there, on_device = announced.nbytes, announced.there, None
        watched: Any = region
        if there is not None:
            watched = held = _Held()
            on_device = Arrived(announced.nbytes, self._view(route, there, key, held))
            region = _Region((nbytes,), np.uint8, route.mapping, announced.offset)
            region.held = held
            nbytes += there.nbytes
        self._pins.add(watched, *key, request_id=request_id, holder=holder, nbytes=nbytes)
        if there is not None:
            self._looked_at[key] = self._devices[there.gpu]
        self._counts["received_transfers"] += 1
        self._counts["received_bytes"] += nbytes
        operation = GetOperation(TransferCompletion(self._loop), key[1], peer, metadata)
        operation.arrived(buffers.view(region), on_device)
        return operation

    def stats(self) -> dict[str, int]:
        return {"copied_bytes": self._placing.copied_bytes, **self._counts, **super().stats(), **self._chunks.stats()}

    def close(self) -> None:
        super().close()
        with self._starting:
            self._is_closed = True
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        self._kept.clear()
        self._chunks.close()

    # --- AbstractRelay ------------------------------------------------------------------------------------------

    def _connect(self, peer: Peer, facts: Mapping[str, Any]) -> CudaIpcRoute | None:
        try:
            theirs = msgspec.convert(facts, CudaIpcFacts)
            gpus = frozenset(theirs.gpus) & theirs.probes.keys() & self._probes.keys()
            mapping = peer_arenas.mapped(theirs.arena) if gpus else None
        except (OSError, ValueError, OverflowError):  # ValidationError is a ValueError
            return None
        if mapping is None:
            return None
        reached = frozenset(gpu for gpu in gpus if self._reaches(peer, gpu, theirs.probes[gpu]))
        return CudaIpcRoute(mapping, reached, {}) if reached else None

    def _disconnect(self, peer: Peer, connection: CudaIpcRoute) -> None:
        """Views that are still held keep the mapping and the chunk."""
        connection.chunks.clear()
        self._chunks.forget(peer)
        for key in [key for key in list(self._looked_at) if key[0] == peer]:
            self._looked_at.pop(key, None)

    def _marked(self) -> Iterator[tuple[str, GpuProbe]]:
        """Each GPU with memory that holds the token, for peers to open. It is not a chunk's memory: all peers get the
        same handle, and torch counts one user of each.
        """
        for uuid, device in self._devices.items():
            try:
                memory = self._memory.allocate(device, cuda_ipc_messages.PROBE_NBYTES)
                self._memory.write(memory, [(0, tensors.flat_bytes(self._token))])
                handle = self._memory.share(memory)
            except Unshared as error:
                log.info("cuda_ipc relay: memory of %s cannot be shared: %s", device, error)
                continue
            self._kept.append(memory)
            yield uuid, GpuProbe(handle, self._token.hex())

    def _reaches(self, peer: Peer, gpu: str, probe: GpuProbe) -> bool:
        """Whether memory of a peer's can be opened here, and is that peer's."""
        try:
            memory = self._memory.open(probe.handle, self._devices[gpu], cuda_ipc_messages.PROBE_NBYTES)
            found = self._memory.read(memory, 0, cuda_ipc_messages.TOKEN_NBYTES)
            if hmac.compare_digest(found, bytes.fromhex(probe.token)):
                return True
            log.info("cuda_ipc relay: memory of %s on %s has another token", peer, gpu)
        except ValueError as error:
            log.info("cuda_ipc relay: memory of %s on %s is not reached: %s", peer, gpu, error)
        return False

    def _free(self, put: PutOperation) -> None:
        self._release(put.resource)

    def _quarantine(self, put: PutOperation) -> None:
        resource: Resource = put.resource
        self._arena.aborted(resource.host.slot)
        if resource.there is not None:
            self._chunks.aborted(resource.there)

    # --- sending ------------------------------------------------------------------------------------------------

    def _shared(self, route: CudaIpcRoute, like: RelayOperation | None) -> Resource | None:
        """The buffer that another receiver of the same pack has; None where that cannot be shared."""
        if not isinstance(like, PutOperation):
            return None
        resource: Resource = like.resource
        there = resource.there
        if there is not None and self._uuids[there.chunk.device] not in route.gpus:
            return None
        if not self._arena.share(resource.host.slot):
            return None
        if there is not None and not self._chunks.share(there):
            self._arena.released(resource.host.slot)
            return None
        return resource._replace(host=resource.host._replace(copied_nbytes=0))

    def _placed(self, route: CudaIpcRoute, pack: Pack) -> Resource | None:
        """None: the host's arena has no room."""
        there, on_device = None, pack.on_device
        if on_device is not None:
            if self._uuids.get(on_device.device) in route.gpus:
                there = self._chunks.place(on_device, pack.nbytes - on_device.start)
            if there is None:
                self._counts["staged_bytes"] += pack.nbytes - on_device.start
                pack = pack.on_host()
        near = pack if there is None else pack.host_part()
        host = self._placing.place(near)
        if host is None:
            if there is not None:
                self._chunks.released(there)
            return None
        return Resource(host, near.nbytes, there)

    def _announced(self, resource: Resource, peer: Peer) -> OnGpu | None:
        """The place of the part on the GPU, for ``peer``. Raises: Unshared."""
        if resource.there is None:
            return None
        chunk, slot = resource.there
        handle = self._chunks.handle(chunk, peer)
        return OnGpu(self._uuids[chunk.device], chunk.number, chunk.nbytes, handle, slot.offset, slot.nbytes)

    def _release(self, resource: Resource) -> None:
        self._arena.released(resource.host.slot)
        if resource.there is not None:
            self._chunks.released(resource.there)

    # --- receiving ----------------------------------------------------------------------------------------------

    def _view(self, route: CudaIpcRoute, there: OnGpu, key: TransferKey, held: _Held) -> Any:
        """The tensor that a peer has put on a GPU.

        Raises: TransferError: it is not inside a chunk of that peer's. RelayFailed: the chunk cannot be opened.
        """
        peer, transfer = key
        what = f"cuda_ipc transfer {transfer} from {peer}"
        if there.gpu not in route.gpus:
            raise TransferError(f"{what}: it lies on another GPU")
        if there.offset + there.nbytes > there.chunk_nbytes:
            raise TransferError(f"{what}: not inside its chunk of {there.chunk_nbytes} bytes")
        known = route.chunks.get(there.chunk)
        if known is None:
            if len(route.chunks) >= CHUNKS:
                raise TransferError(f"{what}: more than {CHUNKS} chunks")
            try:
                chunk = self._memory.open(there.handle, self._devices[there.gpu], there.chunk_nbytes)
            except ValueError as error:
                raise RelayFailed(f"{what}: its memory cannot be opened: {error}") from error
            known = route.chunks[there.chunk] = (there.gpu, chunk)
        if known[0] != there.gpu or len(known[1]) != there.chunk_nbytes:
            raise TransferError(f"{what}: its chunk {there.chunk} is another one")
        return self._memory.view(known[1], there.offset, there.nbytes, held)

    def _let_go_of(self, peer: Peer, transfer: TransferId) -> None:
        """No view is left. Any thread may call this."""
        device = self._looked_at.pop((peer, transfer), None)
        if device is None:
            self._report(peer, transfer)
            return
        self._waiting.put((device, (peer, transfer)))
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._starting:
            if self._thread is not None or self._is_closed:
                return
            thread = threading.Thread(target=self._settle, name="omni-relay-cuda-ipc", daemon=True)
            try:
                thread.start()
                self._thread = thread
                return
            except RuntimeError:  # the machine has no thread left
                pass
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._loop.call_later, RETRY_S, self._start)

    def _settle(self) -> None:
        """The thread: release what the GPU reads no more. A part that could not be waited for is kept and waited for
        again.
        """
        self._memory.enter_thread()
        kept: list[tuple[str, TransferKey]] = []
        is_logged = False
        while True:
            found, is_last = self._to_settle(kept)
            failed = self._not_waited({device for device, _ in found}, is_logged)
            is_logged = bool(failed)
            kept = [(device, key) for device, key in found if device in failed]
            for device, key in found:
                if device not in failed:
                    self._report(*key)
            if is_last:
                return

    def _to_settle(self, kept: list[tuple[str, TransferKey]]) -> tuple[list[tuple[str, TransferKey]], bool]:
        """Wait for something to do. Returns: ``kept`` and what is new, and whether the relay is closed."""
        found = list(kept)
        try:
            following = self._waiting.get(timeout=RETRY_S if kept else None)
            while following is not None:
                found.append(following)
                following = self._waiting.get_nowait()
            return found, True
        except queue.Empty:
            return found, False

    def _not_waited(self, devices: Iterable[str], is_logged: bool) -> set[str]:
        """Wait for them. Returns: those of which it is unknown whether the GPU has finished."""
        failed = set()
        for device in devices:
            try:
                self._memory.wait(device)
            except DeviceLost as error:
                log.error("cuda_ipc relay: %s has failed: %s", device, error)
            except Exception:  # outermost of its thread: it waits again
                failed.add(device)
                if not is_logged:
                    log.exception("cuda_ipc relay: waiting for %s; it is tried again", device)
        return failed
