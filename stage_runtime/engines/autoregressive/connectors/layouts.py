"""What an engine's blocks are: the layout that both ends of a room compare, and the pages as bytes."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch

from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.kv_transfer.layout import KVLayout, KVPage
from stage_runtime.kv_transfer.rooms import KVArgs

SAMPLED = 64  # values of each vector that go into the digest of the weights


def weights_digest(model: Any) -> str:
    """Of a transformers model: its configuration, and the first values of its vectors (norms, biases).

    Those are as they were loaded, also where matrices have been packed for this machine.
    """
    digest = blake2b(model.config.to_json_string(use_diff=False).encode(), digest_size=8)
    for _name, one in sorted(model.named_parameters()):
        if one.ndim == 1:
            digest.update(one.detach()[:SAMPLED].to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def layout_of(runner: ModelRunner, *, model: str, revision: str, block_size: int, tp_size: int = 1) -> KVLayout:
    return KVLayout(
        model=model,
        revision=revision,
        weights=weights_digest(runner.model.model),
        dtype=str(runner.model.dtype).removeprefix("torch."),
        block_size=block_size,
        tp_size=tp_size,
        pages=tuple(KVPage(one.name, tuple(one.values.shape[1:])) for one in runner.pages.pages),
    )


def args_of(runner: ModelRunner) -> KVArgs:
    pages = [one.values for one in runner.pages.pages]
    return KVArgs(
        engine_rank=0,
        kv_data_ptrs=[one.data_ptr() for one in pages],
        kv_data_lens=[one.nbytes for one in pages],
        kv_item_lens=[one.nbytes // len(one) for one in pages],
    )
