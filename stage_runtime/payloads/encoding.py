"""Values on their way: `extract` at the sender, `restore` at the receiver.

A value becomes MessagePack with placeholders, and flat parts (`pack`): its tensors, arrays and long bytes. The stage
layer knows which control message carries the rest. `checking` defines what may travel, here and between stages of one
process (`isolating`) alike, so a pipeline behaves the same wherever its stages stand.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from stage_runtime.errors import ProtocolError, ValueRefused
from stage_runtime.payloads import checking, isolating, tensors
from stage_runtime.payloads.pack import INLINE_NBYTES, Arrived, Extracted, packed, packed_with_device
from stage_runtime.payloads.tensors import FlatPart
from stage_runtime.wire import tensorrefs, values
from stage_runtime.wire.tensorrefs import TensorRef

# MessagePack extension codes.
PART: Final = 1  # data: the index of a TensorRef
STRUCT: Final = 2  # data: MessagePack of [registered name, {field: value}]

#: Structs inside each other; above what `checking` lets a sender send. torch raises Python's own limit.
MAX_STRUCTS: Final = 2 * checking.MAX_DEPTH

# A request goes along on every hop as the client sent it, while each stage gets containers of its own around it. A
# value that is sent on is kept beside them: the bytes that it came as; else a copy that is never passed on.
_ENCODED: Final = "_encoded"  #: `_EncodedRequest`
_ORIGINAL: Final = "_original"

_encoder: Final = msgspec.msgpack.Encoder()


def extract(value: Any, *, where: str = "payload.data", as_fields: bool = False) -> Extracted:
    """Check ``value`` and take it apart. Nothing is copied that is contiguous, in main memory or on a GPU.

    as_fields: ``value`` is a dict whose items are called ``where.name``; it is restored as a dict.
    Raises:    ValueRefused: something in it cannot be encoded; names its place and what to use instead.
    """
    walk = _Extraction(where)
    try:
        encoded = _encoder.encode(walk.run(value, where, as_fields=as_fields))
    except (OverflowError, UnicodeEncodeError) as error:
        isolating.isolate(value, where=where, as_fields=as_fields)  # checks every int and str, and names the place
        raise ValueRefused(where, str(error)) from error
    if not walk.parts and len(encoded) <= INLINE_NBYTES:
        return Extracted(encoded, (), None)
    return (packed_with_device if walk.on_device else packed)(encoded, walk.parts, where)


def payload(request: values.OmniRequest, data: tuple[()] | tuple[Any]) -> Extracted:
    """The same as `extract`, for a stage's payload. data: empty when it is the request's inputs."""
    known: _EncodedRequest | None = request.__dict__.get(_ENCODED)
    if known is not None and not known.parts and (not data or type(data[0]) in _Extraction.plain):
        # The short way of what needs no walk.
        with contextlib.suppress(OverflowError, UnicodeEncodeError):  # below, with its place
            extension = known.extension
            encoded = _encoder.encode({"request": extension, "data": data[0]} if data else {"request": extension})
            return Extracted(encoded, (), None) if len(encoded) <= INLINE_NBYTES else packed(encoded, [], "payload")
    fields = {"request": request, "data": data[0]} if data else {"request": request}
    return extract(fields, where="payload", as_fields=True)


def restore(
    value_bytes: bytes | memoryview,
    refs: Sequence[TensorRef],
    buffer: Any,
    on_device: Arrived | None = None,
    *,
    torch: bool = True,
) -> Any:
    """The value that `extract` took apart.

    buffer: the flat buffer, None or empty when ``refs`` are. Tensors and arrays are views of it and keep it alive.
    on_device: its end, when that lies on a GPU.
    torch:  False gives tensors and arrays as `RawTensor` and imports nothing.
    Raises: ProtocolError: the bytes are not such a value. Nothing from outside raises anything else.
    """
    try:
        if not refs:
            return _plain_decoder.decode(value_bytes)
        return _restore_parts(value_bytes, refs, buffer, on_device, torch)
    except ProtocolError:
        raise
    except Exception as error:  # whatever msgspec, numpy, torch or a Struct's own checks raise for garbage
        raise ProtocolError(f"payload cannot be restored: {type(error).__name__}: {str(error)[:200]}") from error


def received(request: values.OmniRequest) -> None:
    """Keep what is sent on of a request that has just come in, before a stage is given it."""
    if _ENCODED not in request.__dict__ and _ORIGINAL not in request.__dict__:
        request.__dict__[_ORIGINAL] = isolating.isolate(request)


def reissued(request: values.OmniRequest, where: str = "payload.request") -> values.OmniRequest:
    """The request for another stage of this process, as it would arrive from afar: `received`, containers fresh."""
    encoded: _EncodedRequest | None = request.__dict__.get(_ENCODED)
    if encoded is not None:
        return encoded.request()
    original = request.__dict__.get(_ORIGINAL)
    fresh: values.OmniRequest = isolating.isolate(original if original is not None else request, where=where)
    if original is not None:
        fresh.__dict__[_ORIGINAL] = original
    return fresh


class _EncodedRequest(msgspec.Struct, eq=False):
    """A request as it came: its bytes, and its parts if it has some, which are the first of the payload's."""

    extension: msgspec.msgpack.Ext
    parts: Sequence[tuple[TensorRef, memoryview]] = ()  #: Parts, each with the place where it lies.
    torch: bool = True  #: Its tensors are torch's.

    def request(self) -> values.OmniRequest:
        """The same again, with containers and tensors of its own."""
        refs = [msgspec.structs.replace(ref, offset=0) for ref, _ in self.parts]
        restored = [
            data.obj if ref.kind == "bytes" else tensors.restored(ref, data, torch=self.torch)
            for ref, (_, data) in zip(refs, self.parts, strict=True)
        ]
        again: values.OmniRequest = _structure(STRUCT, memoryview(self.extension.data), _Placeholders(restored))
        again.__dict__[_ENCODED] = self
        return again

    def flat_parts(self) -> list[FlatPart]:
        return [
            FlatPart(ref.path, ref.shape, ref.dtype, ref.kind, data, self, private=ref.kind == "bytes")
            for ref, data in self.parts
        ]


