"""Tensors and arrays as flat bytes, and back: the only module that calls torch and numpy.

Knows nothing of containers, paths or transports (`checking`, `payloads`). Torch is never imported to look at a value:
a tensor can't exist in a process that has not imported it. Code that makes one names its device: an author's code may
have set a default.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, Final

import msgspec
import numpy as np

from stage_runtime.payloads import buffers
from stage_runtime.wire import tensorrefs
from stage_runtime.wire.tensorrefs import TensorRef
from stage_runtime.wire.values import RawTensor

EMPTY = memoryview(b"")
#: Bytes of a view that repeats its memory (expand, broadcast_to, sliding windows). It travels as a copy, and a larger
#: one would take the machine's memory before anybody could refuse it.
REPEATED_MOST: Final = 1 << 30


class FlatPart(msgspec.Struct, eq=False):
    """One tensor, array or long bytes on its way into a pack."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: tensorrefs.TensorKind
    data: memoryview
    owner: Any  #: The object itself: while it lives, its id is not given to another.
    private: bool  #: ``data`` is not written any more.
    device: str = tensorrefs.HOST  #: The device where it lies.
    on_device: Any = None  #: The bytes of a part that lies on a GPU, as a flat tensor; ``data`` is empty.


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def flat(tensor: Any) -> tuple[tuple[int, ...], str, memoryview] | None:
    """Shape, dtype and bytes of the usual tensor, one that is contiguous in main memory, at as few calls into torch as
    possible: each costs most when a stage has just been woken. None: `tensor_problem` and `tensor_bytes` look closer.
    """
    torch = sys.modules["torch"]
    if type(tensor) is not torch.Tensor:
        return None
    dtype = tensor.dtype
    try:
        array = (tensor.view(torch.int16) if dtype is torch.bfloat16 else tensor).numpy()
    except (RuntimeError, TypeError, ValueError):  # elsewhere, sparse, quantised, lazy, with gradient; numpy lacks it
        return None
    if not array.nbytes or not array.flags.c_contiguous or tensor.untyped_storage().nbytes() < array.nbytes:
        return None
    return array.shape, _dtype_name(dtype), buffers.view(array.reshape(-1).view(np.uint8))


def tensor_problem(tensor: Any) -> str | None:
    """Why a torch tensor cannot be encoded, with the cure; None when it can."""
    torch = sys.modules["torch"]
    if type(tensor) is not torch.Tensor and type(tensor) not in _plain_subclasses():
        return f"tensor subclass {type(tensor).__name__}: send a plain tensor"
    if tensor.is_nested:
        return "nested tensor: send a list of .unbind(), or .to_padded_tensor(...)"
    if tensor.layout != torch.strided:
        return "sparse tensor: send .to_dense()"
    if tensor.is_quantized:
        return "quantised tensor: send .int_repr() and its scale, or .dequantize()"
    if tensor.device.type == "meta":
        return "meta tensor: it has no data"
    if tensor.dim() > tensorrefs.MAX_DIMENSIONS:
        return f"tensor of {tensor.dim()} dimensions: use at most {tensorrefs.MAX_DIMENSIONS}"
    held, nbytes = tensor.untyped_storage().nbytes(), tensor.nbytes
    if held < nbytes:  # it repeats elements, or has none: torch returns arbitrary memory for the second
        if not held:
            return "tensor whose storage was freed: it has no data"
        if nbytes > REPEATED_MOST:
            return _repeated(held, nbytes)
    return None


def tensor_dtype(tensor: Any) -> str:
    return _dtype_name(tensor.dtype)


def plain_tensor(tensor: Any) -> Any:
    """A tensor on the same memory, as one arrives from afar: fresh, contiguous, without gradient, inference mode,
    conjugate and negative bits, a role in a module or attributes. A copy where its layout or bits ask for one.
    """
    tensor = _contiguous(_resolved(tensor))
    return _normal(tensor) if tensor.is_inference() else tensor.detach()


def _resolved(tensor: Any) -> Any:
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def _contiguous(tensor: Any) -> Any:
    if tensor.is_contiguous():
        return tensor
    return _as_words(tensor).contiguous().view(tensor.dtype)


