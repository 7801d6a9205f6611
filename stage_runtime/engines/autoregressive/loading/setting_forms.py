"""Settings of several values, and numbers with a least value, checked before anything is loaded. Called by `loader`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.sampling import parameters
from stage_runtime.errors import ConfigurationError

LEAST_FROZEN_S: Final = 2.0  # an engine gives a sign of life each second


def check(spec: Autoregressive) -> None:
    """Raises: ConfigurationError: a value is not allowed; it is named."""
    if spec.max_model_len is not None and spec.max_model_len < 1:
        raise _refused("max_model_len", spec.max_model_len, "None, or at least 1")
    if spec.frozen_after_s < LEAST_FROZEN_S:
        problem = f"at least {LEAST_FROZEN_S:g}: an engine gives a sign of life each second"
        raise _refused("frozen_after_s", spec.frozen_after_s, problem)
    _check_kept(spec.keep_rows)
    _check_cores(spec.cores)
    parameters.of_stage(spec.params)


def _check_kept(given: Any) -> None:
    """Whether there are such layers, the model says later."""
    if given is None:
        return
    pairs: Iterable[tuple[Any, Any]] = given.items() if isinstance(given, Mapping) else [(None, None)]
    for name, kept in pairs:
        pair = isinstance(kept, tuple | list) and len(kept) == 2
        if not isinstance(name, str) or not pair or type(kept[0]) is not int or not isinstance(kept[1], str):
            raise _refused("keep_rows", given, "expected (layer, of) by names")


def _check_cores(given: Any) -> None:
    allowed = os.sched_getaffinity(0)
    for cores in given if isinstance(given, tuple | list) else [given]:
        if not isinstance(cores, tuple | list) or not cores or any(type(core) is not int for core in cores):
            raise _refused("cores", given, "expected a list of processors for each engine")
        if not allowed.issuperset(cores):
            raise _refused("cores", given, f"this process may use {', '.join(map(str, sorted(allowed))):.300}")


def _refused(name: str, value: object, problem: str) -> ConfigurationError:
    return ConfigurationError(f"omni.Autoregressive({name}={value!r:.200}): {problem}")
