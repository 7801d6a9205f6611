"""Blocks between engines of different numbers of tensor-parallel ranks: each rank gets the heads that it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.engines.autoregressive.model.paged_attention.block_pages import BlockPages, Page
from stage_runtime.engines.autoregressive.tensor_parallel import shares
from stage_runtime.engines.autoregressive.tensor_parallel.ranks import RankLost, RankPages
from tests.engines.generation_kit import alone
from tests.engines.kv_pair_kit import Pair, prompts
from tests.engines.rank_threads import ranked

PROMPT = prompts(1)[0]


@pytest.mark.parametrize(
    ("prefill", "decode", "kind"), [(1, 2, "llama"), (2, 1, "qwen2"), (2, 4, "gpt_neox"), (4, 1, "gpt_neox")]
)
def test_a_prompt_crosses_between_any_numbers_of_ranks(prefill: int, decode: int, kind: str) -> None:
    with ranked(kind, prefill) as p, ranked(kind, decode) as d:
        pair = Pair(kind, cores=(d, p))
        for index, prompt in enumerate(prompts(3, 50)):
            pair.d.ask(f"r{index}", prompt)
        pair.run()
        assert pair.d.tokens == {f"r{index}": alone(kind, prompt, 12) for index, prompt in enumerate(prompts(3, 50))}
        assert pair.counts["received_blocks"] == 3 * 12
        assert pair.leaked == [0, 0]
        pair.close()


def test_rows_that_rank_0_keeps_cross_beside_the_heads_of_all_ranks() -> None:
    keep: dict[str, Any] = {"keep_rows": {"hidden": (1, "prompt")}}
    with ranked("llama", 2, **keep) as p, ranked("llama", 1, **keep) as d:
        pair = Pair(cores=(d, p))
        given: list[Any] = []
        step = d.step_fn

        def noted() -> Any:
            stepped = step()
            given.extend(one.rows for one in stepped[0] if one.rows is not None and one.rows.prompt)
            return stepped

        d.step_fn = noted
        pair.d.ask("r", PROMPT)
        pair.run()
        (found,) = [one.prompt["hidden"] for one in given]
        assert pair.d.tokens["r"] == alone("llama", PROMPT, 12)
        assert pair.counts["received_blocks"] == 7
        assert torch.isfinite(found).all() and len(found) == len(PROMPT)
        pair.close()


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int, int]:
    """Pages of a whole block as (tokens, bytes of all heads), the two numbers of ranks, and how many blocks."""
    left, right = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    widths = st.integers(1, 5).map(lambda one: 4 * one)
    pages = draw(st.lists(st.tuples(st.integers(1, 4), widths), min_size=1, max_size=3))
    return pages, left, right, draw(st.integers(1, 3))


@given(cuts())
def test_heads_that_are_split_for_one_number_of_ranks_are_joined_from_another(
    case: tuple[list[tuple[int, int]], int, int, int],
) -> None:
    pages, left, right, count = case
    nbytes = count * sum(size * width for size, width in pages)
    whole = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    there = shares.split(whole, left, [(size, width // left) for size, width in pages], count)
    again = shares.join(there, [(size, width // left) for size, width in pages], count)
    assert again.equal(whole)
    here = shares.split(again, right, [(size, width // right) for size, width in pages], count)
    at = 0
    for size, width in pages:  # the first page of rank r: its columns of all heads
        rows = whole[at : at + count * size * width].view(-1, right, width // right)
        first = at // right
        for rank, part in enumerate(here):
            assert part[first : first + count * size * width // right].equal(rows[:, rank].flatten())
        at += count * size * width


class Alone:
    """Ranks of which the others are gone."""

    size, rank = 2, 0

    def send(self, order: Any) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_rank_that_is_gone_while_blocks_cross_ends_the_engine() -> None:
    pages = BlockPages([Page("0.key", torch.zeros(8, 4, 2, 8))])
    whole = RankPages(pages, Alone())  # type: ignore[arg-type]
    assert (whole.shapes, whole.block_nbytes) == ([("0.key", (4, 4, 8))], 2 * pages.block_nbytes)
    with pytest.raises(RankLost, match="not given out: RuntimeError: Connection closed"):
        whole.export([1])
    with pytest.raises(RankLost, match="not taken in: RuntimeError: Connection closed"):
        whole.load([1], torch.zeros(whole.block_nbytes, dtype=torch.uint8))
    with pytest.raises(ValueError, match="bytes"):
        whole.load([1], torch.zeros(pages.block_nbytes, dtype=torch.uint8))
