"""`omni.Autoregressive.speculative_config`, checked. Its keys are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from stage_runtime.errors import ConfigurationError

METHODS: Final = ("ngram",)
MOST_TOKENS: Final = 32  # of a draft: rarely are more of them right than this costs
NGRAM: Final = 5  # vLLM's default of both bounds


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """num_speculative_tokens: of a draft, at most. prompt_lookup_max, prompt_lookup_min: tokens of the sequences that
    prompt lookup looks for.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = NGRAM
    prompt_lookup_min: int = NGRAM


def checked(config: Mapping[str, Any]) -> Speculation:
    """Raises: ConfigurationError: a key is unknown or missing, or a value is out of its range."""
    if not isinstance(config, Mapping):
        raise _refused(f"expected a dict, got {type(config).__name__}")
    known = Speculation.__struct_fields__
    unknown = [name for name in config if name not in known]
    if unknown:
        raise _refused(f"no key {unknown[0]!r}: there are {', '.join(known)}")
    if config.get("method") not in METHODS:
        raise _refused(f"method={config.get('method')!r}: one of {', '.join(METHODS)}")
    if "num_speculative_tokens" not in config:
        raise _refused("num_speculative_tokens is missing")
    longest = config.get("prompt_lookup_max", config.get("prompt_lookup_min", NGRAM))
    found = {**config, "prompt_lookup_max": longest, "prompt_lookup_min": config.get("prompt_lookup_min", longest)}
    for name in known[1:]:
        if type(found[name]) is not int or not 1 <= found[name] <= MOST_TOKENS:
            raise _refused(f"{name}={found[name]!r}: a whole number from 1 to {MOST_TOKENS}")
    if found["prompt_lookup_min"] > longest:
        raise _refused(f"prompt_lookup_min={found['prompt_lookup_min']}: more than prompt_lookup_max={longest}")
    return Speculation(**found)


def _refused(problem: str) -> ConfigurationError:
    return ConfigurationError(f"omni.Autoregressive(speculative_config=…): {problem}")
