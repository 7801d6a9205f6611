"""Host memory that stands for a GPU's, for the cuda_ipc relay on machines without one.

Chunks are anonymous files that other processes map, so two processes can use it; tensors on it are on the CPU, and a
payload's parts are said to lie on a GPU (`on_gpu`). It lacks what only a GPU has: streams, and copies that are late.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from stage_runtime.payloads import buffers, encoding, tensors
from stage_runtime.payloads.encoding import _Extraction
from stage_runtime.payloads.pack import Extracted, packed_with_device
from stage_runtime.relays.context import RelayContext
from stage_runtime.relays.cuda_ipc.memory import Unshared
from stage_runtime.relays.cuda_ipc.relay import CudaIpcRelay


class StandIn:
    """`memory.DeviceMemory`."""

    def __init__(self, *, offers: bool = True, uuids: Sequence[str] = ("GPU-0", "GPU-1")) -> None:
        """offers: False: no memory is left."""
        self.offers = offers
        self.waited: list[str] = []
        self.fails: Exception | None = None  #: The error that each wait raises.
        self.failed = 0  #: Waits.
        self.entered = 0  #: Threads of the relay's.
        self.opens = True  #: Memory of other processes.
        self.opened = 0
        self._uuids = uuids
        self._files: dict[int, int] = {}  #: Files by address of a chunk.

    def uuid(self, gpu: int) -> str:
        return self._uuids[gpu]

    def allocate(self, device: str, nbytes: int) -> torch.Tensor:
        if not self.offers:
            raise Unshared("out of memory")
        file = os.memfd_create("stand-in-gpu", os.MFD_CLOEXEC)
        os.ftruncate(file, nbytes)
        chunk = self._mapped(file, nbytes)
        self._files[chunk.data_ptr()] = file
        return chunk

    def share(self, chunk: torch.Tensor) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._files[chunk.data_ptr()]}".encode()

    def open(self, handle: bytes, device: str, nbytes: int) -> torch.Tensor:
        if not self.opens:
            raise ValueError("CUDA error: invalid argument")
        try:
            file = os.open(handle.decode(), os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(str(error)) from error
        try:
            self.opened += 1
            return self._mapped(file, nbytes)
        finally:
            os.close(file)

    def write(self, chunk: torch.Tensor, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        for offset, part in parts:
            chunk[offset : offset + len(part)] = part

    def view(self, chunk: torch.Tensor, offset: int, nbytes: int, owner: object) -> torch.Tensor:
        region = _Owning((nbytes,), np.uint8, chunk.numpy()[offset : offset + nbytes])
        region.owner = owner
        return torch.frombuffer(buffers.view(region), dtype=torch.uint8)

    def read(self, chunk: torch.Tensor, offset: int, nbytes: int) -> bytes:
        return bytes(chunk[offset : offset + nbytes].numpy())

    def wait(self, device: str) -> None:
        if self.fails is not None:
            self.failed += 1
            raise self.fails
        self.waited.append(device)

    def enter_thread(self) -> None:
        self.entered += 1

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _mapped(self, file: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


class _Owning(np.ndarray[Any, Any]):
    owner: object


class StandInRelay(CudaIpcRelay):
    """A relay with a memory of its own, which it closes."""

    def __init__(self, context: RelayContext) -> None:
        self.memory = StandIn()
        gpus = context.settings.gpus or (0,)
        settings = msgspec.structs.replace(context.settings, gpus=gpus)
        super().__init__(msgspec.structs.replace(context, settings=settings), self.memory)

    def close(self) -> None:
        super().close()
        self.memory.close()


def on_gpu(value: Any, device: str = "cuda:0") -> Extracted:
    """The result of `encoding.extract`, as if the tensors in ``value`` lay on that GPU."""
    walk = _Extraction("payload.data")
    encoded = msgspec.msgpack.encode(walk.run(value, "payload.data"))
    for part in walk.parts:
        if part.kind == "torch" and part.data.nbytes:
            part.data, part.device, part.on_device = tensors.EMPTY, device, tensors.device_bytes(part.owner)
    return packed_with_device(encoded, walk.parts, "payload.data")


def restored(extracted: Extracted, fetched: Any) -> Any:
    """The value of a get that is done."""
    return encoding.restore(extracted.value_bytes, extracted.refs, fetched.take(), fetched.take_device())
