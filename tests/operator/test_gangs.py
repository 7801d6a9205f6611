"""Pipelines that wait for GPUs which others hold, as a table, and simulated beside a scheduler that places any pod."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from omnipipeline_operator.changes import gangs
from omnipipeline_operator.changes.gangs import Gang, Yielded
from tests.thoroughness import examples

P = 60.0
NOW = 1_000_000.0


def gang(name: str, age: float, **more: object) -> Gang:
    return Gang(name=name, created_at=NOW - age, **{"needs": 3, **more})  # type: ignore[arg-type]


def stuck(name: str, age: float, *, held: int = 2, for_s: float = P, **more: object) -> Gang:
    return gang(name, age, held=held, stuck_since=NOW - for_s, **more)


AWAY = Yielded(since=NOW - P, to="a", gpus=4, tries=1)
OLD = gang("a", 100, serves=True, held=3)


@pytest.mark.parametrize(
    ("own", "others", "kept"),
    [
        pytest.param(stuck("b", 10), [stuck("a", 20)], Yielded(since=NOW, to="a", gpus=4, tries=1), id="younger"),
        pytest.param(stuck("a", 20), [stuck("b", 10)], None, id="older"),
        pytest.param(stuck("b", 10), [stuck("a", 10)], Yielded(since=NOW, to="a", gpus=4, tries=1), id="of one age"),
        pytest.param(stuck("b", 10, for_s=P - 1), [stuck("a", 20)], None, id="not long yet"),
        pytest.param(stuck("b", 10, held=0), [stuck("a", 20)], None, id="holds nothing"),
        pytest.param(stuck("b", 10, serves=True), [stuck("a", 20)], None, id="serves"),
        pytest.param(stuck("b", 10), [stuck("a", 20, serves=True)], None, id="beside one that serves"),
        pytest.param(stuck("b", 10), [gang("a", 20, held=3)], None, id="beside one that starts"),
        pytest.param(stuck("b", 10, for_s=9 * P), [], None, id="alone: a node may be on its way"),
        pytest.param(stuck("b", 10, needs=0), [stuck("a", 20)], None, id="wants no GPU"),
        pytest.param(
            stuck("a", 20, held=4, for_s=2 * P),
            [gang("b", 10, yielded=AWAY)],
            Yielded(since=NOW, to="b", gpus=4, tries=1, failed=1),
            id="the first one has all there is, and too few",
        ),
        pytest.param(stuck("a", 20, held=4), [gang("b", 10, yielded=AWAY)], None, id="not for long yet"),
        pytest.param(stuck("a", 20, for_s=2 * P), [stuck("b", 10, held=1)], None, id="another one holds a part still"),
        pytest.param(gang("b", 10, yielded=AWAY), [OLD], AWAY, id="no room beside it"),
        pytest.param(
            gang("b", 10, needs=1, yielded=AWAY),
            [OLD],
            Yielded(since=None, to="a", gpus=4, tries=1),
            id="room beside it",
        ),
        pytest.param(gang("b", 10, yielded=AWAY), [], Yielded(since=None, to="a", gpus=4, tries=1), id="it is gone"),
        pytest.param(gang("b", 10, held=1, yielded=AWAY), [], AWAY, id="its own pods end still"),
        pytest.param(gang("b", 10, yielded=AWAY), [stuck("a", 20)], AWAY, id="one before it waits"),
        pytest.param(
            gang("b", 10, yielded=AWAY),
            [stuck("c", 5)],
            Yielded(since=None, to="a", gpus=4, tries=1),
            id="one behind it waits, and will let go",
        ),
        pytest.param(
            gang("b", 10, yielded=Yielded(since=NOW - 2 * P, gpus=4, tries=1)),
            [OLD],
            Yielded(since=None, gpus=4, tries=1),
            id="there may be a new node",
        ),
        pytest.param(
            gang("b", 10, yielded=Yielded(since=NOW - 2 * P, gpus=4, tries=2)),
            [OLD],
            Yielded(since=NOW - 2 * P, gpus=4, tries=2),
            id="twice as long after the second time",
        ),
        pytest.param(
            stuck("b", 10, held=1, yielded=Yielded(since=None, gpus=4, tries=1)),
            [OLD],
            Yielded(since=NOW, gpus=4, tries=2, failed=1),
            id="it came back in vain",
        ),
        pytest.param(
            gang("b", 10, held=3, yielded=Yielded(since=None, tries=1), serves=True), [], None, id="it serves"
        ),
    ],
)
def test_who_lets_go_and_who_comes_back(own: Gang, others: list[Gang], kept: Yielded | None) -> None:
    assert gangs.decide(own, others, now=NOW, patience_s=P) == kept


# --- anything ---------------------------------------------------------------------------------------------------

STEP_S = P / 4


@dataclass
class Simulated:
    """One pipeline of pods that want a GPU each."""

    name: str
    created_at: float
    needs: int
    placed: int = 0
    leaving: int = 0  #: GPUs of pods that end.
    stuck_since: float | None = None
    serves: bool = False
    yielded: Yielded | None = None
    gone: bool = False

    def seen(self) -> Gang:
        is_stuck = self.stuck_since if self.placed < self.needs and not self.away else None
        return Gang(
            name=self.name,
            created_at=self.created_at,
            serves=self.serves,
            needs=self.needs,
            held=self.placed + self.leaving,
            stuck_since=is_stuck,
            yielded=self.yielded,
        )

    @property
    def away(self) -> bool:
        return self.yielded is not None and self.yielded.since is not None


@dataclass
class Cluster:
    """A scheduler that gives a free GPU to any pod that waits."""

    gpus: int
    pipelines: list[Simulated]
    draws: Random
    now: float = NOW
    let_go: list[tuple[str, bool]] = field(default_factory=list)  #: Who has let go, and whether it served.

    def live(self) -> list[Simulated]:
        return [one for one in self.pipelines if not one.gone and one.created_at <= self.now]

    def step(self) -> None:
        self.now += STEP_S
        for one in self.draws.sample(self.live(), len(self.live())):
            others = [each.seen() for each in self.live() if each is not one]
            kept = gangs.decide(one.seen(), others, now=self.now, patience_s=P)
            if kept is not None and kept.since is not None and not one.away:
                self.let_go.append((one.name, one.serves))
                one.placed, one.leaving, one.stuck_since = 0, one.placed, None
            one.yielded = kept
        self.schedule()
        for one in self.live():
            one.leaving = one.leaving and one.leaving - 1

    def schedule(self) -> None:
        wanting = [one for one in self.live() if not one.away for _ in range(one.needs - one.placed)]
        free = self.gpus - sum(one.placed + one.leaving for one in self.live())
        assert free >= 0
        for one in self.draws.sample(wanting, min(free, len(wanting))):
            one.placed += 1
        for one in self.live():
            one.serves = one.serves or one.placed == one.needs
            waits = not one.away and one.placed < one.needs
            one.stuck_since = (one.stuck_since or self.now) if waits else None


@pytest.mark.proves("gangs")
@settings(max_examples=examples(40), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
def test_no_pipelines_wait_for_each_other_for_ever_and_none_that_serves_lets_go(
    gpus: int, asked: list[tuple[int, int]], seed: int
) -> None:
    pipelines = [
        Simulated(name=f"p{number}", created_at=NOW + begin * STEP_S, needs=needs)
        for number, (needs, begin) in enumerate(asked)
    ]
    cluster = Cluster(gpus=gpus, pipelines=pipelines, draws=Random(seed))
    horizon = 4 * 24 * len(asked)  # 24 times the patience for each
    for _ in range(horizon):
        cluster.step()
    assert not any(served for _, served in cluster.let_go)
    holding = [one.name for one in pipelines if not one.serves and one.placed]
    assert len(holding) <= 1, holding
    left = gpus - sum(one.needs for one in pipelines if one.serves)
    assert [one.name for one in pipelines if not one.serves and one.needs <= left] == [], "there is room"
    assert all(times <= 8 for times in Counter(name for name, _ in cluster.let_go).values()), "it comes and goes"
    for one in pipelines:
        one.gone = one.serves
    for _ in range(horizon):
        cluster.step()
    fitting = [one.name for one in cluster.live() if one.needs <= gpus]
    assert not fitting or any(one.serves for one in cluster.live()), "those that ended have made room"
