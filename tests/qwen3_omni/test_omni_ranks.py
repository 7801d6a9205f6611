"""Two tensor-parallel ranks of the thinker and two of the talker answer as the whole model does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.qwen3_omni.omni_cases import CASES
from tests.qwen3_omni.test_omni_answers import STAGES, ask, check, pipeline

RANKED = {"thinker": "[0, 1]", "talker": "[2, 3]"}
RANKS = [f"stages.{name}.{field}" for name, gpus in RANKED.items() for field in ("tpSize=2", f"gpu={gpus}")]
#: One process for what has no ranks.
FRONT = [f"stages.{name}.process=front" for name in STAGES if name not in RANKED]

#: Sound, pictures, a prompt of several chunks, a talker that goes on after its thinker.
SOME = CASES


@pytest.mark.nightly  # four ranks take minutes; e2e/test_tensor_parallel_language.py is quick
@pytest.mark.timeout(600)
async def test_two_ranks_give_the_answers_of_the_whole_model(tiny_omni: str, oracle: dict[str, Any]) -> None:
    """Rows of pictures, positions on three axes and rows of layers cross to both ranks of the thinker. The talker's
    rank 0 chooses the codes of a frame and makes its next row, beside others and while rows of the stream come."""
    async with pipeline(tiny_omni, *RANKS, *FRONT, cpu=True) as client:
        for case, answer in zip(SOME, await asyncio.gather(*(ask(client, case) for case in SOME)), strict=True):
            check(tiny_omni, oracle, case, answer)
        groups = [one["group"] for one in (await client.get("/status")).json()["instances"]]
        assert sorted(groups) == ["front", "talker", "thinker"]
