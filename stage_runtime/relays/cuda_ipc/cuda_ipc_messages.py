"""The messages of two cuda_ipc relays: facts in Hello, metadata in control messages, and the handles in them.

Handles come from peers. torch opens what they name, among it a shared-memory file, so `handle_of` checks their form.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeAlias

import msgspec

from stage_runtime.relays.memory.peer_arenas import ArenaFacts

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

#: CUDA's handles have 64 bytes, and torch adds one in front. A handle of its expandable segments has one of CUDA's
#: for each 20 MiB.
HANDLE_NBYTES: Final = 4096
PROBE_NBYTES: Final = 512  # as `chunks.UNIT`
ENCODED_NBYTES: Final = 2 * HANDLE_NBYTES  # of a handle with all that torch adds
TOKEN_NBYTES: Final = 16
_COUNTER: Final = re.compile(rb"/torch_[0-9A-Za-z_-]{1,200}")  # how torch names its files of reference counters


class GpuProbe(msgspec.Struct, frozen=True):
    """A little memory of a GPU: a process that can open it and read its token can reach this process's memory there."""

    handle: Annotated[bytes, msgspec.Meta(min_length=1, max_length=ENCODED_NBYTES)]
    token: Annotated[str, msgspec.Meta(min_length=2 * TOKEN_NBYTES, max_length=2 * TOKEN_NBYTES)]


class CudaIpcFacts(msgspec.Struct, frozen=True):
    """The facts that a peer must know. gpus: UUIDs of those on which this process's stages compute. probes: of those of
    which it has memory; one without is not used between the two.
    """

    arena: ArenaFacts
    gpus: tuple[str, ...]
    probes: dict[str, GpuProbe] = {}


class OnGpu(msgspec.Struct, frozen=True, array_like=True):
    """The place of a transfer's end: ``nbytes`` at ``offset`` of a chunk, which is opened with ``handle``, once."""

    gpu: str
    chunk: int
    chunk_nbytes: Count
    handle: bytes
    offset: Count
    nbytes: Count


class CudaIpcMetadata(msgspec.Struct, frozen=True, array_like=True):
    """A transfer: what of it lies in the sender's arena, as shm's, and what on a GPU.

    The slot in the arena is there even when it is empty: its generation shows whether the transfer is still valid.
    ``nbytes`` are the arena's; what lies on the GPU follows them in the flat buffer.
    """

    transfer: int
    start: int
    offset: int
    nbytes: int
    generation: int
    there: OnGpu | None = None


class ChunkHandle(msgspec.Struct, frozen=True, array_like=True):
    """The handle that torch's ``UntypedStorage._share_cuda_`` gives, without the number of the GPU, which is another
    one there.
    """

    handle: bytes
    storage_nbytes: Count
    storage_offset: Count
    counter: bytes
    counter_offset: Count
    event: bytes
    event_sync: bool


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ChunkHandle).decode


def handle_of(received: bytes, nbytes: int) -> ChunkHandle:
    """A handle of ``nbytes``, as a peer sent it.

    Raises: ValueError: it cannot be one of torch's.
    """
    handle = _decode(received)  # MsgspecError is a ValueError
    if handle.storage_nbytes != nbytes:
        raise ValueError(f"a handle of {handle.storage_nbytes} bytes for a chunk of {nbytes}")
    if not 0 < len(handle.handle) <= HANDLE_NBYTES or len(handle.event) > HANDLE_NBYTES:
        raise ValueError("no handle of CUDA's")
    if _COUNTER.fullmatch(handle.counter) is None:
        raise ValueError("no reference counter of torch's")
    return handle
