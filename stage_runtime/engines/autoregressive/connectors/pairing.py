"""The choice of a stage's connector: of its role with `disaggregation`. This module says what its engine must be for
that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.connectors import layouts
from stage_runtime.engines.autoregressive.connectors.decode import DecodeConnector
from stage_runtime.engines.autoregressive.connectors.hops import Fixed, Hops
from stage_runtime.engines.autoregressive.connectors.prefill import PrefillConnector
from stage_runtime.engines.autoregressive.connectors.registry import Around, Built
from stage_runtime.errors import ConfigurationError
from stage_runtime.kv_transfer.rooms import KVManager

WHERE: Final = "disaggregation: omni.Autoregressive"


def check(spec: Autoregressive, role: str) -> None:
    """Raises: ConfigurationError: this engine could not give or take blocks, so its prefill group would be idle."""
    if not role:
        return
    refused = (
        (spec.engine != "own", f"(engine={spec.engine!r}): engine='own' alone transfers KV"),
        (not spec.prefix_caching, "(prefix_caching=False): blocks that come are found as a prefix"),
    )
    for wrong, what in refused:
        if wrong:
            raise ConfigurationError(WHERE + what)
    least = spec.remote_prefill_tokens
    if least != "auto" and not (type(least) is int and least >= 1):
        raise ConfigurationError(f"omni.Autoregressive(remote_prefill_tokens={least!r}): 'auto', or at least 1")


def connect(spec: Autoregressive, loaded: Built, around: Around) -> None:
    """Connects the engine of a prefill or decode stage, which does not run yet, with its peers.

    Raises: ConfigurationError: the model keeps state that cannot be sent to another engine.
    """
    assert around.rooms is not None
    layouts.check(loaded.runner, WHERE)
    layout = layouts.layout_of(loaded.runner, spec, loaded.weights)
    manager = KVManager(layouts.args_of(loaded.runner), around.rooms, layout, checksum=spec.kv_checksum)
    if around.role == "prefill":
        PrefillConnector(loaded.core, manager, post=around.post)
    else:
        least = spec.remote_prefill_tokens
        hops = Hops(tokens_per_s(loaded, spec.max_chunk)) if least == "auto" else Fixed(least)
        auto = ", until links to them were measured" if least == "auto" else ""
        around.progress(
            f"prompts that lack {hops.least_tokens} tokens or more are prefilled by prefill instances{auto}"
        )
        DecodeConnector(loaded.core, manager, post=around.post, source=around.source, hops=hops)
    assert loaded.core.kv is not None
    loaded.core.kv.notice = around.notice


def tokens_per_s(loaded: Built, chunk: int, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """How many tokens of a prompt this engine computes. The model is warm."""
    tokens = max(min(chunk, loaded.core.scheduler.longest - 1), 1)
    begun = clock()
    loaded.runner.execute_dummy_batch(tokens)
    return tokens / max(clock() - begun, 1e-9)
