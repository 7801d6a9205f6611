"""What an engine's blocks are: the layout that both ends of a room compare, and the pages as bytes."""

from __future__ import annotations

from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.kv_transfer.layout import KVLayout, KVPage
from stage_runtime.kv_transfer.rooms import KVArgs


def layout_of(runner: ModelRunner, *, model: str, revision: str, weights: str, block_size: int) -> KVLayout:
    """weights: `model.digests.weights_digest`, of a tensor-parallel rank before its model was cut."""
    return KVLayout(
        model=model,
        revision=revision,
        weights=weights,
        dtype=str(runner.model.dtype).removeprefix("torch."),
        block_size=block_size,
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
