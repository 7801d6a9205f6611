"""The settings and the fields of a request that another engine takes; the others are refused by their names."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.core.engine_requests import EngineCoreRequest
from stage_runtime.engines.autoregressive.sampling.parameters import SamplingParams
from stage_runtime.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from stage_runtime.rules.autoregressive import balancing

#: Settings that mean the same for every engine, or are the stage's own.
COMMON: Final = frozenset(
    {"model", "prompt", "deliver", "params", "revision", "engine", "dtype", "threads", "max_requests",
     "max_batched_tokens", "max_model_len", "kv_cache_bytes", "prefix_caching", "tool_calls", "reasoning",
     "control_strings"}
)  # fmt: skip
#: Fields that the stage computes itself, from the engine's tokens.
_OF_THE_STAGE: Final = frozenset(
    {"stop", "n", "echo", "output_kind", "include_stop_str_in_output", "skip_special_tokens", "return_token_ids"}
)
#: Names as clients know them.
_NAMES: Final = {"grammar": "response_format"}

LEAST_TOP_P: Final = 1e-9  # other engines refuse 0, which is the likeliest token alone, as this is
_DEFAULTS: Final = SamplingParams()


def check_settings(spec: Autoregressive, taken: Set[str]) -> None:
    """Raises: ConfigurationError: a setting that this engine does not take is not the default."""
    given = {name: getattr(spec, name) for name in spec.__struct_fields__}
    defaults = Autoregressive(model="")
    wrong = [name for name, value in given.items() if name not in taken and value != getattr(defaults, name)]
    if wrong:
        raise ConfigurationError(
            f"omni.Autoregressive(engine={spec.engine!r}, {wrong[0]}={given[wrong[0]]!r}): this engine takes "
            f"no {wrong[0]}"
        )


def check_request(request: EngineCoreRequest, taken: Set[str], engine: str, *, longest: int, vocab_size: int) -> None:
    """longest: tokens of prompt and answer. Raises: InvalidRequest: the engine cannot compute this request."""
    params, prompt = request.params, request.prompt_token_ids
    for name in SamplingParams.__struct_fields__:
        if name not in taken | _OF_THE_STAGE and getattr(params, name) != getattr(_DEFAULTS, name):
            shown = _NAMES.get(name, name)
            raise InvalidRequest(f"{shown}: the engine {engine} of this stage does not compute it", param=shown)
    if request.prompt_embeds is not None:
        raise InvalidRequest(f"the engine {engine} of this stage takes token ids only, no embeddings", param="inputs")
    for name in ("priority", "cache_salt"):
        if name not in taken and getattr(request, name):
            raise InvalidRequest(f"{name}: the engine {engine} of this stage has none", param=name)
    if request.adapter:
        raise InvalidRequest(f"adapter: the engine {engine} of this stage has none", param="model")
    balancing.check_only(request.data_parallel_rank)
    wrong = [token for token in (*prompt, *params.stop_token_ids) if not 0 <= token < vocab_size]
    if wrong:
        raise InvalidRequest(f"the vocabulary has {vocab_size} tokens, and no token {wrong[0]}")
    if len(prompt) >= longest:
        raise ContextLengthExceeded(len(prompt), longest)
