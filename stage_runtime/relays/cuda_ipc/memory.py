"""Memory of GPUs as this relay uses it: allocated, shared with other processes, opened, viewed. It uses torch.

`DeviceMemory` is what the relay needs; tests pass one of host memory. `CudaMemory` has not run on a GPU so far.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import Any, Final, Protocol

from stage_runtime.errors import ConfigurationError
from stage_runtime.relays.cuda_ipc import cuda_ipc_messages
from stage_runtime.relays.cuda_ipc.cuda_ipc_messages import ChunkHandle

CUDA_RUNTIMES: Final = ("libcudart.so.13", "libcudart.so.12")  # as torch loads them
RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed
#: Errors after which all further calls of the process fail, by CUDA's texts (``cudaGetErrorString``).
FATAL: Final = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "uncorrectable ECC",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "not supported on global/shared address space",
    "hardware stack error",
    "launch timed out",
    "context is destroyed",
)


class Unshared(Exception):
    """The GPU's memory cannot be used so: what was to be sent goes by the host's memory."""


class DeviceLost(Exception):
    """The GPU has failed for this process: none of its pending work will be done."""


class DeviceMemory(Protocol):
    """Chunks are flat tensors of ``uint8``. Any thread may call this."""

    def uuid(self, gpu: int) -> str:
        """The UUID of the GPU with that number in this process."""

    def allocate(self, device: str, nbytes: int) -> Any:
        """A chunk. Raises: Unshared: the memory does not exist."""

    def share(self, chunk: Any) -> bytes:
        """A handle, for one process, which opens it once. Raises: Unshared."""

    def open(self, handle: bytes, device: str, nbytes: int) -> Any:
        """The chunk of another process. Raises: ValueError: the handle is not one, or cannot be opened here."""

    def write(self, chunk: Any, parts: Sequence[tuple[int, Any]]) -> None:
        """Copy flat tensors to those offsets, and wait until they are there. Raises: Unshared."""

    def read(self, chunk: Any, offset: int, nbytes: int) -> bytes:
        """A copy of some bytes. Raises: ValueError: the GPU does not give them."""

    def view(self, chunk: Any, offset: int, nbytes: int, owner: object) -> Any:
        """Bytes of a chunk as a flat tensor; it and all tensors on its memory keep ``owner`` alive."""

    def wait(self, device: str) -> None:
        """Waits until the GPU has done all that this process has asked of it so far.

        Raises: DeviceLost: the GPU never will. It is unknown after any other error whether it has.
        """

    def enter_thread(self) -> None:
        """Called first by each thread of the relay's that waits."""


class CudaMemory:
    """NVIDIA's GPUs by torch."""

    def __init__(self) -> None:
        """Raises: ConfigurationError: torch is missing, or finds no GPU."""
        try:
            import torch
        except ImportError as error:
            install = "pip install 'omnipipeline[runtime]'"
            raise ConfigurationError(f"relay 'cuda_ipc' cannot be loaded ({error}): {install}") from error
        if torch.version.cuda is None or not torch.cuda.is_available():
            raise ConfigurationError("relay 'cuda_ipc': torch finds no NVIDIA GPU: install torch with CUDA")
        self._torch: Any = torch

    def uuid(self, gpu: int) -> str:
        return str(self._torch.cuda.get_device_properties(gpu).uuid)

    def allocate(self, device: str, nbytes: int) -> Any:
        torch = self._torch
        try:
            with torch.inference_mode(False):  # an author's thread may be in it: its tensors cannot be written later
                return torch.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # OutOfMemoryError is one
            raise Unshared(str(error)) from error

    def share(self, chunk: Any) -> bytes:
        try:
            shared = chunk.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise Unshared(str(error)) from error
        _, handle, nbytes, offset, counter, counter_offset, event, event_sync = shared
        return cuda_ipc_messages.encode(ChunkHandle(handle, nbytes, offset, counter, counter_offset, event, event_sync))

    def open(self, handle: bytes, device: str, nbytes: int) -> Any:
        torch = self._torch
        checked = cuda_ipc_messages.handle_of(handle, nbytes)
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                torch.device(device).index,
                checked.handle,
                checked.storage_nbytes,
                checked.storage_offset,
                checked.counter,
                checked.counter_offset,
                checked.event,
                checked.event_sync,
            )
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))

    def write(self, chunk: Any, parts: Sequence[tuple[int, Any]]) -> None:
        torch = self._torch
        try:
            with torch.inference_mode(False), torch.no_grad():
                for offset, part in parts:
                    chunk[offset : offset + len(part)].copy_(part, non_blocking=True)
            torch.cuda.current_stream(chunk.device).synchronize()
        except RuntimeError as error:
            raise Unshared(str(error)) from error

    def read(self, chunk: Any, offset: int, nbytes: int) -> bytes:
        try:
            return bytes(chunk[offset : offset + nbytes].cpu().numpy())
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def view(self, chunk: Any, offset: int, nbytes: int, owner: object) -> Any:
        return self._torch.as_tensor(_DeviceBytes(chunk, offset, nbytes, owner), device=chunk.device)

    def wait(self, device: str) -> None:
        try:
            self._torch.cuda.synchronize(device)
        except RuntimeError as error:
            if ends_the_context(str(error)):
                raise DeviceLost(str(error)) from error
            raise

    def enter_thread(self) -> None:
        """While a thread of the author's captures a CUDA graph, other threads may not wait, unless they declare that
        they take no part in it. torch has no call for that.
        """
        for name in CUDA_RUNTIMES:
            with contextlib.suppress(OSError, AttributeError):  # another one is loaded, or it has no such function
                runtime = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
                runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
                return


def ends_the_context(error: str) -> bool:
    """Whether all further GPU calls of this process fail after such an error."""
    return any(text in error for text in FATAL)


class _DeviceBytes:
    """Bytes of a chunk, as torch takes them over without a copy: it keeps this object as long as their storage."""

    def __init__(self, chunk: Any, offset: int, nbytes: int, owner: object) -> None:
        self._kept = (chunk, owner)
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (chunk.data_ptr() + offset, False),
            "strides": None,
            "version": 2,
        }
