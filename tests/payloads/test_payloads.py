"""Values that travel: round trips, refusals, what stays shared, and garbage."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.errors import ProtocolError, ValueRefused
from stage_runtime.payloads import checking, encoding, fingerprints, isolating, pack
from stage_runtime.rules.flow import streams
from stage_runtime.wire import tensorrefs, values
from stage_runtime.wire.tensorrefs import TensorRef
from stage_runtime.wire.values import RawTensor, message
from tests.thoroughness import examples

TORCH_DTYPES = [getattr(torch, name) for name in tensorrefs.ITEMSIZES]


@message
class Turn(msgspec.Struct):
    who: str
    hidden: object = None
    notes: list[Any] = []


class Stranger(msgspec.Struct):
    x: int


@dataclasses.dataclass
class Box:
    x: int


def travel(value: Any, **options: Any) -> Any:
    """There and back, as a relay would carry it."""
    extracted = encoding.extract(value)
    flat = extracted.flat()
    assert len(flat) == extracted.nbytes
    return encoding.restore(extracted.value_bytes, extracted.refs, memoryview(bytearray(flat)), **options)


def packed(extracted: pack.Extracted) -> pack.Pack:
    assert extracted.pack is not None
    return extracted.pack


def same(a: Any, b: Any) -> bool:
    """Equal, of the same types and laid out alike, all the way down."""
    if type(a) is not type(b):
        return False
    match a:
        case torch.Tensor():
            return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
        case np.ndarray():
            return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
        case dict():
            return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
        case list():
            return len(a) == len(b) and all(map(same, a, b))
        case msgspec.Struct():
            return all(same(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
        case float():
            return a == b or (a != a and b != b)
    return bool(a == b)


def alike(a: Any, b: Any) -> bool:
    """The `same`, and nothing that code can ask of them tells them apart: layout, flags, what stands there twice."""
    seen: dict[int, int] = {}

    def look(a: Any, b: Any) -> bool:
        match a:
            case torch.Tensor() | np.ndarray():
                assert seen.setdefault(id(a), id(b)) == id(b)
                assert traits(a) == traits(b)
            case dict():
                assert all(look(a[key], b[key]) for key in a)
            case list():
                assert all(map(look, a, b))
            case msgspec.Struct():
                assert all(look(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
        return True

    return same(a, b) and look(a, b)


def traits(one: Any) -> tuple[object, ...]:
    if isinstance(one, np.ndarray):
        return one.flags.c_contiguous, one.flags.writeable, one.dtype.isnative
    bits = one.requires_grad, one.is_inference(), one.is_conj(), one.is_neg()
    return type(one), one.is_contiguous(), bits, vars(one)


def raw(tensor: torch.Tensor) -> list[Any]:
    """Its bytes, read element by element through its strides."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    same_size = tensor.view(words[tensor.dtype.itemsize])
    return (
        [repr(item) for item in torch.view_as_real(same_size).flatten().tolist()]
        if same_size.is_complex()
        else (same_size.flatten().tolist())
    )


def tensor_of(dtype: Any, shape: tuple[int, ...], layout: str = "plain") -> torch.Tensor:
    """A tensor of any dtype, its bytes counting up."""
    count = 1
    for size in shape:
        count *= size
    size = count * dtype.itemsize
    flat = (torch.arange(size) % 2 if dtype == torch.bool else torch.arange(size) % 251).to(torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental, whenever one is made
        tensor = flat.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
    match layout:
        case "transposed" if tensor.ndim >= 2:
            return tensor.transpose(0, 1)
        case "strided" if tensor.ndim and tensor.shape[0] > 1:
            return tensor[::2]
        case "offset" if tensor.ndim and tensor.shape[0] > 1:
            return tensor[1:]
        case "expanded" if tensor.ndim and tensor.shape[0]:
            return tensor[:1].expand(3, *tensor.shape[1:])
    return tensor


tensors = st.builds(
    tensor_of,
    st.sampled_from(TORCH_DTYPES),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from(["plain", "transposed", "strided", "offset", "expanded"]),
)


def array_of(dtype: Any, shape: tuple[int, ...], layout: str) -> np.ndarray[Any, Any]:
    array = (np.arange(int(np.prod(shape))) % 7).astype(dtype).reshape(shape)
    match layout:
        case "F":
            return np.asfortranarray(array).reshape(shape)  # which makes one dimension of none
        case "strided" if shape:
            return array[::2]
        case "backwards" if shape:
            return array[::-1]
        case "broadcast":
            return np.broadcast_to(array, (2, *shape))
    return array


arrays = st.builds(
    array_of,
    st.sampled_from(sorted(tensorrefs.NUMPY_DTYPES - {"bool"})),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from(["C", "F", "strided", "backwards", "broadcast"]),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(max_size=40)
    | st.binary(min_size=1, max_size=2).map(lambda seed: seed * 20_000)
)
anything = st.recursive(
    plain | tensors | arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(texts, inner, max_size=4)
        | st.builds(Turn, texts, inner, st.lists(inner, max_size=2))
    ),
    max_leaves=12,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=examples(150), deadline=None)