class _Extraction(checking.ValueWalk):
    """Replaces what travels as a part by a placeholder, and Structs by their extension."""

    plain = frozenset([type(None), bool, int, float, str])  # the encoder itself checks ints and strs
    walkers = {}

    __slots__ = ("on_device", "parts", "seen", "where")

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.on_device = False  #: Some part lies on a GPU.
        self.parts: list[FlatPart] = []
        self.seen: dict[int, msgspec.msgpack.Ext] = {}

    def walk_bytes(self, value: bytes) -> Any:
        if len(value) <= INLINE_NBYTES:
            return value
        return self._part(value, (len(value),), "uint8", "bytes", memoryview(value), True)

    def walk_struct(self, value: msgspec.Struct) -> Any:
        fields = self.struct_fields(value)
        return msgspec.msgpack.Ext(STRUCT, _encoder.encode((values.message_name(type(value)), fields)))

    def walk_request(self, value: values.OmniRequest) -> Any:
        """The request as it came, whatever was written into its containers since; one that an author made, as it is."""
        known: _EncodedRequest | None = value.__dict__.get(_ENCODED)
        if known is None:
            return self.walk_struct(value.__dict__.get(_ORIGINAL, value))
        if known.parts:
            if self.parts:  # its bytes count its own parts from the first on
                return self.walk_struct(known.request())
            self.parts = known.flat_parts()
        return known.extension

    def walk_tensor(self, value: Any) -> Any:
        known = self.seen.get(id(value))
        if known is not None:
            return known
        flat = tensors.flat(value)
        if flat is None:
            return super().walk_tensor(value)
        shape, dtype, data = flat
        return self._part(value, shape, dtype, "torch", data, False)

    def tensor(self, value: Any) -> Any:
        shape, dtype = tuple(value.shape), tensors.tensor_dtype(value)
        if value.device.type != "cuda" or not value.numel():
            return self._part(value, shape, dtype, "torch", *tensors.tensor_bytes(value))
        known = self._part(value, shape, dtype, "torch", tensors.EMPTY, False)
        part = self.parts[-1]
        part.device, part.on_device = str(value.device), tensors.device_bytes(value)
        self.on_device = True
        return known

    def array(self, value: np.ndarray[Any, Any]) -> Any:
        known = self.seen.get(id(value))
        if known is not None:
            return known
        return self._part(value, value.shape, value.dtype.name, "numpy", *tensors.array_bytes(value))

    def raw(self, value: values.RawTensor) -> Any:
        return self._part(value, value.shape, value.dtype, value.kind, memoryview(value.data).cast("B"), False)

    def _part(
        self,
        owner: Any,
        shape: tuple[int, ...],
        dtype: str,
        kind: tensorrefs.TensorKind,
        data: memoryview,
        private: bool,
    ) -> msgspec.msgpack.Ext:
        known = self.seen.get(id(owner))
        if known is None:
            path = checking.path_of(self.where, self.trail)[: tensorrefs.PATH_LIMIT]
            known = msgspec.msgpack.Ext(PART, len(self.parts).to_bytes(4, "big"))
            self.parts.append(FlatPart(path, shape, dtype, kind, data, owner, private))
            self.seen[id(owner)] = known
        return known


def _restore_parts(
    value_bytes: bytes | memoryview, refs: Sequence[TensorRef], buffer: Any, on_device: Arrived | None, torch: bool
) -> Any:
    view = memoryview(b"" if buffer is None else buffer)
    view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
    if on_device is not None:
        return _restore_with_device(value_bytes, refs, view, on_device, torch)
    tensorrefs.validated(refs, len(view))
    if torch and view.readonly and any(ref.kind == "torch" for ref in refs):
        view = memoryview(bytearray(view))  # torch knows no read-only tensors and would warn of every one
    encoded: bytes | memoryview = value_bytes
    if refs[-1].kind == "value":
        encoded = view[refs[-1].offset : refs[-1].offset + refs[-1].nbytes]
        refs = refs[:-1]
    restored = [tensors.restored(ref, view, torch=torch) for ref in refs]
    return msgspec.msgpack.decode(encoded, ext_hook=_IncomingValue(restored, refs, view, torch))


