"""A setting of another type is refused by its name when the stage is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stage_runtime as omni
from stage_runtime.engines.making import loading, setting_types
from stage_runtime.errors import ConfigurationError


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


async def later(payload: omni.StagePayload) -> None: ...


def pieces(payload: omni.StagePayload) -> Iterator[omni.Chunk]:
    yield omni.Chunk(payload)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"own_process": "no"}, "own_process='no'): expected bool, got str"),
        ({"enable_expert_parallel": "no"}, "enable_expert_parallel='no'): expected bool, got str"),
        ({"prefix_caching": 0}, "prefix_caching=0): expected bool, got int"),
        ({"max_requests": "8"}, "max_requests='8'): expected int, got str"),
        ({"max_requests": True}, "max_requests=True): expected int, got bool"),
        ({"max_requests": 1.5}, "max_requests=1.5): expected int, got float"),
        ({"threads": "x"}, "threads='x'): expected int | null, got str"),
        ({"threads": [4]}, "threads=…): expected int | null, got array"),
        ({"model": 7}, "model=7): expected str, got int"),
        ({"model": None}, "model=None): expected str, got null"),
        ({"frozen_after_s": float("nan")}, "frozen_after_s=nan): expected a number"),
        ({"threads": 0}, "threads=0): None, or from 1 to 1024"),
        ({"threads": 10**9}, "threads=1000000000): None, or from 1 to 1024"),
        ({"max_model_len": 0}, "max_model_len=0): None, or at least 1"),
        ({"frozen_after_s": 0}, "frozen_after_s=0): at least 2: an engine gives a sign of life each second"),
        ({"keep_rows": {"a": 7}}, "keep_rows={'a': 7}): expected (layer, of) by names"),
        ({"keep_rows": {"a": (0,)}}, "keep_rows={'a': (0,)}): expected (layer, of) by names"),
        ({"keep_rows": ["a"]}, "keep_rows=['a']): expected (layer, of) by names"),
        ({"cores": [0]}, "cores=[0]): expected a list of processors for each engine"),
        ({"cores": [[]]}, "cores=[[]]): expected a list of processors for each engine"),
        ({"cores": [["0"]]}, "cores=[['0']]): expected a list of processors for each engine"),
        ({"params": {"n": 0}}, "params=…): n must be a number from 1 to 16"),
        ({"params": {"max_tokens": 0}}, "params=…): max_tokens must be a number from 1 to 1e+09"),
        ({"params": {"max_tokens": "5"}}, "params=…): max_tokens must be a number from 1 to 1e+09"),
        ({"params": {"min_tokens": 9, "max_tokens": 8}}, "params=…): min_tokens is 9 and max_tokens 8"),
        ({"params": {"response_format": {}}}, "params=…): response_format.type must be 'text', 'json_object' or"),
        ({"dump_tokens": Unprintable()}, "dump_tokens=…): expected bool, got Unprintable"),
        ({"prompt": "x"}, "prompt='x'): it is of type str; expected a plain function (payload) that returns omni.Pro"),
        ({"prompt": later}, "prompt=…): it is async; expected a plain function (payload) that returns omni.Prompt"),
        ({"prompt": pieces}, "prompt=…): it is a generator; expected a plain function"),
        ({"prompt": lambda: None}, "prompt=…): it cannot be called: too many positional arguments; expected a plain"),
        ({"deliver": later}, "deliver=…): it is async; expected a plain function (payload, generation) that returns"),
        ({"deliver": pieces}, "deliver=…): it cannot be called: too many positional arguments; expected a plain"),
        ({"stream": later}, "stream=…): it is async; expected a plain function (chunk) that returns token ids"),
    ],
)
def test_a_setting_of_another_type_is_refused_by_its_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        loading.as_engine(omni.Autoregressive(**{"model": "/nowhere", **settings}))
    assert str(raised.value).startswith(f"omni.Autoregressive({message}")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: omni.Simple(list, concurrency="4"), "Simple(concurrency='4'): expected int, got str"),  # type: ignore
        (lambda: omni.Simple(list, concurrency=1.5), "Simple(concurrency=1.5): expected int, got float"),  # type: ignore
        (lambda: omni.Simple(None), "Simple(fn=None): expected a function, got NoneType"),  # type: ignore
        (lambda: omni.Batched(omni.Simple(list)), "Batched(fn=…): expected a function, got Simple"),  # type: ignore
        (lambda: omni.Batched(list, max_batch=None), "Batched(max_batch=None): expected int, got null"),  # type: ignore
        (lambda: omni.Batched(list, max_wait_s="1"), "Batched(max_wait_s='1'): expected float, got str"),  # type: ignore
        (lambda: omni.Batched(list, max_wait_s=-1), "Batched(max_wait_s=-1): expected a number of seconds, 0 or more"),
        (lambda: omni.Batched(list, max_wait_s=float("inf")), "Batched(max_wait_s=inf): expected a number of seconds"),
        (lambda: omni.Batched(list, gauges=5), "Batched(gauges=5): it is of type int; expected a plain"),  # type: ignore
        (lambda: omni.Streaming(later, concurrency=[2]), "Streaming(concurrency=…): expected int, got"),  # type: ignore
    ],
)
def test_those_of_a_function_are_refused_alike(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        loading.as_engine(made())
    assert str(raised.value).startswith(f"omni.{message}")


def test_processors_that_the_process_may_not_use_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cores=\[\[-1\]\]\): this process may use [0-9, ]+$"):
        loading.as_engine(omni.Autoregressive(model="/nowhere", cores=[[-1]]))


def test_those_of_an_encoder_are_refused_alike() -> None:
    with pytest.raises(ConfigurationError, match=r"^omni\.Encoder\(normalize='yes'\): expected bool, got str$"):
        loading.as_engine(omni.Encoder(model="/nowhere", normalize="yes"))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"^omni\.Encoder\(threads=0\): None, or from 1 to 1024$"):
        loading.as_engine(omni.Encoder(model="/nowhere", threads=0))


def test_numbers_of_numpy_paths_and_whole_seconds_are_taken() -> None:
    given: dict[str, Any] = {"max_requests": np.int64(4), "frozen_after_s": np.float32(2), "model": Path("/nowhere")}
    setting_types.check(omni.Autoregressive(**given))
    setting_types.check(omni.Autoregressive(model="m", frozen_after_s=3, threads=None))
