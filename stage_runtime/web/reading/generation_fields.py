"""The parameters of generation that clients send: of each its type, its bounds, and when it reaches the stages.

The one place for a new parameter: the bodies of the routes, the schema of `/openapi.json`, the checks and
`OmniRequest.params` (`translating.generation.parameters`) are made from these fields. An engine decides what it does
with each.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Final, get_type_hints

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1, le=10**9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Handling(msgspec.Struct, frozen=True):
    """How a parameter comes to the stages, under its own name when given, whatever its value: it may be against a
    stage's default.
    """

    needs: str | None = None  #: The name that the pipeline's ``accepts`` must have; None: it is always handed on.
    idle: tuple[Any, ...] = ()  #: Default values, for which it is never refused.
    problem: str = ""  #: Why any other value is refused where the pipeline does not accept it.


_KEY: Final = "handling"


def accepted(needs: str, *idle: Any, problem: str) -> Meta:
    """A field that is handed on where the pipeline's ``accepts`` has ``needs``."""
    return Meta(extra={_KEY: Handling(needs, idle, problem)})


HANDED: Final = Meta(extra={_KEY: Handling()})

_NO_LOGPROBS: Final = "stages give no log probabilities"
_NO_GRAMMAR: Final = "stages follow no grammars of this form; see response_format"


class GenerationFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters of each route that generates text."""

    temperature: Annotated[Annotated[float, Meta(ge=0, le=2)] | None, HANDED] = None
    top_p: Annotated[Share | None, HANDED] = None
    top_k: Annotated[int | None, HANDED] = None
    min_p: Annotated[Share | None, HANDED] = None
    max_tokens: Annotated[Positive | None, HANDED] = None
    stop: Annotated[str | list[str] | None, HANDED] = None
    seed: Annotated[int | None, HANDED] = None
    frequency_penalty: Annotated[Penalty | None, HANDED] = None
    presence_penalty: Annotated[Penalty | None, HANDED] = None
    repetition_penalty: Annotated[Annotated[float, Meta(gt=0)] | None, HANDED] = None
    logit_bias: Annotated[dict[str, float] | None, HANDED] = None
    #: 128 is OpenAI's bound. Answers have so many choices.
    n: Annotated[Annotated[int, Meta(ge=1, le=128)] | None, accepted("n", 1, problem="one choice per request")] = None
    prompt_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None,
        accepted("prompt_logprobs", problem="stages give no log probabilities of prompts"),
    ] = None
    response_format: Annotated[Any, accepted("response_format", {"type": "text"}, problem="only {'type': 'text'}")] = (
        None
    )
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None, accepted("min_tokens", 0, problem="stages take no least number of tokens")
    ] = None
    stop_token_ids: Annotated[
        list[Annotated[int, Meta(ge=0)]] | None, accepted("stop_token_ids", [], problem="stages take no ids of tokens")
    ] = None
    ignore_eos: Annotated[bool | None, accepted("ignore_eos", False, problem="stages end where their model does")] = (
        None
    )
    include_stop_str_in_output: Annotated[
        bool | None, accepted("include_stop_str_in_output", False, problem="stages cut stop strings off")
    ] = None
    skip_special_tokens: Annotated[
        bool | None, accepted("skip_special_tokens", True, problem="stages leave special tokens out")
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=1024)] | None,
        accepted("cache_salt", problem="stages do not divide their caches"),
    ] = None
    priority: Annotated[int | None, accepted("priority", 0, problem="stages serve requests in their order")] = None
    structured_outputs: Annotated[dict[str, Any] | None, accepted("structured_outputs", {}, problem=_NO_GRAMMAR)] = None
    # vLLM's older names of what structured_outputs holds: see `translating.generation.parameters.GUIDED`
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: Annotated[
        bool | None, accepted("return_token_ids", False, problem="stages give no ids of tokens")
    ] = None


class ChatFields(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Parameters of chats alone."""

    reasoning_effort: Annotated[str | None, HANDED] = None
    verbosity: Annotated[str | None, HANDED] = None
    logprobs: Annotated[bool | None, accepted("logprobs", False, problem=_NO_LOGPROBS)] = None
    top_logprobs: Annotated[Annotated[int, Meta(ge=0, le=20)] | None, accepted("logprobs", 0, problem=_NO_LOGPROBS)] = (
        None
    )
    tools: Annotated[list[Any] | None, accepted("tools", [], problem="tools cannot be called")] = None
    tool_choice: Annotated[Any, accepted("tools", "none", "auto", problem="tools cannot be called")] = None
    parallel_tool_calls: Annotated[bool | None, accepted("tools", True, False, problem="")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        accepted("chat_template_kwargs", {}, problem="stages take no arguments of a chat template"),
    ] = None
    continue_final_message: Annotated[
        bool | None, accepted("continue_final_message", False, problem="stages begin a message of their own")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, accepted("continue_final_message", True, problem="stages begin a message of their own")
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None, accepted("mm_processor_kwargs", {}, problem="stages take no arguments of a processor")
    ] = None


class CompletionFields(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Parameters of completions alone."""

    echo: Annotated[bool | None, accepted("echo", False, problem="stages do not repeat prompts")] = None
    #: How many of the likeliest; it is not a boolean here.
    logprobs: Annotated[Annotated[int, Meta(ge=0, le=20)] | None, accepted("logprobs", problem=_NO_LOGPROBS)] = None


@functools.cache
def handlings(body: type[msgspec.Struct]) -> Mapping[str, Handling]:
    """The fields of a body that come to the stages, in their order."""
    found: dict[str, Handling] = {}
    for name, hint in get_type_hints(body, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, Meta) and meta.extra is not None and _KEY in meta.extra:
                found[name] = meta.extra[_KEY]
    return found


def names_of_accepts() -> frozenset[str]:
    """Every name that a pipeline's ``accepts`` may have."""
    every = (*handlings(ChatFields).values(), *handlings(CompletionFields).values())
    return frozenset(one.needs for one in every if one.needs is not None)
