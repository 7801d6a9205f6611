"""One rank fails alone: the ranks have diverged, unless rank 0 only could not report the same failure yet."""

from __future__ import annotations

from typing import Any

import pytest

from stage_runtime.stage.ranks.rank_plane import RANKS_AGREE_S, RankPlane
from stage_runtime.wire.messages import RankFailed
from tests.coordinator.set_clock import SetClock


class Stage:
    """A stage with one request at work; it is its own input, and the request."""

    def __init__(self) -> None:
        self.over = False
        self.input = self

    def find(self, owner: str, request_id: str, attempt: int) -> Stage:
        return self


def ignored(*_: Any) -> None:
    """Takes what no test looks at."""


@pytest.mark.parametrize("fails_too", [True, False])
@pytest.mark.parametrize("stopped_s", [0.0, 600.0])
async def test_ranks_have_diverged_when_rank_0_does_not_fail_in_a_time_in_which_it_ran(
    stopped_s: float, fails_too: bool
) -> None:
    clock, stage, apart = SetClock(), Stage(), list[BaseException]()
    plane = RankPlane(
        object(),  # type: ignore[arg-type]
        stage,  # type: ignore[arg-type]
        loop=clock,  # type: ignore[arg-type]
        on_ready=ignored,
        on_apart=apart.append,
        on_lost=ignored,
        answer=ignored,
    )
    plane.received("rank1", RankFailed(1, "r1", "cc", 1, "ValueError"))
    clock.stop(stopped_s)
    clock.advance(RANKS_AGREE_S - 1)
    assert apart == []
    stage.over = fails_too
    clock.advance(2.0)
    assert [str(error) for error in apart] == (
        [] if fails_too else ["rank 1 failed alone, so the ranks have diverged: ValueError"]
    )
