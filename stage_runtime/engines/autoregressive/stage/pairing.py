"""The choice of a stage's connector: of its role with `disaggregation`. What its engine must be for that."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from stage_runtime.api import Autoregressive, StageContext
from stage_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from stage_runtime.engines.autoregressive.core.kv_connector import Post
    from stage_runtime.engines.autoregressive.loading.loader import Loaded

log = logging.getLogger(__name__)

WHERE: Final = "disaggregation: omni.Autoregressive"


def check(spec: Autoregressive) -> None:
    """Raises: ConfigurationError: this engine could not give or take blocks, so its prefill group would be idle."""
    refused = (
        (spec.engine != "own", f"(engine={spec.engine!r}): engine='own' alone transfers KV"),
        (spec.own_process, "(own_process=True): an engine process has no relays"),
        (
            spec.data_parallel_size > 1,
            f"(data_parallel_size={spec.data_parallel_size}): scale the stage's group instead",
        ),
        (bool(spec.kv_folder), f"(kv_folder={spec.kv_folder!r}): blocks come from prefill or from a folder"),
        (not spec.prefix_caching, "(prefix_caching=False): blocks that come are found as a prefix"),
    )
    for wrong, what in refused:
        if wrong:
            raise ConfigurationError(WHERE + what)
    if type(spec.kv_checksum) is not bool:
        raise ConfigurationError(f"omni.Autoregressive(kv_checksum={spec.kv_checksum!r}): True or False")
    least = spec.remote_prefill_tokens
    if least != "auto" and not (type(least) is int and least >= 1):
        raise ConfigurationError(f"omni.Autoregressive(remote_prefill_tokens={least!r}): 'auto', or at least 1")


def connect(
    spec: Autoregressive,
    loaded: Loaded,
    context: StageContext,
    *,
    post: Post,
    origin: Callable[[str], str | None],
) -> None:
    """Before the engine runs. Raises: ConfigurationError: the model keeps what does not cross."""
    from stage_runtime.engines.autoregressive.connectors import layouts, prefill
    from stage_runtime.engines.autoregressive.connectors.decode import DecodeConnector
    from stage_runtime.engines.autoregressive.connectors.hops import Fixed, Hops
    from stage_runtime.engines.autoregressive.connectors.prefill import PrefillConnector
    from stage_runtime.kv_transfer.rooms import KVManager

    layouts.check(loaded.runner, WHERE)
    layout = layouts.layout_of(loaded.runner, spec, loaded.weights)
    manager = KVManager(layouts.args_of(loaded.runner), context.kv, layout, checksum=spec.kv_checksum)
    if context.kv_role == "prefill":
        PrefillConnector(loaded.core, manager, post=post)
        _notice(loaded, context, origin=prefill.origin)
        return
    least = spec.remote_prefill_tokens
    hops = Hops(tokens_per_s(loaded, spec.max_chunk)) if least == "auto" else Fixed(least)
    where = f"prefilled by {context.name}'s prefill instances"
    auto = ", until links to them were measured" if least == "auto" else ""
    context.progress(f"prompts that lack {hops.least_tokens} tokens or more are {where}{auto}")
    DecodeConnector(loaded.core, manager, post=post, origin=origin, hops=hops)
    _notice(loaded, context, origin=origin)


def _notice(loaded: Loaded, context: StageContext, *, origin: Callable[[str], str | None]) -> None:
    """Record the profiler's events of loads under the ids of their requests."""

    def notice(event: str, name: str, **metadata: object) -> None:
        request_id = origin(name)
        if request_id is not None:
            context.emit(event, request_id, **metadata)

    assert loaded.core.kv is not None
    loaded.core.kv.notice = notice


def tokens_per_s(loaded: Loaded, chunk: int, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """How many tokens of a prompt this engine computes. The model is warm."""
    tokens = max(min(chunk, loaded.core.scheduler.longest - 1), 1)
    begun = clock()
    loaded.runner.execute_dummy_batch(tokens)
    return tokens / max(clock() - begun, 1e-9)
