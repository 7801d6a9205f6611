"""The parameters of generation that routes hand to the stages: what each needs, and what is refused. Pure.

One table for all routes that generate text: `chat`, `text_completions`. A body has a field of each name that its route
takes; their bounds stand there (`reading.schemas`). What an engine does with each is its own matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Final

import msgspec

from stage_runtime.errors import InvalidRequest

_UNGUIDED: Final = "stages follow no grammars of this form; see response_format"


class Accepted(msgspec.Struct, frozen=True):
    """A parameter that the stages of a pipeline honour, or do not."""

    needs: str  #: What the pipeline's ``accepts`` must name.
    idle: tuple[Any, ...]  #: Default values, which are dropped.
    problem: str  #: Why any other value is refused where the pipeline does not accept it.


#: Handed to the stages under their own names when given.
ALWAYS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "stop",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "reasoning_effort",
    "verbosity",
)

#: Handed to the stages under their own names where the pipeline accepts them, whatever the value: it may be against a
#: stage's default.
ACCEPTED: Final[dict[str, Accepted]] = {
    "n": Accepted("n", (1,), "one choice per request"),
    "logprobs": Accepted("logprobs", (False,), "stages give no log probabilities"),
    "top_logprobs": Accepted("logprobs", (0,), "stages give no log probabilities"),
    "prompt_logprobs": Accepted("prompt_logprobs", (), "stages give no log probabilities of prompts"),
    "response_format": Accepted("response_format", ({"type": "text"},), "only {'type': 'text'}"),
    "tools": Accepted("tools", ([],), "tools cannot be called"),
    "tool_choice": Accepted("tools", ("none", "auto"), "tools cannot be called"),
    "parallel_tool_calls": Accepted("tools", (True, False), ""),
    "chat_template_kwargs": Accepted("chat_template_kwargs", ({},), "stages take no arguments of a chat template"),
    "min_tokens": Accepted("min_tokens", (0,), "stages take no least number of tokens"),
    "stop_token_ids": Accepted("stop_token_ids", ([],), "stages take no ids of tokens"),
    "ignore_eos": Accepted("ignore_eos", (False,), "stages end where their model does"),
    "echo": Accepted("echo", (False,), "stages do not repeat prompts"),
    "continue_final_message": Accepted("continue_final_message", (False,), "stages begin a message of their own"),
    "add_generation_prompt": Accepted("continue_final_message", (True,), "stages begin a message of their own"),
    "include_stop_str_in_output": Accepted("include_stop_str_in_output", (False,), "stages cut stop strings off"),
    "skip_special_tokens": Accepted("skip_special_tokens", (True,), "stages leave special tokens out"),
    "cache_salt": Accepted("cache_salt", (), "stages do not divide their caches"),
    "priority": Accepted("priority", (0,), "stages serve requests in their order"),
    "structured_outputs": Accepted("structured_outputs", ({},), _UNGUIDED),
    "return_token_ids": Accepted("return_token_ids", (False,), "stages give no ids of tokens"),
    "mm_processor_kwargs": Accepted("mm_processor_kwargs", ({},), "stages take no arguments of a processor"),
}
#: vLLM's older names of what ``structured_outputs`` holds.
GUIDED: Final = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}


def check(body: msgspec.Struct, accepts: Set[str]) -> None:
    """accepts: what the pipeline's stages honour, of `ACCEPTED`. Raises: InvalidRequest: names the parameter."""
    for name, known in ACCEPTED.items():
        value = getattr(body, name, None)
        if value is not None and value not in known.idle and known.needs not in accepts:
            raise InvalidRequest(f"{name}: {known.problem}", param=name)
    guided = [name for name in GUIDED if getattr(body, name, None) is not None]
    if guided and "structured_outputs" not in accepts:
        raise InvalidRequest(f"{guided[0]}: {_UNGUIDED}", param=guided[0])
    if guided and (len(guided) > 1 or getattr(body, "structured_outputs", None)):
        other = guided[1] if len(guided) > 1 else "structured_outputs"
        raise InvalidRequest(f"{guided[0]}: only one form of an answer can be asked for, got {other}", param=guided[0])


def refuse(body: msgspec.Struct, refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """refused: name -> (default values, why any other is refused). Raises: InvalidRequest."""
    for name, (idle, reason) in refused.items():
        value = getattr(body, name)
        if value is not None and value not in idle:
            raise InvalidRequest(f"{name}: {reason}", param=name)


def handed_on(body: msgspec.Struct, accepts: Set[str]) -> dict[str, Any]:
    """`OmniRequest.params` of a body that `check` has taken."""
    names = (*ALWAYS, *(name for name, known in ACCEPTED.items() if known.needs in accepts))
    found = {name: value for name in names if (value := getattr(body, name, None)) is not None}
    for name, form in GUIDED.items():
        if (value := getattr(body, name, None)) is not None:
            found["structured_outputs"] = {form: value}
    return found