@given(anything)
def test_any_value_arrives_as_it_was_sent(value: Any) -> None:
    assert same(travel(value), value)


@pytest.mark.proves("placement")
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=examples(80), deadline=None)
@given(anything, st.booleans())
def test_a_value_is_the_same_in_process_and_from_afar(value: Any, twice: Any) -> None:
    value = [value, value] if twice else value
    assert alike(isolating.isolate(value), travel(value))


@pytest.mark.proves("placement")
def test_how_a_tensor_was_made_is_the_same_in_process_and_from_afar() -> None:
    """Its mode, role, gradient, attributes: what a stage sees must not depend on where the sender stands."""
    marked = torch.ones(3)
    marked.note = "of the sender's"  # type: ignore[attr-defined]
    with torch.inference_mode():
        inferred = torch.ones(2, 3)
    z = torch.randn(3, dtype=torch.complex64)
    values = [marked, inferred, inferred.T, torch.nn.Parameter(torch.ones(3), requires_grad=False)]
    values += [torch.nn.Parameter(torch.ones(2, 3)).T, z.conj(), z.conj().imag, torch.ones(4, 3)[:, 1]]
    for value in values:
        assert alike(isolating.isolate([value, value]), travel([value, value]))
    torch.nn.Linear(3, 2)(isolating.isolate(inferred))  # autograd refuses tensors of the inference mode
    shared = torch.ones(2, 3)
    isolating.isolate(shared).t_()  # in place, but not of the sender's object
    assert shared.shape == (2, 3)


@pytest.mark.parametrize("levels", [checking.MAX_DEPTH - 1, checking.MAX_DEPTH, checking.MAX_DEPTH + 1])
def test_a_value_may_be_as_deep_in_process_as_from_afar(levels: int) -> None:
    value: Any = 1
    for _ in range(levels):
        value = [value]

    def refused(way: Callable[[], Any]) -> str | None:
        try:
            way()
        except ValueRefused as error:
            return str(error)
        return None

    inside = refused(lambda: isolating.isolate(value, where="payload.data"))
    apart = refused(lambda: encoding.extract({"data": value}, where="payload", as_fields=True))
    assert inside == apart and (inside is None) == (levels <= checking.MAX_DEPTH)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (3, 5)], ids=str)
@pytest.mark.parametrize("layout", ["plain", "transposed", "strided", "expanded"])
def test_every_dtype_and_layout_of_torch_arrives(dtype: Any, shape: tuple[int, ...], layout: str) -> None:
    tensor = tensor_of(dtype, shape, layout)
    assert same(travel({"t": tensor})["t"], tensor)


def test_every_dtype_that_torch_has_travels_but_for_quantised_ones() -> None:
    named = {item for name in dir(torch) if isinstance(item := getattr(torch, name), torch.dtype)}
    quantised = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    assert named - quantised == set(TORCH_DTYPES)


def test_gradients_and_lazy_conjugates_are_left_behind() -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    z = torch.randn(3, dtype=torch.complex64)
    arrived = travel([weight, z.conj(), z.conj().imag])
    assert same(arrived, [weight.detach(), z.conj().resolve_conj(), z.conj().imag.resolve_neg()])
    assert [type(one) for one in isolating.isolate([weight])] == [torch.Tensor]


def test_arrays_of_the_other_byte_order_arrive_in_ours() -> None:
    big = np.arange(5, dtype=">i4")
    for arrived in (travel(big), isolating.isolate(big)):
        assert arrived.dtype == np.dtype("int32") and arrived.dtype.isnative
        assert arrived.tolist() == [0, 1, 2, 3, 4]


