"""One tensor-parallel rank in a process of its own: `python -m tests.engines.tensor_rank RANK SIZE FILE KIND KERNELS`.

Rank 0 answers the prompts that it reads from its input as JSON, and prints the answers; any rank prints why it ended.
A rank whose environment has DIES_IN_PASS ends its process in that pass. SPECULATIVE: a `speculative_config`, as JSON.
ADAPTER: a folder; requests of an odd number are computed with it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import stage_runtime as omni
from stage_runtime.engines.autoregressive.loading import loader
from stage_runtime.engines.autoregressive.model.model_runner import ModelRunner
from stage_runtime.engines.autoregressive.tensor_parallel.ranks import RankLost, Ranks, follow
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import ROW
from tests.engines.generation_kit import Answers, rows_of, tiny_model, tiny_tokenizer

ROWS = "13"  #: Requests whose prompts are given as embeddings.


def die_in(runner: ModelRunner, last: int) -> None:
    """End this process at the beginning of a pass, as a rank does that is killed."""
    inner, passes = runner.model.forward, 0

    def forward(*arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == last:
            os._exit(9)
        return inner(*arguments)

    runner.model.forward = forward  # type: ignore[method-assign,assignment]


def main(rank: int, size: int, file: str, kind: str, kernels: str) -> None:
    ranks = Ranks(rank, size, init_method=f"file://{file}", sum_timeout_s=100)
    spec = omni.Autoregressive(
        model="in memory",
        kernels=kernels,
        block_size=4,
        max_requests=8,
        max_batched_tokens=32,
        max_chunk=16,
        speculative_config=json.loads(os.environ.get("SPECULATIVE", "null")),
        lora_modules={"one": os.environ["ADAPTER"]} if "ADAPTER" in os.environ else None,
    )
    loaded = loader.assemble(spec, tiny_model(kind), tiny_tokenizer(), ranks=ranks)
    print(json.dumps({"kv_heads": loaded.runner.model.layers[0].kv_heads}), flush=True)
    if "DIES_IN_PASS" in os.environ:
        die_in(loaded.runner, int(os.environ["DIES_IN_PASS"]))
    if rank:
        follow(loaded.runner, ranks)
        return
    answers = Answers(loaded.core)
    for name, prompt in json.load(sys.stdin).items():
        adapter = "one" if "ADAPTER" in os.environ and int(name) % 2 else ""
        if name in ROWS:
            answers.ask(name, [ROW] * len(prompt), prompt_embeds=rows_of(kind, prompt), adapter=adapter)
        else:
            answers.ask(name, prompt, adapter=adapter)
        answers.step()
    answers.run()
    loaded.core.shutdown()
    print(json.dumps(answers.tokens), flush=True)
    print(loaded.core.scheduler.stats.accepted_tokens, flush=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    try:
        main(int(arguments[0]), int(arguments[1]), *arguments[2:])
    except RankLost as error:
        print(json.dumps({"lost": str(error)}), flush=True)
        os._exit(3)
