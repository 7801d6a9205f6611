"""How many frames each piece of sound has, alone and among many others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stage_runtime as omni
from stage_models.qwen3_omni import pieces, values
from stage_runtime import testing


def given_out(frames: int, arrivals: int, merged: int, initial: int = 4, steady: int = 25) -> list[list[int]]:
    """Sizes of the vocoder's calls, by what is sent as one. arrivals: frames that come at once."""
    plan, found, waiting = pieces.Pieces(initial, steady, merged), [], 0
    left = frames
    while left:
        come = min(arrivals, left)
        left, waiting = left - come, waiting + come
        while (taken := plan.take(waiting)) is not None:
            found.append(taken)
            waiting -= sum(taken)
    return [*found, plan.rest(waiting)] if waiting else found


def test_pieces_double_up_to_the_steady_size() -> None:
    assert given_out(100, 1, 1) == [[4], [8], [16], [25], [25], [22]]
    assert given_out(30, 1, 1, initial=30) == [[30]]
    assert given_out(65, 1, 1, initial=30, steady=10) == [[30], [30], [5]]


@pytest.mark.parametrize(("speaking", "first"), [(1, 4), (4, 4), (5, 12), (12, 12), (13, 28), (64, 28)])
def test_the_first_piece_grows_with_the_requests_that_are_spoken_at_once(speaking: int, first: int) -> None:
    assert sum(given_out(200, 1, pieces.opening(speaking))[0]) == first


def test_a_long_piece_is_sent_as_one_and_made_by_several_calls() -> None:
    """One call of 4096 frames would take many GB of memory, and all other requests would wait for it."""
    assert given_out(4000, 1, 1, initial=700) == [[300, 300, 100]] * 5 + [[300, 200]]
    assert given_out(4000, 500, 1, initial=4096, steady=4096) == [[300] * 13 + [100]]


@given(frames=st.integers(1, 300), arrivals=st.integers(1, 40), merged=st.integers(1, 3))
def test_the_vocoder_is_called_with_the_same_sizes_whatever_the_load(frames: int, arrivals: int, merged: int) -> None:
    """So the bytes of the sound do not depend on it."""
    alone = [size for some in given_out(frames, 1, 1) for size in some]
    assert [size for some in given_out(frames, arrivals, merged) for size in some] == alone
    assert sum(alone) == frames


def test_a_request_among_many_gets_the_same_samples_in_a_longer_first_piece(tiny_omni: str) -> None:
    codes = torch.randint(0, 64, (60, 4), generator=torch.Generator().manual_seed(3))
    chunks = [omni.Chunk(values.Frames(codes=one)) for one in torch.split(codes, 1)]
    requests = [omni.OmniRequest(id=f"r{index}", kind="chat") for index in range(16)]
    name = "stage_models.qwen3_omni.stages:code2wav"
    (alone,) = testing.run_stage(name, requests[:1], {"r0": chunks}, model=tiny_omni)
    beside = testing.run_stage(name, requests, {one.id: chunks for one in requests}, model=tiny_omni)
    whole = torch.cat([chunk.samples for chunk in alone.data])
    firsts = {len(one.data[0].samples) for one in beside}
    assert len(alone.data[0].samples) == min(firsts)
    assert all(torch.equal(torch.cat([chunk.samples for chunk in one.data]), whole) for one in beside)


def test_an_answer_without_frames_is_heard_as_silence(tiny_omni: str) -> None:
    """A client who asked for sound looks for it in the answer."""
    asked = omni.OmniRequest(id="r", kind="chat")
    (found,) = testing.run_stage("stage_models.qwen3_omni.stages:code2wav", [asked], {"r": []}, model=tiny_omni)
    sounds = [one for one in found.data if isinstance(one, omni.Audio)]
    assert [(one.sample_rate, one.samples.tolist()) for one in sounds] == [(24_000, [0.0] * 4_800)]
