"""One tensor-parallel rank of a thinker: ``python -m tests.qwen3_omni.thinker_rank RANK SIZE FILE CHECKPOINT``.

Rank 0 prints the answers to prompts with rows of pictures, positions on three axes and rows added after layers.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import stage_runtime as omni
from stage_runtime.engines.autoregressive.loading import loader
from stage_runtime.engines.autoregressive.tensor_parallel.ranks import Ranks, follow
from stage_runtime.engines.autoregressive.text.prompt_rows import ROW, AddedRows
from tests.engines.generation_kit import Answers

SHAPES = ((0, 9), (6, 21), (20, 70), (3, 40))  #: Rows of a picture, and tokens, of each prompt.


def answered(folder: str, ranks: Ranks | None) -> dict[str, list[int]]:
    torch.set_num_threads(1)
    spec = omni.Autoregressive(
        model=folder,
        decoder="stage_models.qwen3_omni.decoders:Thinker",
        max_batched_tokens=32,
        max_chunk=16,
        max_requests=8,
    )
    loaded = loader.load(spec, ranks=ranks)
    if ranks is not None and ranks.rank:
        follow(loaded.runner, ranks)
        return {}
    answers = Answers(loaded.core)
    for index, (seen, count) in enumerate(SHAPES):
        tokens, rows = prompt(index, seen, count)
        answers.ask(str(index), tokens, **rows)
        answers.step()
    answers.run()
    loaded.core.shutdown()
    return answers.tokens


def prompt(index: int, seen: int, count: int) -> tuple[list[int], dict[str, Any]]:
    """Tokens, and what `EngineCoreRequest` gets beside them."""
    draw = torch.Generator().manual_seed(index)
    tokens = torch.randint(10, 200, (count,), generator=draw).tolist()
    if not seen:
        return tokens, {}
    where = torch.arange(count).expand(3, -1).clone()
    where[1:, 2 : 2 + seen] = torch.randint(2, 2 + seen, (2, seen), generator=draw)
    rows = torch.randn(seen, 64, generator=draw)
    places = list(range(2, 2 + seen))
    added = [AddedRows(layer, places, torch.randn(seen, 64, generator=draw)) for layer in (0, 1)]
    tokens[2 : 2 + seen] = [ROW] * seen
    given = {"prompt_embeds": rows, "prompt_positions": where, "position_delta": -1, "added_rows": added}
    return tokens, given


def main(rank: int, size: int, file: str, folder: str) -> None:
    print(json.dumps(answered(folder, Ranks(rank, size, init_method=f"file://{file}", sum_timeout_s=200))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
