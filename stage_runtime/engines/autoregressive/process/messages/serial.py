"""Values with tensors and arrays as frames of one message, and back. MessagePack alone: nothing is pickled.

Two ways for the bytes of a tensor: below `INLINE_BELOW` in the first frame; else as a frame of its own, which is sent
from the tensor's memory and read in place by the receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np

from stage_runtime.errors import ProtocolError, ValueRefused
from stage_runtime.payloads import tensors
from stage_runtime.wire import tensorrefs
from stage_runtime.wire.tensorrefs import TensorRef

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview

INLINE_BELOW: Final = 256  # bytes; a frame of its own costs about as much as copying some hundred bytes
TENSOR: Final = 1  # code of the MessagePack extension
FRAMES_MOST: Final = 4096  # of one message
MISREAD: Final = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError, ProtocolError)


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """place: the bytes, or the number of a frame."""

    kind: tensorrefs.TensorKind
    dtype: str
    shape: tuple[int, ...]
    place: bytes | int


class MsgpackEncoder:
    """Not for several threads at once."""

    def __init__(self, *, inline_below: int = INLINE_BELOW) -> None:
        self._inline_below = inline_below
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)
        self._parts = msgspec.msgpack.Encoder()
        self._aux: list[Buffer] = []

    def encode(self, value: Any) -> list[Buffer]:
        """The frames of ``value``. Frames after the first are its tensors' memory: not to be written until sent.

        Raises: ValueRefused: it cannot be encoded.
        """
        return self.encode_into(value, bytearray())

    def encode_into(self, value: Any, buffer: bytearray) -> list[Buffer]:
        """The same as `encode`; the first frame is ``buffer``, written from its start and cut to the message."""
        aux: list[Buffer] = [buffer]
        self._aux = aux
        try:
            self._encoder.encode_into(value, buffer)
        except (TypeError, ValueError, OverflowError, RecursionError, UnicodeEncodeError) as error:
            raise ValueRefused(type(value).__name__, str(error)) from error
        finally:
            self._aux = []
        return aux

    def _hook(self, value: Any) -> msgspec.msgpack.Ext:
        if tensors.is_tensor(value):
            problem = tensors.tensor_problem(value)
            dtype, shape = tensors.tensor_dtype(value), tuple(value.shape)
            kind: tensorrefs.TensorKind = "torch"
        elif isinstance(value, np.ndarray):
            problem = tensors.array_problem(value)
            dtype, shape, kind = value.dtype.name, value.shape, "numpy"
        else:
            raise TypeError(f"a {type(value).__name__} cannot be sent")
        if problem is not None:
            raise TypeError(problem)
        data, _copied = tensors.tensor_bytes(value) if kind == "torch" else tensors.array_bytes(value)
        part = _Part(kind, dtype, shape, self._place(data))
        return msgspec.msgpack.Ext(TENSOR, self._parts.encode(part))

    def _place(self, data: memoryview) -> bytes | int:
        if len(data) < self._inline_below:
            return bytes(data)
        if len(self._aux) >= FRAMES_MOST:
            raise ValueError(f"more than {FRAMES_MOST} tensors in one message")
        self._aux.append(data)
        return len(self._aux) - 1


class MsgpackDecoder(Generic[T]):
    """Decodes values of one type. Not for several threads at once."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, ext_hook=self._hook)
        self._part = msgspec.msgpack.Decoder(_Part)
        self._frames: Sequence[Buffer] = ()

    def decode(self, frames: Sequence[Buffer]) -> T:
        """Raises: ProtocolError: the frames are not such a value."""
        if not 0 < len(frames) <= FRAMES_MOST:
            raise ProtocolError(f"a message of {len(frames)} frames")
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except ProtocolError:
            raise
        except MISREAD as error:
            raise ProtocolError(f"no message: {error}") from error
        finally:
            self._frames = ()

    def _hook(self, code: int, data: memoryview) -> Any:
        if code != TENSOR:
            raise ProtocolError(f"unknown extension {code}")
        part = self._part.decode(data)
        if part.kind not in ("torch", "numpy"):
            raise ProtocolError(f"a tensor of kind {part.kind!r}")
        buffer, own = self._buffer(part.place)
        (ref,) = tensorrefs.validated([TensorRef("", part.shape, part.dtype, 0, len(buffer), part.kind)], len(buffer))
        if part.kind == "torch" and not own:  # torch takes no read-only memory
            buffer = memoryview(bytearray(buffer))
        return tensors.restored(ref, buffer, torch=True)

    def _buffer(self, place: bytes | int) -> tuple[memoryview, bool]:
        """The bytes, and whether they may be written."""
        if isinstance(place, bytes):
            return memoryview(bytearray(place)), True
        if not 0 < place < len(self._frames):
            raise ProtocolError(f"a tensor in frame {place} of {len(self._frames)}")
        found = memoryview(self._frames[place]).cast("B")
        return found, not found.readonly
