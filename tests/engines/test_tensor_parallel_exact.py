"""Two ranks answer as one does; when one ends, the other says so and ends."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stage_runtime.engines.autoregressive.model.models import UnsupportedModel
from stage_runtime.engines.autoregressive.tensor_parallel import sharding
from tests.engines.generation_kit import VOCABULARY, Answers, alone, alone_with, tiny_model, tiny_tokenizer
from tests.engines.lora_kit import adapter, merged
from tests.engines.rank_threads import ranked

WAIT_S = 200  # two processes that import torch and transformers, on a machine that others use
ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.timeout(300)


def prompts(lengths: list[int]) -> dict[str, list[int]]:
    draw = random.Random(8)
    return {str(index): [draw.randrange(VOCABULARY) for _ in range(length)] for index, length in enumerate(lengths)}


@contextlib.contextmanager
def ranks(
    folder: Path, kind: str, kernels: str, speculative: Any = None, adapted: str = "", **dies: str
) -> Iterator[list[subprocess.Popen[str]]]:
    started = []
    try:
        for rank in range(2):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "SPECULATIVE": json.dumps(speculative)}
            if adapted:
                environment["ADAPTER"] = adapted
            if f"rank{rank}" in dies:
                environment["DIES_IN_PASS"] = dies[f"rank{rank}"]
            arguments = [str(rank), "2", str(folder / "meeting"), kind, kernels]
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.engines.tensor_rank", *arguments],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def printed(output: str) -> list[Any]:
    return [json.loads(line) for line in output.splitlines()]


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 1}


def test_two_ranks_as_threads_give_the_tokens_of_one() -> None:
    by_name = prompts([3, 17, 40, 9])
    with ranked("llama", 2, kernels="auto", speculative_config=NGRAM) as core:
        answers = Answers(core)
        for name, prompt in by_name.items():
            answers.ask(name, prompt)
        answers.run()
        assert core.scheduler.stats.accepted_tokens > 0
    assert answers.tokens == {name: alone("llama", prompt, 12) for name, prompt in by_name.items()}


@pytest.mark.nightly  # each time: the test above, and two processes in e2e/test_tensor_parallel_language.py
@pytest.mark.parametrize(
    ("kind", "kernels", "speculative"),
    [
        ("llama", "auto", NGRAM),
        ("llama", "auto", {"method": "draft_model", "num_speculative_tokens": 4}),  # as threads: test_draft_model.py
        ("gpt_neox", "torch", None),
        ("qwen3", "torch", None),
        ("gemma2", "torch", None),
    ],
)
def test_two_ranks_give_the_tokens_of_one_each_with_half_of_the_heads(
    tmp_path: Path, kind: str, kernels: str, speculative: Any
) -> None:
    by_name = prompts([3, 17, 40, 9])
    if speculative is not None and speculative["method"] == "draft_model":
        speculative = {**speculative, "model": str(tmp_path / "draft")}
        tiny_model(kind).save_pretrained(tmp_path / "draft")
        tiny_tokenizer().save_pretrained(tmp_path / "draft")
    with ranks(tmp_path, kind, kernels, speculative) as (first, second):
        output, errors = first.communicate(json.dumps(by_name), timeout=WAIT_S)
        assert first.returncode == 0, errors
        facts, answers, accepted = printed(output)
        assert (accepted > 0) == (speculative is not None)
        assert answers == {name: alone(kind, prompt, 12) for name, prompt in by_name.items()}
        assert facts["kv_heads"] * 2 == (4 if kind in ("gpt_neox",) else 2)
        _output, errors = second.communicate(timeout=WAIT_S)
        assert second.returncode == 0, errors


@pytest.mark.nightly  # by ranks as threads each time: test_lora_exact.py
def test_two_ranks_by_gloo_compute_an_adapter_each_with_its_share(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "one")
    models = [tiny_model("llama"), merged("llama", folder)]
    by_name = prompts([3, 17, 40, 9])
    with ranks(tmp_path, "llama", "torch", adapted=folder) as (first, second):
        output, errors = first.communicate(json.dumps(by_name), timeout=WAIT_S)
        assert first.returncode == 0, errors
        _facts, answers, _accepted = printed(output)
        expected = {name: alone_with(models[int(name) % 2], prompt, 12) for name, prompt in by_name.items()}
        assert answers == expected
        _output, errors = second.communicate(timeout=WAIT_S)
        assert second.returncode == 0, errors


# A pipeline kills rank 1 each time: e2e/test_tensor_parallel.py.
@pytest.mark.long
@pytest.mark.parametrize("dying", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_other_rank_says_that_one_has_ended_and_ends(tmp_path: Path, dying: int) -> None:
    with ranks(tmp_path, "llama", "torch", **{f"rank{dying}": "3"}) as both:
        assert both[0].stdin is not None
        both[0].stdin.write(json.dumps(prompts([3, 17])))
        both[0].stdin.close()
        both[0].stdin = None
        survivor = both[1 - dying]
        output, errors = survivor.communicate(timeout=WAIT_S)
        assert survivor.returncode == 3, errors
        assert f"tensor-parallel rank {1 - dying} of 2" in printed(output)[-1]["lost"]
        assert both[dying].wait(WAIT_S) == 9


class Fixed:
    """Ranks of a given number, none of which is ever called."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="declares no plan"):
        sharding.shard(tiny_model("gpt2"), Fixed(2))  # type: ignore[arg-type]


class OddExperts(nn.Module):
    """Weights by the plan's names, and one that is not in it."""

    def __init__(self, inner: int, **more: nn.Parameter) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 2 * inner, 4))
        self.down_proj = nn.Parameter(torch.zeros(2, 4, inner))
        for name, weight in more.items():
            setattr(self, name, weight)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (OddExperts(6, gate_up_proj_bias=nn.Parameter(torch.zeros(2, 12))), "of another form"),
        (OddExperts(3), "cannot be shared by 2 ranks"),
    ],
)
def test_experts_that_cannot_be_cut_are_refused(experts: OddExperts, message: str) -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.experts = experts
    model.config.base_model_tp_plan = {"layers.*.mlp.experts": "moe_tp_experts"}
    with pytest.raises(UnsupportedModel, match=message):
        sharding.shard(model, Fixed(2))  # type: ignore[arg-type]


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="2 KV heads cannot be shared by 4 ranks"):
        sharding.shard(tiny_model("llama"), Fixed(4))  # type: ignore[arg-type]