def test_tensors_are_views_of_one_buffer_and_arrays_cannot_be_written() -> None:
    extracted = encoding.extract({"t": torch.zeros(4), "a": np.zeros(4)})
    buffer = bytearray(extracted.flat())
    arrived = encoding.restore(extracted.value_bytes, extracted.refs, buffer)
    arrived["t"][0] = 1.0
    assert bytes(buffer).count(0) < len(buffer)
    with pytest.raises(ValueError, match="read-only"):
        arrived["a"][0] = 1


def test_parts_begin_at_multiples_of_64_and_the_largest_comes_first() -> None:
    extracted = encoding.extract([np.zeros(3, np.uint8), torch.zeros(100), torch.zeros(7)])
    assert [ref.offset % 64 for ref in extracted.refs] == [0, 0, 0]
    assert extracted.refs[1].offset == 0
    assert [len(part) for part in packed(extracted).parts] == [400, 28, 3]


def test_contiguous_tensors_are_not_copied_by_extraction() -> None:
    tensor = torch.zeros(1000)
    extracted = encoding.extract(tensor)
    tensor[0] = 7.0
    assert packed(extracted).parts[0][:4] == np.float32(7).tobytes()


def test_the_same_object_twice_is_packed_once_and_arrives_as_one() -> None:
    tensor, blob, array = torch.randn(300), b"x" * 20_000, np.zeros(300)
    value = {"a": [tensor, blob, array], "b": [tensor, blob, array]}
    assert len(encoding.extract(value).refs) == 3
    arrived = travel(value)
    assert all(one is other for one, other in zip(arrived["a"], arrived["b"], strict=True))


