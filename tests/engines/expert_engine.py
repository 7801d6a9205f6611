"""The factory of engine processes that share experts, with utilities by which tests look into them and break them."""

from __future__ import annotations

from typing import Any

from stage_runtime.engines.autoregressive.core.engine_core import EngineCore
from stage_runtime.engines.autoregressive.core.serving import Served
from stage_runtime.engines.autoregressive.expert_parallel.experts import ExpertRunner, ExpertsShare
from stage_runtime.engines.autoregressive.expert_parallel.places import Place
from stage_runtime.engines.autoregressive.process import served

FACTORY = "tests.engines.expert_engine:engine"


def engine(*, place: Place | None = None, **fields: Any) -> Served:
    made = served.autoregressive(place=place, **fields)
    return made._replace(
        utilities={"experts": experts, "break_next_pass": break_next_pass, "meetings": meetings, "breaks": breaks}
    )


def experts(core: EngineCore) -> tuple[list[int], str]:
    """How many experts each mixture of this engine has, and the class that read the checkpoint."""
    model = _runner(core).model.model
    kept = [
        len(dict(one.share.named_parameters())["down_proj"]) for one in model.modules() if isinstance(one, ExpertsShare)
    ]
    return kept, type(model).__qualname__


def break_next_pass(core: EngineCore) -> None:
    """The last layer of the next pass with a row of each of two requests raises, after the mixtures before it.

    A request whose pass fails alone is not computed again.
    """
    layer = _runner(core).model.decoder_layers[-1]

    def fail(_module: Any, given: Any) -> None:
        hidden = given[0]
        if hidden.numel() == 2 * hidden.shape[-1]:
            hook.remove()
            broken.append(True)
            raise ValueError("as asked")

    hook = layer.register_forward_pre_hook(fail)


broken: list[bool] = []  #: One for each pass that was broken in this process.


def breaks(_core: EngineCore) -> int:
    return len(broken)


def meetings(core: EngineCore) -> int:
    return _runner(core).ranks.meetings


def _runner(core: EngineCore) -> ExpertRunner:
    runner: ExpertRunner = core.executor.call(lambda runner: runner).result()
    return runner