def _restore_with_device(
    value_bytes: bytes | memoryview, refs: Sequence[TensorRef], view: memoryview, on_device: Arrived, torch: bool
) -> Any:
    """Restore a buffer whose end lies on a GPU. A request with tensors is not kept as it came: they go on as
    tensors.
    """
    tensorrefs.validated(refs, on_device.start + len(on_device.flat))
    restored = []
    for ref in refs:
        if ref.nbytes and ref.offset >= on_device.start:
            if ref.device == tensorrefs.HOST or not torch:
                raise ProtocolError(f"tensor ref ({ref.path[:200]}): it is not of a GPU, and lies on one")
            restored.append(tensors.restored_on_device(ref, on_device.flat, ref.offset - on_device.start))
        elif ref.offset + ref.nbytes > len(view):
            raise ProtocolError(f"tensor ref ({ref.path[:200]}): it is not inside the host's {len(view)} bytes")
        elif ref.kind == "value":
            value_bytes = view[ref.offset : ref.offset + ref.nbytes]
        else:
            restored.append(tensors.restored(ref, view, torch=torch))
    return msgspec.msgpack.decode(value_bytes, ext_hook=_Placeholders(restored))


class _Placeholders:
    """The value of a placeholder. No closure: one that calls itself is a cycle, and would keep the views alive."""

    __slots__ = ("_restored",)

    def __init__(self, restored: list[Any]) -> None:
        self._restored = restored

    def __call__(self, code: int, data: memoryview) -> Any:
        return self._restored[int.from_bytes(data, "big")] if code == PART else _structure(code, data, self)


class _IncomingValue(_Placeholders):
    """The reader of a payload that comes in; keeps its request as it came."""

    __slots__ = ("_met", "_refs", "_torch", "_view")

    def __init__(self, restored: list[Any], refs: Sequence[TensorRef], view: memoryview, torch: bool) -> None:
        super().__init__(restored)
        self._refs = refs
        self._view = view
        self._torch = torch
        self._met: set[int] = set()  #: Parts that stood for something so far.

    def __call__(self, code: int, data: memoryview) -> Any:
        if code == PART:
            index = int.from_bytes(data, "big")
            self._met.add(index)
            return self._restored[index]
        first = not self._met
        found = _structure(code, data, self)
        # The parts of a request that comes first are the first ones; else its bytes cannot be sent on as they are.
        count = len(self._met)
        if first and type(found) is values.OmniRequest and self._met == set(range(count)):
            extension = msgspec.msgpack.Ext(STRUCT, bytes(data))
            found.__dict__[_ENCODED] = _EncodedRequest(extension, self._parts(count), self._torch)
        return found

    def _parts(self, count: int) -> list[tuple[TensorRef, memoryview]]:
        """The first parts, where they lie. The view is kept for tensors and arrays alone, which keep it anyway."""
        view = self._view
        return [
            (ref, memoryview(found) if ref.kind == "bytes" else view[ref.offset : ref.offset + ref.nbytes])
            for ref, found in zip(self._refs[:count], self._restored[:count], strict=True)
        ]


def _hook(code: int, data: memoryview) -> Any:
    found = _structure(code, data, _hook)
    if type(found) is values.OmniRequest:  # it came without parts, and goes on as it came
        found.__dict__[_ENCODED] = _EncodedRequest(msgspec.msgpack.Ext(STRUCT, bytes(data)))
    return found


_plain_decoder: Final = msgspec.msgpack.Decoder(ext_hook=_hook)


class _Nesting(threading.local):
    structs = 0  #: Structs around the one that this thread restores now.


_nesting: Final = _Nesting()


def _structure(code: int, data: memoryview, hook: Callable[[int, memoryview], Any]) -> Any:
    """A registered Struct; of a type that this process has not imported, the dict of its fields."""
    if code != STRUCT:
        raise ProtocolError(f"MessagePack extension {code} has no meaning here")
    if _nesting.structs >= MAX_STRUCTS:
        raise ProtocolError(f"more than {MAX_STRUCTS} Structs are inside each other")
    _nesting.structs += 1
    try:
        name, fields = msgspec.msgpack.decode(data, ext_hook=hook)
    finally:
        _nesting.structs -= 1
    kind = values.REGISTRY.get(name)
    if kind is None:
        return dict(fields)
    try:
        return kind(**fields)
    except TypeError:  # the sender's version has fields that ours has not
        known = kind.__struct_fields__
        return kind(**{key: item for key, item in fields.items() if key in known})


_Extraction.walkers.update(
    {
        dict: checking.ValueWalk.walk_dict,
        list: checking.ValueWalk.walk_list,
        bytes: _Extraction.walk_bytes,
        values.OmniRequest: _Extraction.walk_request,
    }
)