def test_two_objects_on_one_memory_are_packed_once_and_arrive_as_two() -> None:
    """A stage that passes on what it got: its request holds the same tensor as another object."""
    given = torch.arange(8192, dtype=torch.int32)
    value = {"request": given, "data": given.detach(), "half": given[:4096], "array": given.numpy()}
    extracted = encoding.extract(value)
    assert [len(part) for part in packed(extracted).parts] == [given.nbytes, given.nbytes // 2]
    flat = pack.flatten(packed(extracted))
    restored = encoding.restore(extracted.value_bytes, extracted.refs, bytearray(flat))
    assert restored["request"] is not restored["data"]
    assert torch.equal(restored["request"], given) and torch.equal(restored["data"], given)
    assert np.array_equal(restored["array"], given.numpy())
    assert torch.equal(restored["half"], given[:4096])


def test_a_long_value_is_a_part_itself() -> None:
    value = {"words": ["word"] * 20_000, "t": torch.ones(3)}
    extracted = encoding.extract(value)
    assert extracted.value_bytes == b"" and extracted.refs[-1].kind == "value" and not extracted.is_inline
    assert same(travel(value), value)


@pytest.mark.parametrize("nbytes", [16_384, 16_385])
def test_bytes_over_16_kib_become_a_part(nbytes: int) -> None:
    extracted = encoding.extract({"blob": b"x" * nbytes})
    assert [ref.kind for ref in extracted.refs if ref.kind == "bytes"] == ([] if nbytes == 16_384 else ["bytes"])


def test_small_payloads_ride_inline_and_large_ones_do_not() -> None:
    assert encoding.extract({"n": 1}).is_inline
    assert encoding.extract({"t": torch.zeros(16_384)}).is_inline
    assert not encoding.extract({"t": torch.zeros(20_000)}).is_inline


def test_paths_of_parts_are_said_as_python_would() -> None:
    value = {"cache": [Turn("a", hidden=torch.zeros(1))]}
    assert [ref.path for ref in encoding.extract(value).refs] == ["payload.data['cache'][0].hidden"]
    named = encoding.extract({"inputs": {"x": torch.zeros(1)}}, where="payload", as_fields=True)
    assert [ref.path for ref in named.refs] == ["payload.inputs['x']"]


def test_without_torch_tensors_arrive_raw_and_can_be_sent_on() -> None:
    value = {"t": torch.arange(6).view(2, 3), "a": np.arange(3, dtype="int16")}
    arrived = travel(value, torch=False)
    assert [(raw.dtype, raw.shape, raw.kind) for raw in arrived.values()] == [
        ("int64", (2, 3), "torch"),
        ("int16", (3,), "numpy"),
    ]
    assert isinstance(arrived["t"], RawTensor)
    assert same(travel(arrived), value)


def test_a_read_only_buffer_is_copied_once_rather_than_warned_about() -> None:
    extracted = encoding.extract({"t": torch.ones(3), "u": torch.ones(5)})
    arrived = encoding.restore(extracted.value_bytes, extracted.refs, extracted.flat())
    arrived["t"][0] = 2.0
    assert arrived["u"].tolist() == [1.0] * 5


def test_an_unknown_struct_arrives_as_the_dict_of_its_fields() -> None:
    extracted = encoding.extract(Turn("me", hidden=[1]))
    renamed = extracted.value_bytes.replace(b"test_payloads:Turn", b"test_payloads:Twin")
    assert renamed != extracted.value_bytes
    assert encoding.restore(renamed, [], None) == {"who": "me", "hidden": [1], "notes": []}


def test_fields_that_our_version_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    @message
    class Grown(msgspec.Struct):
        a: int
        b: int = 0

    class Shrunk(msgspec.Struct):
        a: int

    extracted = encoding.extract(Grown(1, 2))
    monkeypatch.setitem(values.REGISTRY, values.message_name(Grown), Shrunk)
    assert encoding.restore(extracted.value_bytes, [], None) == Shrunk(1)


def nested() -> Any:
    with warnings.catch_warnings(action="ignore"):  # torch calls it a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def freed() -> Any:
    """A weight that a sharding library has taken away."""
    tensor = torch.zeros(100_000)
    tensor.untyped_storage().resize_(0)
    return tensor


class Unprintable:
    def __repr__(self) -> str:
        raise SystemExit("no words")


@pytest.mark.proves("unsendable-value")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"cache": {"x": (1, 2)}}, "payload.data['cache']['x']: tuple: use a list"),
        ([{1, 2}], "payload.data[0]: set: use a list"),
        ({"a": {1: 2}}, "payload.data['a']: int key 1: use str keys"),
        ({"a": Box(1)}, "payload.data['a']: dataclass Box: use a dict, or a msgspec.Struct with @omni.message"),
        (object(), "payload.data: object of type object: use plain values"),
        ({"n": 2**64}, "payload.data['n']: int of 65 bits: use at most 64, or a str"),
        ({"n": [-(2**63) - 1]}, "payload.data['n'][0]: int of 65 bits with its sign: use at most 64, or a str"),
        ({"s": "\ud800"}, "payload.data['s']: str with a lone surrogate"),
        ({"\ud800": 1}, "payload.data: str with a lone surrogate"),
        ({"x": np.float64(1)}, "payload.data['x']: numpy scalar float64: use .item()"),
        ({"x": np.array(["a"])}, "payload.data['x']: numpy array of <U1: convert it to a number type"),
        ({"x": np.array([object()])}, "numpy array of object"),
        ({"x": np.ma.masked_array([1])}, "array subclass MaskedArray: send numpy.asarray(...) of it"),
        ({"x": datetime.datetime(2020, 1, 1)}, "object of type datetime"),
        ({"x": bytearray(b"x")}, "payload.data['x']: bytearray: use bytes(...)"),
        ({"x": Stranger(1)}, "payload.data['x']: Struct Stranger: register its type with @omni.message"),
        (Turn("x", hidden=[(1,)]), "payload.data.hidden[0]: tuple: use a list"),
        (Turn("x", hidden=2**70), "payload.data.hidden: int of 71 bits"),
        ({"x": torch.empty(2, device="meta")}, "payload.data['x']: meta tensor: it has no data"),
        ({"x": torch.eye(2).to_sparse()}, "payload.data['x']: sparse tensor: send .to_dense()"),
        ({"x": nested()}, "payload.data['x']: nested tensor: send a"),
        (
            {"x": values.StagePayload(request=values.OmniRequest(id="r"))},
            "payload.data['x']: the payload itself: use its .data",
        ),
        ({"x": torch.float32}, "object of type dtype"),
        (
            {"x": torch.zeros(1).expand(2**40)},
            "payload.data['x']: view that repeats 4 bytes of memory, 4398046511104 as",
        ),
        ({"x": torch.zeros(9).as_strided((2**32, 9), (0, 1))}, "view that repeats 36 bytes of memory"),
        ({"x": np.broadcast_to(np.zeros(1), 2**40)}, "payload.data['x']: view that repeats 8 bytes of memory"),
        ({"x": np.lib.stride_tricks.sliding_window_view(np.zeros(2**15), 2**14)}, "view that repeats 262144 bytes"),
        ({"x": freed()}, "payload.data['x']: tensor whose storage was freed: it has no data"),
        ({"x": torch.zeros([0] * 65)}, "payload.data['x']: tensor of 65 dimensions: use at most 64"),
        ({Unprintable(): 1}, "payload.data: Unprintable key <Unprintable, whose text cannot be had: SystemExit>: use"),
    ],
    ids=lambda case: case[-50:] if isinstance(case, str) else "",
)
def test_what_cannot_travel_is_refused_on_every_way_with_its_path_and_the_cure(value: Any, words: Any) -> None:
    for way in (encoding.extract, isolating.isolate):
        with pytest.raises(ValueRefused) as caught:
            way(value)
        assert words in str(caught.value)


