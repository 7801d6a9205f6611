"""Pieces of several requests in one pass: what becomes of one request does nothing to the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from stage_models.qwen3_omni.batching import Batches
from stage_models.qwen3_omni.vocoder import State
from tests.engines.test_late_threads import no_thread_can_start
from tests.patience import patience

PATIENCE_S = patience(20.0)


class Scripted:
    """A vocoder that gives back its frames; it waits for ``go`` and raises for frames of -1."""

    def __init__(self, *, batched: bool) -> None:
        self.batched = batched
        self.go = threading.Event()
        self.begun = threading.Event()
        self.passes: list[int] = []

    def decode(self, pieces: Sequence[tuple[State, Tensor]]) -> list[Tensor]:
        self.begun.set()
        assert self.go.wait(60)
        self.passes.append(len(pieces))
        if any(int(frames[0, 0]) < 0 for _state, frames in pieces):
            raise ValueError("no such code")
        return [frames[:, 0].float() for _state, frames in pieces]


def ask(batches: Batches, *values: int) -> list[asyncio.Task[Tensor]]:
    return [asyncio.create_task(batches.decode(State(), torch.full((1, 4), value))) for value in values]


async def begun(vocoder: Scripted) -> None:
    assert await asyncio.to_thread(vocoder.begun.wait, 60)


@pytest.mark.parametrize("batched", [False, True])
async def test_a_request_that_is_aborted_takes_none_of_its_pass_along(batched: bool) -> None:
    vocoder: Any = Scripted(batched=batched)
    asked = ask(Batches(vocoder, 16), 1, 2, 3)
    await begun(vocoder)
    asked[0].cancel()  # the one that came first
    vocoder.go.set()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert [one.tolist() for one in found[1:] if isinstance(one, Tensor)] == [[2.0], [3.0]]


async def test_a_piece_that_cannot_be_decoded_fails_its_request_alone() -> None:
    vocoder: Any = Scripted(batched=False)
    vocoder.go.set()
    batches = Batches(vocoder, 16)
    found = await asyncio.gather(*ask(batches, 1, -1, 3), return_exceptions=True)
    assert [one.tolist() for one in (found[0], found[2]) if isinstance(one, Tensor)] == [[1.0], [3.0]]
    assert isinstance(found[1], ValueError)
    assert (await ask(batches, 4)[0]).tolist() == [4.0]


async def test_where_each_piece_is_computed_alone_it_is_given_out_before_the_next_one_is_computed() -> None:
    """The first of sixteen requests on a CPU was heard only after all of their pieces."""
    given = threading.Event()

    class Waiting:
        batched = False

        def decode(self, pieces: Sequence[tuple[State, Tensor]]) -> list[Tensor]:
            if int(pieces[0][1][0, 0]) == 2:
                assert given.wait(PATIENCE_S), "the samples of the first piece are held back"
            return [frames[:, 0].float() for _state, frames in pieces]

    vocoder: Any = Waiting()
    first, second = ask(Batches(vocoder, 16), 1, 2)
    assert (await first).tolist() == [1.0]
    given.set()
    assert (await second).tolist() == [2.0]


async def test_what_comes_during_a_pass_is_one_pass_up_to_the_bound() -> None:
    vocoder: Any = Scripted(batched=True)
    batches = Batches(vocoder, 2)
    first = ask(batches, 0)
    await asyncio.sleep(0)
    await begun(vocoder)
    later = ask(batches, 1, 2, 3)
    await asyncio.sleep(0)
    vocoder.go.set()
    assert [one.tolist() for one in await asyncio.gather(*first, *later)] == [[0.0], [1.0], [2.0], [3.0]]
    assert vocoder.passes == [1, 2, 1]


async def test_pieces_that_no_thread_can_decode_fail_and_later_ones_are_decoded() -> None:
    vocoder: Any = Scripted(batched=True)
    vocoder.go.set()
    batches = Batches(vocoder, 16)
    with no_thread_can_start():
        found = await asyncio.gather(*ask(batches, 1, 2), return_exceptions=True)
    assert [str(one) for one in found] == ["can't start new thread"] * 2
    assert (await ask(batches, 3)[0]).tolist() == [3.0]
