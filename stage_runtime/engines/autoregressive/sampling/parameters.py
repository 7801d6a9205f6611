"""How tokens are chosen and when a request ends: one value for each request, checked when it is made.

The one place for a parameter of the engine: its field says how it is read, within which bounds, and which other engines
take it as it is. `web.reading.generation_fields` says what clients may send.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Final, get_type_hints

import msgspec
from msgspec import Meta

from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import Grammar
from stage_runtime.engines.autoregressive.text.tool_calls import call_forms
from stage_runtime.errors import ConfigurationError, InvalidRequest

MAX_LOGPROBS: Final = 20  # OpenAI's bound of top_logprobs
MAX_STOPS: Final = 16
MAX_STOP: Final = 1024  # characters; each token's text is compared with it
MAX_TOKEN_IDS: Final = 1024  # of a bias, or stop tokens; OpenAI's bound of a bias is a few hundred
MAX_CHOICES: Final = 16
MAX_TOKEN: Final = 2**31 - 1  # no vocabulary is larger; the engine knows its own
MAX_BIAS: Final = 100.0  # OpenAI's bound
GREEDY_BELOW: Final = 1e-5  # as in vLLM: divided by less, f32 logits soon overflow


class OutputKind(Enum):
    DELTA = "delta"  #: New text and tokens since the last output; outputs that were not taken yet are joined.
    CUMULATIVE = "cumulative"  #: Everything so far.
    FINAL_ONLY = "final_only"  #: One output, at the end.


class Reading(msgspec.Struct, frozen=True):
    """How a field is read from a request's parameters of its name, and which other engines mean the same by it."""

    bounds: tuple[float, float] | None = None  #: The lowest and the highest; integers where the value is one.
    flag: bool = False
    engines: tuple[str, ...] = ()  #: Names of `omni.Autoregressive.engine`.


_KEY: Final = "reading"


def _within(lowest: float, highest: float, *engines: str) -> Meta:
    return Meta(extra={_KEY: Reading((lowest, highest), engines=engines)})


def _flag(*engines: str) -> Meta:
    return Meta(extra={_KEY: Reading(flag=True, engines=engines)})


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """temperature: 0 is greedy, as is anything below 1e-5. top_k: 0 sets no bound. seed: None draws one. stop: strings,
    cut off the text.

    include_stop_str_in_output: what ends the answer, a stop string or token, is a part of its text.
    skip_special_tokens: special tokens are not. return_token_ids: the ids of prompt and answer are given out.
    min_tokens: an end comes after as many others at least. logprobs: how many of the likeliest tokens to report beside
    the chosen one's; None: none.
    logit_bias: token id -> what is added to its logit. n: answers, each with a seed of its own. prompt_logprobs: as
    ``logprobs``, of the prompt's tokens but the first; None: none. echo: the answer begins with the prompt.
    hidden_rows: the last hidden row of each token.
    """

    max_tokens: Annotated[int, _within(1, 10**9, "openvino", "vllm")] = 256
    min_tokens: Annotated[int, _within(0, 10**9, "openvino", "vllm")] = 0
    temperature: Annotated[float, _within(0.0, 2.0, "openvino", "vllm")] = 1.0
    top_p: Annotated[float, _within(0.0, 1.0, "openvino")] = 1.0
    top_k: Annotated[int, _within(-1, 10**9, "openvino", "vllm")] = 0
    min_p: Annotated[float, _within(0.0, 1.0, "vllm")] = 0.0
    repetition_penalty: Annotated[float, _within(0.01, 10.0, "openvino", "vllm")] = 1.0
    presence_penalty: Annotated[float, _within(-2.0, 2.0, "openvino", "vllm")] = 0.0
    frequency_penalty: Annotated[float, _within(-2.0, 2.0, "openvino", "vllm")] = 0.0
    logit_bias: dict[int, float] = {}
    seed: Annotated[int | None, Meta(extra={_KEY: Reading(engines=("vllm",))})] = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: Annotated[bool, _flag("openvino", "vllm")] = False
    logprobs: Annotated[int | None, _within(0, MAX_LOGPROBS, "vllm")] = None
    prompt_logprobs: Annotated[int | None, _within(0, MAX_LOGPROBS, "vllm")] = None
    n: Annotated[int, _within(1, MAX_CHOICES)] = 1
    echo: bool = False
    include_stop_str_in_output: Annotated[bool, _flag()] = False
    skip_special_tokens: Annotated[bool, _flag()] = True
    return_token_ids: Annotated[bool, _flag()] = False
    grammar: Grammar | None = None
    hidden_rows: bool = False
    output_kind: OutputKind = OutputKind.DELTA

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def changes_logits(self) -> bool:
        """Whether the logits must be changed before a token is chosen, even a greedy one."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )

    @property
    def penalized(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


def _readings() -> dict[str, Reading]:
    found: dict[str, Reading] = {}
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, Meta) and meta.extra is not None:
                found[name] = meta.extra[_KEY]
    return found


_READINGS: Final = _readings()
_BOUNDS: Final = {name: one.bounds for name, one in _READINGS.items() if one.bounds is not None}
_FLAGS: Final = tuple(name for name, one in _READINGS.items() if one.flag)


def fields_of(engine: str) -> frozenset[str]:
    """The fields that another engine takes under the same name, in the same meaning."""
    return frozenset(name for name, one in _READINGS.items() if engine in one.engines)


def of_stage(params: Mapping[str, Any]) -> SamplingParams:
    """The defaults of a stage's requests. Raises: ConfigurationError: a value of the wrong type or range."""
    others = {name: value for name, value in params.items() if name != "max_tokens"}
    try:
        longest = _number(params.get("max_tokens", SamplingParams().max_tokens), "max_tokens")
        return from_params(others, SamplingParams(max_tokens=int(longest)))
    except InvalidRequest as error:
        raise ConfigurationError(f"omni.Autoregressive(params=…): {error}") from error


