"""The device of a payload's tensors when a stage gets them. ``meta`` stands for a GPU; the copies themselves need
one.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from omnipipeline_spec.types.plan import RelayPlan, StagePlan
from stage_runtime.payloads import devices, encoding, isolating, tensors
from stage_runtime.wire.values import OmniRequest


def plan(device: str, *gpus: int) -> StagePlan:
    return StagePlan(name="a", group="a", factory="m:f", gpus=gpus, relay=RelayPlan(device=device))


@pytest.mark.parametrize(
    ("stage", "rank", "device"),
    [
        (plan("cpu"), 0, "cpu"),
        (plan("cuda", 2), 0, "cuda:2"),
        (plan("cuda", 0, 1), 1, "cuda:1"),
        (plan("cpu", 2), 0, "cpu"),
        (plan("cuda"), 0, "cpu"),
    ],
)
def test_the_relay_s_device_or_the_placement_says_where_tensors_arrive(
    stage: StagePlan, rank: int, device: str
) -> None:
    assert devices.of_stage(stage, rank) == device


def test_every_tensor_of_a_value_is_moved_and_nothing_else() -> None:
    array, same = np.ones(2), torch.ones(3, device="meta")
    value: Any = {"a": torch.ones(2), "b": [torch.zeros(1), (torch.ones(1), "text")], "c": array, "d": same, "e": b"x"}
    inner = value["b"]
    moved = devices.moved(value, "meta")
    assert moved is value and moved["b"] is inner and moved["c"] is array and moved["d"] is same
    found = [moved["a"], moved["b"][0], moved["b"][1][0]]
    assert [(tensor.device.type, *tensor.shape) for tensor in found] == [("meta", 2), ("meta", 1), ("meta", 1)]
    assert (moved["b"][1][1], moved["e"]) == ("text", b"x")


def test_a_tensor_that_is_there_twice_is_copied_once() -> None:
    class Pair(msgspec.Struct, frozen=True):
        left: Any
        right: Any

    one, other = torch.ones(2), torch.ones(2)
    moved = devices.moved({"list": [one, other, one], "pair": Pair(one, {"again": other})}, "meta")
    first, second, third = moved["list"]
    assert first is third is moved["pair"].left
    assert second is moved["pair"].right["again"] and second is not first


def test_a_struct_with_tensors_is_replaced_and_one_without_is_kept() -> None:
    class Pair(msgspec.Struct, frozen=True):
        left: Any
        right: Any

    plain = Pair(1, "2")
    assert devices.moved(plain, "meta") is plain
    moved = devices.moved(Pair(torch.ones(2), 1), "meta")
    assert (moved.left.device.type, moved.right) == ("meta", 1)


def test_what_arrives_at_a_stage_of_the_cpu_is_not_touched() -> None:
    value = {"a": torch.ones(2)}
    tensor = value["a"]
    assert devices.moved(value, "cpu")["a"] is tensor


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU")
def test_a_gpu_that_is_not_there_leaves_tensors_on_the_cpu() -> None:
    assert devices.moved([torch.ones(1)], "cuda:0")[0].device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_goes_to_a_gpu_and_back_unchanged() -> None:
    given = torch.arange(1 << 20, dtype=torch.int32)
    there = devices.moved([given], "cuda:0")[0]
    assert there.device == torch.device("cuda:0")
    assert devices.moved([there], "cuda:0")[0] is there
    back = devices.moved([there], "cpu")[0]
    assert back.device.type == "cpu" and torch.equal(back, given)
    assert torch.equal(tensors.host_copy(there[::2]), given[::2])


def test_a_request_keeps_its_inputs() -> None:
    request = OmniRequest(id="r", inputs={"x": 1})
    assert devices.moved(request, "meta") is request


class AskedFor(torch.overrides.TorchFunctionMode):
    """The devices that `torch.empty` is asked for, while an author's default device is set; it gives plain memory."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = dict(kwargs or {})
        if function is torch.empty:
            self.devices.append(str(more.get("device")))
            more.pop("pin_memory", None)
        return function(*args, **more)


class OnGpu:
    """A tensor on a GPU, as far as `host_copy` looks at it before it has memory for the copy."""

    device, shape, dtype = torch.device("cuda:0"), (3,), torch.float32


def test_a_factory_s_default_device_changes_no_copy_in_the_host_s_memory() -> None:
    recording = AskedFor()
    with recording, torch.device("meta"), pytest.raises(TypeError):  # no copy without a GPU
        tensors.host_copy(OnGpu())
    assert recording.devices == ["cpu"]


def test_a_factory_s_default_device_changes_no_tensor_that_arrives() -> None:
    given = {"none": torch.empty(0, 3), "some": torch.ones(3), "many": torch.ones(5000, dtype=torch.bfloat16)}
    extracted = encoding.extract(given)
    with torch.device("meta"):
        found = encoding.restore(extracted.value_bytes, extracted.refs, memoryview(bytearray(extracted.flat())))
        shared = isolating.isolate(given)
    for one in (found, shared):
        assert {name: str(tensor.device) for name, tensor in one.items()} == dict.fromkeys(given, "cpu")
        assert all(torch.equal(one[name], tensor) for name, tensor in given.items())
