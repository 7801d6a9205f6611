"""Tensors and arrays as flat bytes, and back: the only place that knows torch's and numpy's ways.

Knows nothing of containers, paths or transports (`walking`, `payloads`). Torch is never imported to look at a value:
a tensor can't exist in a process that has not imported it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from stage_runtime.relays import memory
from stage_runtime.wire import tensorrefs
from stage_runtime.wire.tensorrefs import TensorRef
from stage_runtime.wire.values import RawTensor

EMPTY = memoryview(b"")


class Leaf:
    """One tensor, array or long bytes on its way into a pack."""

    __slots__ = ("data", "dtype", "kind", "owner", "path", "shape")

    def __init__(
        self, path: str, shape: tuple[int, ...], dtype: str, kind: tensorrefs.Kind, data: memoryview, owner: Any
    ) -> None:
        self.path = path
        self.shape = shape
        self.dtype = dtype
        self.kind = kind
        self.data = data
        self.owner = owner  # the object itself: while it lives, its id is not given to another


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def tensor_problem(tensor: Any) -> str | None:
    """Why a torch tensor cannot travel, with the cure; None when it can."""
    torch = sys.modules["torch"]
    if type(tensor) is not torch.Tensor and type(tensor) not in _plain_subclasses():
        return f"tensor subclass {type(tensor).__name__}: send a plain tensor"
    if tensor.layout != torch.strided:
        return "sparse tensor: send .to_dense()"
    if tensor.is_quantized:
        return "quantised tensor: send .int_repr() and its scale, or .dequantize()"
    if tensor.device.type == "meta":
        return "meta tensor: it has no data"
    return None


def tensor_dtype(tensor: Any) -> str:
    return _dtype_name(tensor.dtype)


def plain_tensor(tensor: Any) -> Any:
    """The same memory without gradient, conjugate and negative bits, as a tensor arrives from afar."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def tensor_bytes(tensor: Any) -> memoryview:
    """The C-contiguous bytes of a tensor: its own memory where it is contiguous and on the CPU, else a copy."""
    tensor = plain_tensor(tensor)
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if not tensor.numel():
        return EMPTY
    if _dtype_name(tensor.dtype) not in tensorrefs.NUMPY_DTYPES:
        torch = sys.modules["torch"]  # numpy lacks these, and torch itself cannot copy the smallest of them
        tensor = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return memory.view(tensor.numpy().reshape(-1).view(np.uint8))


def array_problem(array: np.ndarray[Any, Any]) -> str | None:
    """Why a numpy array cannot travel, with the cure; None when it can."""
    if type(array) is not np.ndarray:
        return f"array subclass {type(array).__name__}: send numpy.asarray(...) of it"
    if array.dtype.name not in tensorrefs.NUMPY_DTYPES:
        return f"numpy array of {array.dtype}: convert it to a number type, or send .tolist()"
    return None


def native_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array in this machine's byte order, as it arrives from afar."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def array_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The C-contiguous bytes of an array: its own memory where possible."""
    array = native_array(array)
    if not array.size:
        return EMPTY
    return memory.view(array.reshape(-1).view(np.uint8))  # reshape copies what is not contiguous


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    view = native_array(array).view()
    view.flags.writeable = False
    return view


def restored(ref: TensorRef, buffer: memoryview, *, torch: bool) -> Any:
    """The object that a validated ``ref`` describes: a view of ``buffer``, but for bytes.

    torch: False gives `RawTensor` and imports no torch.
    """
    if ref.kind == "bytes":
        return bytes(buffer[ref.offset : ref.offset + ref.nbytes])
    if not torch:
        data = buffer[ref.offset : ref.offset + ref.nbytes]
        return RawTensor(dtype=ref.dtype, shape=ref.shape, data=data, kind="numpy" if ref.kind == "numpy" else "torch")
    if ref.kind == "numpy":
        array: np.ndarray[Any, Any] = np.ndarray(ref.shape, ref.dtype, buffer, ref.offset if ref.nbytes else 0)
        array.flags.writeable = False
        return array
    return _restored_tensor(ref, buffer)


def _restored_tensor(ref: TensorRef, buffer: memoryview) -> Any:
    import torch

    dtype = getattr(torch, ref.dtype)
    if not ref.nbytes:
        return torch.empty(ref.shape, dtype=dtype)
    if ref.dtype in tensorrefs.NUMPY_DTYPES or ref.dtype == "bfloat16":
        count = ref.nbytes // tensorrefs.ITEMSIZES[ref.dtype]
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=ref.offset).view(ref.shape)
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=ref.nbytes, offset=ref.offset)
    return raw.view(dtype).view(ref.shape)


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _plain_subclasses() -> tuple[type, ...]:
    """Subclasses of Tensor that only mark a role inside a module."""
    torch = sys.modules["torch"]
    return (torch.nn.Parameter, torch.nn.Buffer)
