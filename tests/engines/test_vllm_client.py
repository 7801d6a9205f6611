"""The client of `engine="vllm"` with an AsyncLLM of a few lines. The real one: see `test_external_vllm`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

import stage_runtime as omni
from stage_runtime.engines.autoregressive.external import vllm
from stage_runtime.engines.autoregressive.sampling.parameters import from_params
from stage_runtime.engines.autoregressive.stage.process_engine import ProcessEngine
from stage_runtime.engines.making import loading
from stage_runtime.errors import ConfigurationError, EngineDeadError
from tests.engines import external_kit
from tests.engines.engine_kit import running
from tests.engines.external_kit import ends
from tests.engines.generation_kit import CONFIGS, GREEDY


class ClientError(Exception):
    """The request's fault, as in vLLM."""


class Params:
    """The parameters that were given, as in vLLM's `SamplingParams`."""

    def __init__(self, **given: Any) -> None:
        self.__dict__ |= given


PACKAGE = SimpleNamespace(
    SamplingParams=Params,
    sampling_params=SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"), StructuredOutputsParams=Params),
    exceptions=SimpleNamespace(VLLMClientError=ClientError),
)


class LLM:
    """An engine like vLLM's `AsyncLLM`: the next token is the last plus one. A prompt's first token decides its end."""

    REFUSED, BROKEN, DIES, ENDLESS, LOST = 900, 901, 902, 903, 904

    def __init__(self) -> None:
        self.errored = False
        self.names: list[str] = []
        self.open = 0  #: Requests that nobody has ended.
        self.closed = False

    async def generate(self, prompt: Mapping[str, Any], params: Any, name: str) -> AsyncIterator[Any]:
        self.names.append(name)
        first, token = prompt["prompt_token_ids"][0], prompt["prompt_token_ids"][-1]
        self.open += 1
        try:
            if first == self.REFUSED:
                raise ClientError("no such request")
            if first == self.DIES:
                self.errored = True
            if first in (self.BROKEN, self.DIES):
                raise RuntimeError("generate failed") from OSError("the cause")
            left = params.max_tokens
            while left:
                await asyncio.sleep(0)
                token, left = (token, left) if first == self.ENDLESS else (token + 1, left - 1)
                stopped = token in params.stop_token_ids
                reason = "error" if first == self.LOST else "stop" if stopped else None if left else "length"
                part = SimpleNamespace(
                    token_ids=[token], finish_reason=reason, stop_reason=token if stopped else None, logprobs=None
                )
                yield SimpleNamespace(
                    outputs=[part],
                    prompt_logprobs=None,
                    prompt_token_ids=prompt["prompt_token_ids"],
                    num_cached_tokens=3,
                )
                if reason:
                    return
        finally:
            self.open -= 1

    def shutdown(self) -> None:
        self.closed = True


def engine(llm: LLM) -> ProcessEngine:
    return external_kit.engine(vllm.VLLMClient(PACKAGE, llm, vocab_size=100_000, longest=50_000))


def test_requests_are_answered_and_end_by_length_or_by_a_stop_token() -> None:
    llm = LLM()
    with running(engine(llm)) as rig:
        rig.start("length", {"tokens": [1]})
        rig.start("stopped", {"tokens": [58], "params": {"stop_token_ids": [59]}})
        assert ends(rig, 2) == {"length": ("done", ["length", 5]), "stopped": ("done", ["stop", 1])}
    assert llm.closed and not llm.open
    gauges = rig.inbox.gauges
    assert (gauges["prompt_tokens_total"], gauges["generated_tokens_total"], gauges["prefix_hit_tokens_total"]) == (
        2,
        6,
        6,
    )


def test_an_error_of_one_request_ends_it_alone_and_names_whose_fault_it_was() -> None:
    with running(engine(LLM())) as rig:
        rig.start("refused", {"tokens": [LLM.REFUSED]})
        rig.start("broken", {"tokens": [LLM.BROKEN]})
        rig.start("lost", {"tokens": [LLM.LOST]})
        rig.start("long", {"tokens": [1] * 100_000})
        rig.start("field", {"tokens": [1], "params": {"response_format": {"type": "json_schema"}}})
        rig.start("good", {"tokens": [1]})
        found = ends(rig, 6)
    assert found["good"] == ("done", ["length", 5])
    assert found["refused"] == ("failed", "RequestError: vllm: ClientError: no such request")
    assert found["broken"] == ("failed", "RequestError: vllm: OSError: the cause")
    assert "vllm could not compute it" in found["lost"][1]
    assert "your messages resulted in 100000 tokens" in found["long"][1]
    assert found["field"][0] == "failed"


