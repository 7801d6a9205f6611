"""The taker's stream waits for a GPU's work between threads of one process. ``meta`` stands for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stage_runtime.payloads.pack import Arrived
from stage_runtime.payloads.streams import CUDA
from stage_runtime.stage.inputs.arrivals import Passed
from stage_runtime.wire.values import OmniRequest, StagePayload


class Counting:
    """`streams.DeviceStreams` that records its calls."""

    def __init__(self, used: bool = True) -> None:
        self.used = used
        self.log = list[str]()

    def in_use(self) -> bool:
        return self.used

    def is_there(self, tensor: Any) -> bool:
        return bool(tensor.device.type == "meta")

    def record(self, device: Any) -> str:
        self.log.append(f"record {device}")
        return "event"

    def wait(self, device: Any, event: Any) -> None:
        self.log.append(f"wait {device} {event}")

    def keep(self, tensor: Any) -> None:
        self.log.append(f"keep {tuple(tensor.shape)}")


GPU = torch.empty(3, device="meta")
OTHER = torch.empty(4, device="meta")
TAKEN = ["record meta", "wait meta event", "keep (3,)", "keep (4,)"]


@pytest.mark.parametrize(
    "value",
    [
        {"a": GPU, "b": [torch.ones(2), (OTHER,)], "c": "text"},
        StagePayload(request=OmniRequest(id="r", inputs=GPU), data=[OTHER]),
    ],
)
def test_a_taker_s_stream_waits_for_its_giver_s_and_keeps_the_tensors(value: Any) -> None:
    streams = Counting()
    passed = Passed(value, streams)
    assert streams.log == TAKEN[:1]
    assert passed.open() is value
    assert streams.log == TAKEN


def test_a_value_that_is_discarded_waits_for_nothing() -> None:
    streams = Counting()
    Passed([GPU], streams).discard()
    assert streams.log == TAKEN[:1]


@pytest.mark.parametrize(("value", "used"), [([torch.ones(2), "text"], True), ([GPU], False)])
def test_what_lies_on_no_gpu_costs_no_event(value: Any, used: bool) -> None:
    streams = Counting(used)
    Passed(value, streams).open()
    assert streams.log == []


def test_what_was_copied_on_arrival_is_waited_for_by_who_takes_it() -> None:
    streams = Counting()
    copied = Arrived(0, GPU).copied(streams)
    assert copied.flat is not GPU and streams.log == TAKEN[:1]
    copied.taken()
    assert streams.log == TAKEN[:3]


def test_a_process_without_gpus_has_no_streams() -> None:
    assert not CUDA.in_use()
    Passed([torch.ones(1)]).open()