def from_params(
    params: Mapping[str, Any], defaults: SamplingParams, form: call_forms.CallForm = call_forms.FORMS["hermes"]
) -> SamplingParams:
    """A request's parameters, named as OpenAI's, over the stage's ``defaults``. ``max_tokens`` is never above these.

    form: in which the model calls tools.
    Names that are not known here are somebody else's. Raises: InvalidRequest: a value of the wrong type or range.
    """
    found: dict[str, Any] = {}
    for name in _BOUNDS:
        if params.get(name) is not None and not (name == "logprobs" and isinstance(params[name], bool)):
            found[name] = _number(params[name], name)
    if params.get("max_completion_tokens") is not None and "max_tokens" not in found:
        found["max_tokens"] = _number(params["max_completion_tokens"], "max_tokens")
    if params.get("logprobs") is True:
        found["logprobs"] = int(_number(params.get("top_logprobs") or 0, "logprobs"))
    if found.get("top_k") == -1:  # vLLM's way to set no bound
        found["top_k"] = 0
    if params.get("seed") is not None:
        found["seed"] = _integer(params["seed"], "seed") % 2**63
    for name in _FLAGS:
        if params.get(name) is not None:
            found[name] = params[name] is True
    if params.get("echo") is True:
        found["echo"] = True
        if "logprobs" in found:
            found.setdefault("prompt_logprobs", found["logprobs"])
    if params.get("stop") is not None:
        found["stop"] = _stops(params["stop"])
    if params.get("stop_token_ids") is not None:
        found["stop_token_ids"] = _integers(params["stop_token_ids"], "stop_token_ids")
    if params.get("logit_bias") is not None:
        found["logit_bias"] = _biases(params["logit_bias"])
    if (grammar := call_forms.grammar(params, form)) is not None:
        found["grammar"] = grammar
    if "max_tokens" in found:
        found["max_tokens"] = min(found["max_tokens"], defaults.max_tokens)
    made = msgspec.structs.replace(defaults, **found)
    if made.min_tokens > made.max_tokens:
        raise InvalidRequest(f"min_tokens is {made.min_tokens} and max_tokens {made.max_tokens}", param="min_tokens")
    return made


def _number(value: Any, name: str) -> float | int:
    low, high = _BOUNDS[name]
    whole = isinstance(low, int)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}", param=name)
    if whole and int(value) != value:
        raise InvalidRequest(f"{name} must be a whole number", param=name)
    return int(value) if whole else float(value)


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number", param=name)
    return value


def _integers(value: Any, name: str) -> tuple[int, ...]:
    tokens = tuple(_integer(one, name) for one in value) if isinstance(value, list | tuple) else (-1,)
    if not all(0 <= token <= MAX_TOKEN for token in tokens):
        raise InvalidRequest(f"{name} must be a list of token ids", param=name)
    if len(tokens) > MAX_TOKEN_IDS:
        raise InvalidRequest(f"{name} has {len(tokens)} tokens; at most {MAX_TOKEN_IDS}", param=name)
    return tokens


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(one, str) for one in stops):
        raise InvalidRequest("stop must be a string or a list of strings", param="stop")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; at most {MAX_STOPS}", param="stop")
    if any(len(one) > MAX_STOP for one in stops):
        raise InvalidRequest(f"stop: a string has at most {MAX_STOP} characters", param="stop")
    return tuple(one for one in stops if one)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias")
    if len(value) > MAX_TOKEN_IDS:
        raise InvalidRequest(f"logit_bias has {len(value)} tokens; at most {MAX_TOKEN_IDS}", param="logit_bias")
    found = {}
    for token, bias in value.items():
        text = str(token)
        if not (text.isdecimal() and len(text) <= len(str(MAX_TOKEN))) or isinstance(bias, bool):
            raise InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias")
        if not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:  # NaN is in no range
            raise InvalidRequest(f"logit_bias must be from -{MAX_BIAS:g} to {MAX_BIAS:g}", param="logit_bias")
        found[int(text)] = float(bias)
    return found