def test_an_aborted_request_is_ended_there_and_its_name_can_be_used_again() -> None:
    llm = LLM()
    with running(engine(llm)) as rig:
        rig.start("one", {"tokens": [LLM.ENDLESS]})
        assert rig.outbox.next() == ("one", "chunk", "begins")
        rig.abort("one")
        del rig.works["one"]
        rig.start("one", {"tokens": [1]})
        assert ends(rig, 1) == {"one": ("done", ["length", 5])}
    assert len(set(llm.names)) == 2 and not llm.open
    assert rig.inbox.gauges["running"] == rig.inbox.gauges["waiting"] == 0


def test_an_engine_that_ends_takes_every_request_with_it() -> None:
    with pytest.raises(EngineDeadError, match="the cause"), running(engine(LLM())) as rig:
        rig.start("one", {"tokens": [LLM.ENDLESS]})
        assert rig.outbox.next() == ("one", "chunk", "begins")
        rig.start("dies", {"tokens": [LLM.DIES]})


def test_an_engine_that_ends_while_nothing_is_computed_is_noticed() -> None:
    llm = LLM()
    with pytest.raises(EngineDeadError, match="vllm has ended"), running(engine(llm)) as rig:
        llm.errored = True
        rig.thread.join(60)
        assert not rig.thread.is_alive()


def test_what_is_under_way_is_finished_when_the_stage_ends() -> None:
    with running(engine(LLM())) as rig:
        rig.start("one", {"tokens": [1], "params": {"max_tokens": 2_000}})
        rig.inbox.close()
        assert ends(rig, 1) == {"one": ("done", ["length", 2_000])}


def test_parameters_have_the_meaning_there_that_they_have_here() -> None:
    parameters = {
        "top_p": 0, "stop_token_ids": [7], "logit_bias": {"5": -3}, "max_tokens": 9,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "x-guidance": {}}}},
    }  # fmt: skip
    given = vllm.sampling_params(PACKAGE, from_params(parameters, GREEDY))
    assert 0 < given.top_p < 1e-6
    assert (given.stop_token_ids, given.logit_bias, given.temperature, given.detokenize) == ([7], {5: -3.0}, 0.0, False)
    written = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    most = 10**15 - 1  # an integer without bounds has 15 digits at most
    bounded = {"type": "integer", "minimum": -most, "maximum": most, "x-guidance": written}
    assert given.structured_outputs.json == bounded


def test_the_likeliest_tokens_are_as_many_as_were_asked_for() -> None:
    """vLLM adds the chosen one."""
    found = {9: SimpleNamespace(logprob=-4.0), 1: SimpleNamespace(logprob=-0.5), 2: SimpleNamespace(logprob=-1.0)}
    assert vllm._logprobs(found, 9, 2) == (-4.0, ((1, -0.5), (2, -1.0)))
    assert vllm._logprobs(found, 9, 0) == (-4.0, ())
    assert vllm._logprobs(found, 1, 3) == (-0.5, ((1, -0.5), (2, -1.0), (9, -4.0)))


def test_the_cache_holds_one_request_of_full_length_and_at_most_what_all_of_them_need() -> None:
    text = CONFIGS["llama"]()
    token = 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, dim, bytes
    assert vllm.cache_bytes(text, 256, 4, "float32") == 4 * 384 * token
    assert vllm.cache_bytes(text, 256, 4, "bfloat16") == 4 * 384 * token // 2
    assert vllm.cache_bytes(text, 256, 10_000, "float32") == vllm.HOST_CACHE_BYTES
    assert vllm.cache_bytes(text, 1 << 22, 10_000, "float32") > vllm.HOST_CACHE_BYTES


def test_without_vllm_one_line_names_how_to_install_it_and_the_environment_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    before = dict(os.environ)
    with pytest.raises(ConfigurationError, match=r"pip install 'omnipipeline\[vllm\]'"):
        loading.as_engine(omni.Autoregressive(model="", engine="vllm"))
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"linears": "mkl"}, "takes no linears"),
        ({"data_parallel_size": 2}, "takes no data_parallel_size"),
        ({"model": "weights.gguf"}, "no GGUF"),
    ],
)
def test_what_vllm_does_not_take_is_refused_when_the_stage_is_loaded(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        loading.as_engine(omni.Autoregressive(**{"model": "", "engine": "vllm", **settings}))