def _as_words(tensor: Any) -> Any:
    """The same elements as a dtype that numpy has, and that torch itself can copy."""
    if _dtype_name(tensor.dtype) in tensorrefs.NUMPY_DTYPES:
        return tensor
    torch = sys.modules["torch"]
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def _normal(tensor: Any) -> Any:
    """Autograd refuses inference tensors, and a stage must not see in which mode another one computes."""
    torch = sys.modules["torch"]
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def tensor_bytes(tensor: Any) -> tuple[memoryview, bool]:
    """The C-contiguous bytes of a tensor: its own memory where it is contiguous and on the CPU, else a copy (True)."""
    copied = tensor.is_conj() or tensor.is_neg()
    tensor = _resolved(tensor)
    if tensor.device.type != "cpu":
        copied = True
        tensor = host_copy(tensor)
    if not tensor.numel():
        return EMPTY, True
    tensor = _as_words(tensor)
    if not tensor.is_contiguous():
        copied = True
        tensor = tensor.contiguous()
    return buffers.view(tensor.numpy().reshape(-1).view(np.uint8)), copied


def device_bytes(tensor: Any) -> Any:
    """The C-contiguous bytes of a tensor as a flat tensor on its device: its own memory where it is contiguous."""
    torch = sys.modules["torch"]
    flat = _as_words(_resolved(tensor)).contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # one element is contiguous with any stride, and keeps it in a view
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


def flat_bytes(data: bytes) -> Any:
    """A copy of bytes as a flat tensor of ``uint8``, in the host's memory."""
    return sys.modules["torch"].frombuffer(bytearray(data), dtype=sys.modules["torch"].uint8)


def host_bytes(flat: Any) -> memoryview:
    """A copy of what `device_bytes` gave, in the host's memory."""
    return buffers.view(host_copy(flat).numpy())


def host_copy(tensor: Any) -> Any:
    """A tensor of another device in the host's memory; of a GPU in pinned memory, into which it copies by itself."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def array_problem(array: np.ndarray[Any, Any]) -> str | None:
    """Why a numpy array cannot be encoded, with the cure; None when it can."""
    if type(array) is not np.ndarray:
        return f"array subclass {type(array).__name__}: send numpy.asarray(...) of it"
    if array.dtype.name not in tensorrefs.NUMPY_DTYPES:
        return f"numpy array of {array.dtype}: convert it to a number type, or send .tolist()"
    if array.nbytes > REPEATED_MOST:
        low, high = np.lib.array_utils.byte_bounds(array)
        if high - low < array.nbytes:
            return _repeated(high - low, array.nbytes)
    return None


def _repeated(held: int, nbytes: int) -> str:
    return f"view that repeats {held} bytes of memory, {nbytes} as a copy: send what it repeats"


def plain_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array as it arrives from afar, C-contiguous and in this machine's byte order; a copy where it is not."""
    if array.dtype.isnative and array.flags.c_contiguous:
        return array
    return array.astype(array.dtype.newbyteorder("="), order="C")


def array_bytes(array: np.ndarray[Any, Any]) -> tuple[memoryview, bool]:
    """The C-contiguous bytes of an array: its own memory where possible, else a copy (True)."""
    plain = plain_array(array)
    if not plain.size:
        return EMPTY, True
    return buffers.view(plain.reshape(-1).view(np.uint8)), plain is not array


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    view = plain_array(array).view()
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
    torch = sys.modules.get("torch") or importlib.import_module("torch")
    dtype = getattr(torch, ref.dtype)
    if not ref.nbytes:
        return torch.empty(ref.shape, dtype=dtype, device="cpu")
    if ref.dtype in tensorrefs.NUMPY_DTYPES or ref.dtype == "bfloat16":
        count = ref.nbytes // tensorrefs.ITEMSIZES[ref.dtype]
        tensor = torch.frombuffer(buffer, dtype=dtype, count=count, offset=ref.offset)
        return tensor if len(ref.shape) == 1 else tensor.view(ref.shape)
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=ref.nbytes, offset=ref.offset)
    return raw.view(dtype).view(ref.shape)


def restored_on_device(ref: TensorRef, flat: Any, offset: int) -> Any:
    """The tensor that a validated ``ref`` describes, a view of ``flat`` (bytes on a GPU) from ``offset`` on."""
    dtype = getattr(sys.modules["torch"], ref.dtype)
    return flat[offset : offset + ref.nbytes].view(dtype).view(ref.shape)


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _plain_subclasses() -> tuple[type, ...]:
    """Subclasses of Tensor that only mark a role inside a module."""
    torch = sys.modules["torch"]
    return (torch.nn.Parameter, torch.nn.Buffer)
