"""A request goes on as it came, whatever stands beside it and whatever a stage has written into its containers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from stage_runtime.payloads import buffers, encoding, pack
from stage_runtime.relays.memory import pages
from stage_runtime.wire.values import OmniRequest

INPUTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a text": {"text": "x" * 20_000},
    "a tensor": {"t": torch.arange(5000)},
    "an array": {"a": np.arange(5000)},
    "bytes": {"b": bytes(20_000)},
    "one tensor twice": dict.fromkeys(("x", "y"), torch.ones(3)),
    "all": {"t": torch.arange(5000), "b": bytes(range(256)) * 100, "a": np.ones(7), "s": [1, {"k": "v"}]},
}
BESIDE: dict[str, Any] = {
    "left out": ...,
    "none": None,
    "a tensor": torch.ones(70_000),
    "two": [torch.ones(3), np.zeros(9)],
    "bytes": bytes(30_000),
}


def carried(fields: dict[str, Any]) -> tuple[pack.Extracted, dict[str, Any]]:
    extracted = encoding.extract(fields, where="payload", as_fields=True)
    buffer = memoryview(bytearray(extracted.flat()))
    restored = encoding.restore(extracted.value_bytes, extracted.refs, buffer)
    if "request" in restored:
        encoding.received(restored["request"])
    return extracted, restored


def fields_of(request: OmniRequest, data: Any, *, first: bool = True) -> dict[str, Any]:
    beside = {} if data is ... else {"data": data}
    return {"request": request, **beside} if first else {**beside, "request": request}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b) and a.dtype == b.dtype
    return bool(a == b)


@pytest.mark.parametrize("first", [True, False], ids=["request first", "request last"])
@pytest.mark.parametrize("data", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_a_request_is_the_same_after_three_hops_whatever_a_stage_wrote_into_it(
    inputs: Any, data: Any, first: bool
) -> None:
    request = OmniRequest(id="r", inputs=inputs)
    for _ in range(3):
        _, arrived = carried(fields_of(request, data, first=first))
        request = arrived["request"]
        assert equal(request.inputs, inputs)
        assert data is ... or equal(arrived["data"], data)
        request.inputs["mine"] = "not the client's"
        request.inputs.pop("t", None)
        assert equal(encoding.reissued(request).inputs, inputs)


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_another_stage_of_the_process_gets_containers_of_its_own(inputs: Any) -> None:
    _, arrived = carried({"request": OmniRequest(id="r", inputs=inputs)})
    once, twice = (encoding.reissued(arrived["request"]) for _ in range(2))
    once.inputs["mine"] = 1
    assert equal(twice.inputs, inputs)
    assert equal(encoding.reissued(twice).inputs, inputs)


def test_one_tensor_that_stands_twice_arrives_as_one_on_every_hop() -> None:
    _, arrived = carried({"request": OmniRequest(id="r", inputs=INPUTS["one tensor twice"])})
    _, arrived = carried(arrived)
    for request in (arrived["request"], encoding.reissued(arrived["request"])):
        assert request.inputs["x"] is request.inputs["y"]


def test_a_request_on_whose_tensor_a_result_lies_takes_no_second_place() -> None:
    _, arrived = carried({"request": OmniRequest(id="r", inputs={"t": torch.arange(5000)})})
    extracted, _ = carried({"request": arrived["request"], "data": arrived["request"].inputs["t"]})
    assert (len(extracted.refs), extracted.nbytes) == (2, 40_000)


@pytest.mark.parametrize(
    ("inputs", "held"), [(INPUTS["a text"], False), (INPUTS["bytes"], False), (INPUTS["a tensor"], True)]
)
def test_a_request_holds_its_slot_for_tensors_alone(inputs: Any, held: bool) -> None:
    extracted = encoding.extract(
        {"request": OmniRequest(id="r", inputs=inputs), "data": torch.ones(9000)}, as_fields=True
    )
    region = pages.fresh(extracted.nbytes)
    region[:] = np.frombuffer(extracted.flat(), np.uint8)
    watched = weakref.ref(region)
    arrived = encoding.restore(extracted.value_bytes, extracted.refs, buffers.view(region))
    encoding.received(arrived["request"])
    del region, arrived["data"]
    assert (watched() is not None) is held
    extracted, again = carried({"request": arrived["request"]})
    assert equal(again["request"].inputs, inputs)
    del arrived, extracted
    gc.collect()
    assert watched() is None