def test_a_view_that_repeats_its_memory_travels_as_a_copy() -> None:
    for view in (torch.arange(3).expand(4, 3), np.broadcast_to(np.arange(3), (4, 3))):
        assert same(travel({"x": view}), {"x": view})


def test_a_subclass_of_a_plain_type_is_refused_with_the_plain_one() -> None:
    class Name(str):
        __slots__ = ()

    for value, cure in [(Name("x"), "use str(...)"), ({}.__class__.__subclasses__()[0](), "use dict(...)")]:
        with pytest.raises(ValueRefused, match=cure.replace("(...)", "")):
            encoding.extract([value])


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    for way in (encoding.extract, isolating.isolate):
        with pytest.raises(ValueRefused, match="deeper than 64 levels"):
            way(loop)


def test_64_levels_travel() -> None:
    deep: Any = 1
    for _ in range(64):
        deep = [deep]
    assert travel(deep) == deep
    with pytest.raises(ValueRefused):
        encoding.extract([deep])


ONE_LARGE_ARRAY = np.zeros(300_000)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"text": "short", "number": 1},
        np.zeros(200_000),
        np.zeros((400, 1000))[:, ::2],
        {"deep": [{"tensor": torch.zeros(100_000)}]},
        {"twice": [ONE_LARGE_ARRAY, ONE_LARGE_ARRAY]},
        b"x" * 200_000,
        ["x" * 200_000],
        [0.5] * 50_000,
        [[0.5] * 500] * 100,
        values.Audio(np.zeros(100_000, np.float32), 16_000),
        RawTensor("float32", (50_000,), memoryview(bytes(200_000)).cast("f")),  # type: ignore[arg-type]
    ],
)
def test_an_isolated_value_weighs_in_a_window_what_one_that_travels_weighs(value: Any) -> None:
    isolation = isolating.Isolation()
    isolation.run(value, "chunk.data")
    assert streams.weight(isolation.nbytes) == streams.weight(encoding.extract(value).nbytes)


def test_isolated_containers_are_fresh_and_tensors_shared() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    value: dict[str, Any] = {"list": [1, {"t": tensor}], "turn": Turn("x", notes=[array])}
    apart = isolating.isolate(value)
    assert same(apart, value)
    apart["list"][1]["new"] = 1
    apart["turn"].notes.append(2)
    assert list(value["list"][1]) == ["t"] and len(value["turn"].notes) == 1
    assert apart["list"][1]["t"].data_ptr() == tensor.data_ptr()
    assert np.shares_memory(apart["turn"].notes[0], array) and not apart["turn"].notes[0].flags.writeable
    assert array.flags.writeable


def test_fingerprints_name_what_was_written() -> None:
    value: dict[str, Any] = {"t": torch.zeros(3), "u": [torch.zeros(3, dtype=torch.bfloat16), np.zeros(2)]}
    found = fingerprints.fingerprint(value)
    assert found.written() == []
    value["u"][0][1] = 5
    value["u"][1][0] = 1
    value["more"] = object()  # the container is its owner's
    assert found.written() == ["payload.data['u'][0]", "payload.data['u'][1]"]
    assert found.written() == []


