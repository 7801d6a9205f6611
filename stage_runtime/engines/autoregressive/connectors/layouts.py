"""The form of an engine's blocks: the layout that both ends of a room compare, and the pages as bytes."""

from __future__ import annotations

from stage_runtime.api import Autoregressive
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.errors import ConfigurationError
from stage_runtime.kv_transfer.layout import KVLayout, KVPage
from stage_runtime.kv_transfer.rooms import KVArgs


def check(runner: ModelRunner, where: str) -> None:
    """Raises: ConfigurationError: blocks are not all that the model keeps of a prompt."""
    model = runner.model
    if model.state_layers or model.after_step is not None:
        what = "keeps state beside attention" if model.state_layers else "makes its own next rows"
        raise ConfigurationError(f"{where}: {type(model.model).__name__} {what}, which is not in its blocks")


def layout_of(runner: ModelRunner, spec: Autoregressive, weights: str) -> KVLayout:
    """weights: `model.digests.weights_digest`."""
    return KVLayout(
        model=spec.model,
        revision=spec.revision or "",
        weights=weights,
        dtype=str(runner.model.dtype).removeprefix("torch."),
        block_size=spec.block_size,
        pages=tuple(KVPage(name, shape) for name, shape in runner.pages.shapes),
    )


def args_of(runner: ModelRunner) -> KVArgs:
    pages = [one.values for one in runner.pages.pages]
    return KVArgs(
        engine_rank=0,
        kv_data_ptrs=[one.data_ptr() for one in pages],
        kv_data_lens=[one.nbytes for one in pages],
        kv_item_lens=runner.pages.item_nbytes,
    )
