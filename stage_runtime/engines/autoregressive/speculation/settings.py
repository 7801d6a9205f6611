"""`omni.Autoregressive.speculative_config`, checked. Its keys are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from stage_runtime.errors import ConfigurationError

MOST_TOKENS: Final = 32  # of a draft: rarely are more of them right than this costs
NGRAM: Final = 5  # vLLM's default of both bounds
#: The keys of each method, beside those of all.
METHODS: Final = {"ngram": ("prompt_lookup_max", "prompt_lookup_min"), "draft_model": ("model", "revision")}
COMMON: Final = ("method", "num_speculative_tokens")


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """num_speculative_tokens: of a draft, at most. prompt_lookup_max, prompt_lookup_min: tokens of the sequences that
    prompt lookup looks for. model, revision: of the draft model, as those of the stage.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = NGRAM
    prompt_lookup_min: int = NGRAM
    model: str = ""
    revision: str | None = None


def checked(config: Mapping[str, Any]) -> Speculation:
    """Raises: ConfigurationError: a key is unknown or missing, or a value is out of its range."""
    if not isinstance(config, Mapping):
        raise _refused(f"expected a dict, got {type(config).__name__}")
    method = config.get("method")
    if type(method) is not str or method not in METHODS:
        raise _refused(f"method={method!r}: one of {', '.join(METHODS)}")
    known = (*COMMON, *METHODS[method])
    unknown = [name for name in config if name not in known]
    if unknown:
        raise _refused(f"no key {unknown[0]!r} of the method {method}: there are {', '.join(known)}")
    if "num_speculative_tokens" not in config:
        raise _refused("num_speculative_tokens is missing")
    _check_count("num_speculative_tokens", config["num_speculative_tokens"])
    return _lookup(config) if method == "ngram" else _draft_model(config)


def _lookup(config: Mapping[str, Any]) -> Speculation:
    longest = config.get("prompt_lookup_max", config.get("prompt_lookup_min", NGRAM))
    found = {**config, "prompt_lookup_max": longest, "prompt_lookup_min": config.get("prompt_lookup_min", longest)}
    for name in METHODS["ngram"]:
        _check_count(name, found[name])
    if found["prompt_lookup_min"] > longest:
        raise _refused(f"prompt_lookup_min={found['prompt_lookup_min']}: more than prompt_lookup_max={longest}")
    return Speculation(**found)


def _draft_model(config: Mapping[str, Any]) -> Speculation:
    model, revision = config.get("model"), config.get("revision")
    if type(model) is not str or not model:
        raise _refused(f"model={model!r}: a folder, a GGUF file, or a name at the model hub")
    if revision is not None and type(revision) is not str:
        raise _refused(f"revision={revision!r}: a text")
    return Speculation(**config)


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= MOST_TOKENS:
        raise _refused(f"{name}={value!r}: a whole number from 1 to {MOST_TOKENS}")


def _refused(problem: str) -> ConfigurationError:
    return ConfigurationError(f"omni.Autoregressive(speculative_config=…): {problem}")