@pytest.mark.parametrize("keep", ["t", "a"])
def test_a_restored_view_alone_keeps_the_buffer_alive_and_its_death_is_seen_at_once(keep: Any) -> None:
    extracted = encoding.extract({"t": torch.zeros(4), "a": np.zeros(4), "deep": Turn("x", hidden=torch.ones(2))})
    owner = np.ndarray((extracted.nbytes,), np.uint8, bytearray(extracted.flat()))
    seen = weakref.ref(owner)
    gc.disable()  # no cycle may be needed to see it
    try:
        arrived = encoding.restore(extracted.value_bytes, extracted.refs, owner.data)
        del owner
        view = arrived[keep]
        del arrived
        assert seen() is not None
        part = view[1:]
        del view
        assert seen() is not None
        del part
        assert seen() is None
    finally:
        gc.enable()


@settings(max_examples=examples(300), deadline=None)
@given(
    value=st.binary(max_size=60),
    buffer=st.binary(max_size=200),
    refs=st.lists(
        st.builds(
            TensorRef,
            st.just("x"),
            st.lists(st.integers(-2, 5), max_size=3).map(tuple),
            st.sampled_from([*tensorrefs.ITEMSIZES, "object", ""]),
            st.integers(-5, 210),
            st.integers(-5, 210),
            st.sampled_from(["torch", "numpy", "bytes", "value", "other"]),
        ),
        max_size=3,
    ),
    torch=st.booleans(),
)
def test_garbage_is_restored_or_refused_and_nothing_else(value: Any, buffer: Any, refs: Any, torch: Any) -> None:
    try:
        encoding.restore(value, refs, buffer, torch=torch)
    except ProtocolError:
        pass


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_a_damaged_payload_is_restored_or_refused_and_nothing_else(data: Any) -> None:
    extracted = encoding.extract({"t": torch.zeros(5), "s": Turn("x", hidden=np.zeros(2)), "b": b"x" * 17_000})
    damaged = bytearray(extracted.value_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        encoding.restore(bytes(damaged), extracted.refs, extracted.flat())
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "bytes_",
    [
        msgspec.msgpack.encode(msgspec.msgpack.Ext(1, (9).to_bytes(4, "big"))),  # no such part
        msgspec.msgpack.encode(msgspec.msgpack.Ext(7, b"")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(2, b"")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(2, msgspec.msgpack.encode([[], {}]))),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\xc0",
        b"",
        b"\xc0\xc0",
    ],
)
def test_a_forged_value_is_refused(bytes_: bytes) -> None:
    with pytest.raises(ProtocolError):
        encoding.restore(bytes_, [], None)


@pytest.fixture
def deep_python() -> Iterator[None]:
    """torch's compiler raises the interpreter's limit of recursion; so may an author's library."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(3000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("deep_python")
def test_structs_nested_without_end_are_refused() -> None:
    body = b"\xc0"
    for _ in range(400):
        body = msgspec.msgpack.encode(msgspec.msgpack.Ext(2, msgspec.msgpack.encode(["x", {"y": msgspec.Raw(body)}])))
    with pytest.raises(ProtocolError):
        encoding.restore(body, [], None)


class Colour(str, enum.Enum):  # noqa: UP042 - its str() is not its value
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Plain(enum.Enum):
    ONE = 1


@pytest.mark.parametrize("value", [Colour.RED, Level.HIGH, Plain.ONE])
def test_an_enum_is_refused_with_its_value_as_the_cure(value: Any) -> None:
    for way in (encoding.extract, isolating.isolate):
        with pytest.raises(
            ValueRefused, match=rf"^payload\.data\['c'\]: {type(value).__name__}, an Enum: use \.value$"
        ):
            way({"c": value})


class Cloned:
    """Something of an author's with methods as tensors and arrays have."""

    def clone(self) -> dict[str, int]:
        return {"a": 1}


LOOP: list[Any] = []
LOOP.extend([LOOP, LOOP])


@pytest.mark.parametrize(
    "value", [collections.OrderedDict(a=1), collections.UserDict(a=1), collections.Counter("a"), Cloned(), LOOP]
)
def test_a_copy_of_what_may_not_travel_may_not_travel_either(value: Any) -> None:
    with pytest.raises(ValueRefused) as given:
        encoding.extract(value)
    with pytest.raises(ValueRefused) as copied:
        encoding.extract(values.detached(value))
    assert copied.value.problem == given.value.problem
