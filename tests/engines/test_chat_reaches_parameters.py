"""Every parameter of a generation can be set by a chat, or is listed here as one that cannot."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from omnipipeline_spec.pipeline import ChatParameter
from stage_runtime.engines.autoregressive.sampling import parameters
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.web.reading.generation_fields import names_of_accepts
from stage_runtime.web.translating.generation import chat

#: field -> what a chat sets it by.
SET_BY: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_completion_tokens": 9},
    "min_tokens": {"min_tokens": 2},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"5": 1}},
    "seed": {"seed": 7},
    "stop": {"stop": "x"},
    "stop_token_ids": {"stop_token_ids": [5]},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "n": {"n": 2},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "return_token_ids": {"return_token_ids": True},
    "grammar": {"response_format": {"type": "json_object"}},
}
#: field -> why no chat sets it.
NOT_REACHABLE = {
    "echo": "of completions: a chat's prompt is made by the template",
    "hidden_rows": "the stage's own: it costs memory, and no route shows the rows",
    "output_kind": "for programs that embed the engine; a chat's is `stream`",
}


def test_every_parameter_is_reachable_or_said_not_to_be() -> None:
    assert {*SET_BY, *NOT_REACHABLE} == set(SamplingParams.__struct_fields__)
    assert not set(SET_BY) & set(NOT_REACHABLE)


@pytest.mark.parametrize("field", SET_BY)
def test_what_a_chat_sets_is_what_the_engine_reads(field: str) -> None:
    accepts = frozenset(get_args(ChatParameter))
    body = chat.decode(msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}], **SET_BY[field]}))
    chat.call(body, accepts)
    params = chat.request(body, "r", {}, accepts).params
    defaults = SamplingParams()
    made = parameters.from_params(params, defaults)
    changed = [name for name in SamplingParams.__struct_fields__ if getattr(made, name) != getattr(defaults, name)]
    assert changed == [field]


def test_every_name_of_accepts_lets_something_through() -> None:
    assert set(get_args(ChatParameter)) == names_of_accepts()
