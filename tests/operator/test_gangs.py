"""Pipelines that wait for GPUs which others hold, as a table, and simulated beside a scheduler that places any pod."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from omnipipeline_operator.changes.deciding import gangs
from omnipipeline_operator.changes.deciding.gangs import Gang, Yielded
from tests.thoroughness import examples

P = 60.0
TAKING = 10.0
NOW = 1_000_000.0


def gang(name: str, age: float, **more: object) -> Gang:
    return Gang(name=name, created_at=NOW - age, **{"needs": 3, **more})  # type: ignore[arg-type]


def stuck(name: str, age: float, *, held: int = 2, for_s: float = P, **more: object) -> Gang:
    return gang(name, age, held=held, stuck_since=NOW - for_s, **{"lacks": 3 - held, **more})


def low(name: str, age: float, *, held: int = 3, **more: object) -> Gang:
    """It serves."""
    return gang(name, age, **{"held": held, "serves": True, "priority": 1, **more})


def high(*, held: int = 1, **more: object) -> Gang:
    """The youngest, which has waited long enough, and is before the others nevertheless."""
    for_s = float(str(more.pop("for_s", TAKING)))
    return stuck("h", 1, held=held, for_s=for_s, **{"priority": 9, **more})


def for_high(given: int, gpus: int) -> Yielded:
    return Yielded(since=NOW, to="h", gpus=gpus, tries=1, given=given, priority=1)


GIVEN = Yielded(since=NOW - P / 2, to="h", gpus=4, tries=1, given=3, priority=1)


def turns(name: str, *, for_s: float = P, **more: object) -> Gang:
    """It serves with one GPU, and may sleep."""
    own: dict[str, object] = {"needs": 1, "held": 1, "serves": True, "sleeps": True, "serving_since": NOW - for_s}
    return gang(name, 20, **{**own, **more})


def its_turn(name: str, **more: object) -> Gang:
    """It may sleep, and waits for one GPU."""
    return stuck(name, 10, **{"held": 0, "needs": 1, "lacks": 1, "sleeps": True, **more})  # type: ignore[arg-type]


TURN = Yielded(since=NOW, to="b", gpus=1, tries=1, given=1, turn=True)
FAILED = Yielded(since=None, failed=1)
AWAY = Yielded(since=NOW - P, to="a", gpus=4, tries=1)
OLD = gang("a", 100, serves=True, held=3)


def test_a_clock_that_was_set_back_keeps_none_away() -> None:
    away = gang("a", 100, yielded=Yielded(since=NOW + 3600, gpus=2, tries=1))
    kept = gangs.decide(away, [], now=NOW, patience_s=P, taking_s=TAKING)
    assert kept == Yielded(since=NOW, gpus=2, tries=1)
    later = gangs.decide(
        msgspec.structs.replace(away, yielded=kept), [], now=NOW + 2 * P, patience_s=P, taking_s=TAKING
    )
    assert later == Yielded(since=None, gpus=2, tries=1)


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
        pytest.param(low("b", 10), [high()], for_high(3, 4), id="one of a higher priority lacks what it holds"),
        pytest.param(low("b", 10), [high(priority=1)], None, id="one of the same priority"),
        pytest.param(low("b", 10), [high(for_s=TAKING - 1)], None, id="a node may be on its way to it"),
        pytest.param(low("b", 10), [high(serves=True)], None, id="it has a complete set"),
        pytest.param(low("b", 10, held=1), [high()], None, id="all that it holds would not help"),
        pytest.param(low("b", 10, held=0), [high()], None, id="it holds nothing"),
        pytest.param(
            low("b", 10, held=1), [high(), low("c", 20, held=1)], for_high(1, 3), id="all that they hold would help"
        ),
        pytest.param(
            low("b", 10), [high(), low("c", 20, priority=0)], None, id="one of a priority that is lower still is enough"
        ),
        pytest.param(low("b", 20), [high(), low("c", 10)], None, id="a younger one is enough"),
        pytest.param(low("b", 10), [high(), stuck("c", 20, priority=1)], None, id="one that does not serve is enough"),
        pytest.param(
            low("b", 20), [high(), low("c", 10, held=1)], for_high(3, 5), id="a younger one would not be enough"
        ),
        pytest.param(
            low("c", 10, held=1), [high(), low("b", 20)], None, id="it is not needed beside one that is needed"
        ),
        pytest.param(
            low("b", 20, held=6),
            [high(), low("c", 10, held=0, serves=False, yielded=GIVEN)],
            None,
            id="enough is on its way",
        ),
        pytest.param(
            low("b", 20),
            [high(), low("c", 10, held=0, serves=False, yielded=Yielded(since=NOW - P, to="h", tries=1, given=3))],
            for_high(3, 4),
            id="what was on its way has come, and more is lacking",
        ),
        pytest.param(
            low("b", 10),
            [high(yielded=Yielded(since=None, tries=1, failed=1))],
            None,
            id="it failed with as much before",
        ),
        pytest.param(low("b", 10, yielded=GIVEN), [high()], GIVEN, id="its pods end still, ready as they are"),
        pytest.param(
            high(held=0, for_s=9 * P),
            [low("b", 10, held=0, serves=False, yielded=msgspec.structs.replace(GIVEN, since=NOW - 2 * P))],
            Yielded(since=NOW, to="b", tries=1, failed=1, priority=9),
            id="it was given enough, and is placed nowhere",
        ),
        pytest.param(
            high(held=0, for_s=9 * P),
            [low("b", 10, held=0, serves=False, yielded=GIVEN)],
            None,
            id="it may be placed still",
        ),
        pytest.param(
            gang("b", 10, priority=1, yielded=msgspec.structs.replace(GIVEN, to="x")),
            [stuck("c", 90, priority=0)],
            Yielded(since=None, to="x", gpus=4, tries=1, given=3, priority=1),
            id="an older one of a lower priority waits",
        ),
        pytest.param(turns("a"), [its_turn("b")], TURN, id="the next one's turn"),
        pytest.param(turns("a"), [its_turn("b", for_s=P - 1)], None, id="it has not waited for long yet"),
        pytest.param(turns("a", for_s=P - 1), [its_turn("b")], None, id="it has not served for long yet"),
        pytest.param(turns("a", sleeps=False), [its_turn("b")], None, id="its author wants one always"),
        pytest.param(turns("a"), [its_turn("b", sleeps=False)], None, id="it would never give them back"),
        pytest.param(turns("a", priority=1), [its_turn("b")], None, id="a turn of a lower priority"),
        pytest.param(turns("a"), [its_turn("b", lacks=2)], None, id="a turn would be too little"),
        pytest.param(
            turns("a"),
            [its_turn("b", lacks=2, yielded=Yielded(since=None, to="a", gpus=2, tries=1, given=2, turn=True))],
            TURN,
            id="beside what is free since its own turn",
        ),
        pytest.param(turns("a"), [its_turn("b", for_s=2 * P - 1, yielded=FAILED)], None, id="it found no place once"),
        pytest.param(turns("a"), [its_turn("b", for_s=2 * P, yielded=FAILED)], TURN, id="it may try again"),
        pytest.param(turns("a"), [turns("c", for_s=P + 1), its_turn("b")], None, id="another one served for longer"),
        pytest.param(
            turns("a"),
            [its_turn("c"), its_turn("b", for_s=P + 1)],
            TURN,
            id="the one that has waited for longest",
        ),
        pytest.param(gang("a", 20, needs=1, yielded=TURN), [its_turn("b")], TURN, id="away until it has them"),
        pytest.param(
            gang("a", 20, needs=1, yielded=TURN),
            [turns("b", for_s=1)],
            msgspec.structs.replace(TURN, since=None),
            id="it has them",
        ),
        pytest.param(gang("a", 20, needs=1, held=1, yielded=TURN), [turns("b")], TURN, id="its own pods end still"),
    ],
)
def test_who_lets_go_and_who_comes_back(own: Gang, others: list[Gang], kept: Yielded | None) -> None:
    assert gangs.decide(own, others, now=NOW, patience_s=P, taking_s=TAKING) == kept


# --- anything ---------------------------------------------------------------------------------------------------

STEP_S = P / 4


@dataclass
class Simulated:
    """One pipeline of pods that want a GPU each."""

    name: str
    created_at: float
    needs: int
    priority: int = 0
    placed: int = 0
    leaving: int = 0  #: GPUs of pods that end.
    stuck_since: float | None = None
    serves: bool = False
    yielded: Yielded | None = None
    gone: bool = False
    sleeps: bool = False
    serving_since: float | None = None
    turns: int = 0  #: How often it has begun to serve.

    def seen(self) -> Gang:
        is_stuck = self.stuck_since if self.placed < self.needs and not self.away else None
        return Gang(
            name=self.name,
            created_at=self.created_at,
            serves=self.serves,
            needs=self.needs,
            held=self.placed + self.leaving,
            stuck_since=is_stuck,
            lacks=self.needs - self.placed,
            priority=self.priority,
            sleeps=self.sleeps,
            serving_since=self.serving_since if self.serves else None,
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
    #: The pipelines that have let go, whether each served, and how much it gave to one of a higher priority.
    let_go: list[tuple[str, bool, int]] = field(default_factory=list)

    def live(self) -> list[Simulated]:
        return [one for one in self.pipelines if not one.gone and one.created_at <= self.now]

    def step(self) -> None:
        self.now += STEP_S
        for one in self.draws.sample(self.live(), len(self.live())):
            others = [each.seen() for each in self.live() if each is not one]
            kept = gangs.decide(one.seen(), others, now=self.now, patience_s=P, taking_s=TAKING)
            if kept is not None and kept.since is not None and not one.away:
                self.let_go.append((one.name, one.serves, kept.given))
                if kept.given and not kept.turn:
                    self.check_help(one, kept.to)
                one.placed, one.leaving, one.stuck_since, one.serves = 0, one.placed, None, False
            one.yielded = kept
        self.schedule()
        for one in self.live():
            one.leaving = one.leaving and one.leaving - 1

    def check_help(self, giver: Simulated, name: str) -> None:
        """There is enough for the one that is to get it, when all those behind it have let go."""
        [taker] = [one for one in self.live() if one.name == name]
        above = sum(
            one.placed + one.leaving for one in self.live() if one.priority >= taker.priority and one is not taker
        )
        assert giver.priority < taker.priority and not taker.serves
        assert taker.needs <= self.gpus - above, "it could not be helped"

    def schedule(self) -> None:
        wanting = [one for one in self.live() if not one.away for _ in range(one.needs - one.placed)]
        free = self.gpus - sum(one.placed + one.leaving for one in self.live())
        assert free >= 0
        for one in self.draws.sample(wanting, min(free, len(wanting))):
            one.placed += 1
        for one in self.live():
            if not one.serves and one.placed == one.needs:
                one.serves, one.serving_since = True, self.now
                one.turns += 1
            waits = not one.away and one.placed < one.needs
            one.stuck_since = (one.stuck_since or self.now) if waits else None


def run(gpus: int, asked: list[tuple[int, int, int]], seed: int) -> tuple[Cluster, int]:
    """Step until nothing should change any more. asked: of each pipeline its GPUs, its begin and its priority."""
    pipelines = [
        Simulated(name=f"p{number}", created_at=NOW + begin * STEP_S, needs=needs, priority=priority)
        for number, (needs, begin, priority) in enumerate(asked)
    ]
    cluster = Cluster(gpus=gpus, pipelines=pipelines, draws=Random(seed))
    horizon = 4 * 24 * len(asked)  # 24 times the patience for each
    for _ in range(horizon):
        cluster.step()
    return cluster, horizon


@pytest.mark.proves("gangs")
@settings(max_examples=examples(40), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40), st.just(0)), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
def test_no_pipelines_wait_for_each_other_for_ever_and_none_that_serves_lets_go(
    gpus: int, asked: list[tuple[int, int, int]], seed: int
) -> None:
    cluster, horizon = run(gpus, asked, seed)
    pipelines = cluster.pipelines
    assert not any(served for _, served, _ in cluster.let_go)
    holding = [one.name for one in pipelines if not one.serves and one.placed]
    assert len(holding) <= 1, holding
    left = gpus - sum(one.needs for one in pipelines if one.serves)
    assert [one.name for one in pipelines if not one.serves and one.needs <= left] == [], "there is room"
    assert all(times <= 8 for times in Counter(name for name, _, _ in cluster.let_go).values()), "it comes and goes"
    _ended_ones_make_room(cluster, horizon)


@pytest.mark.proves("gangs")
@settings(max_examples=examples(40), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@example(4, 4, 0, 86216)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 40), st.integers(0, 2**32))
def test_of_two_that_are_always_wanted_and_may_sleep_each_has_its_turn(
    first: int, second: int, begin: int, seed: int
) -> None:
    """The first one needs no less, and both do not fit."""
    first, second = max(first, second), min(first, second)
    pipelines = [
        Simulated(name=f"p{number}", created_at=NOW + at * STEP_S, needs=needs, sleeps=True)
        for number, (needs, at) in enumerate(((first, 0), (second, 1 + begin)))
    ]
    cluster = Cluster(gpus=first, pipelines=pipelines, draws=Random(seed))
    begins: list[tuple[float, str]] = []
    for _ in range(4 * 40):  # 40 times the patience
        before = {one.name: one.turns for one in pipelines}
        cluster.step()
        begins += [(cluster.now, one.name) for one in pipelines if one.turns > before[one.name]]
    names = [name for _, name in begins]
    assert len(names) >= 10 and all(one != other for one, other in itertools.pairwise(names)), "by turns"
    assert all(later - earlier >= P for (earlier, _), (later, _) in itertools.pairwise(begins)), "whole turns"


@pytest.mark.proves("priority")
@settings(max_examples=examples(60), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40), st.integers(0, 2)), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
def test_gpus_go_to_a_higher_priority_that_they_help_and_nobody_lets_go_again_and_again(
    gpus: int, asked: list[tuple[int, int, int]], seed: int
) -> None:
    cluster, horizon = run(gpus, asked, seed)
    for one in cluster.pipelines:
        above = sum(other.needs for other in cluster.pipelines if other.serves and other.priority >= one.priority)
        behind = one.yielded is not None and one.yielded.failed > 0  # one that needs more than there is was in its way
        assert one.serves or behind or one.needs > gpus - above, f"{one.name} has not got what lower ones hold"
    for name, times in Counter(name for name, served, _ in cluster.let_go if served).items():
        assert times < len(asked), f"{name} serves and lets go again and again"
    assert all(times <= 12 for times in Counter(name for name, _, _ in cluster.let_go).values()), "it comes and goes"
    _ended_ones_make_room(cluster, horizon)


def _ended_ones_make_room(cluster: Cluster, horizon: int) -> None:
    for one in cluster.pipelines:
        one.gone = one.serves
    for _ in range(horizon):
        cluster.step()
    fitting = [one.name for one in cluster.live() if one.needs <= cluster.gpus]
    assert not fitting or any(one.serves for one in cluster.live()), "those that ended have made room"


@pytest.mark.parametrize(
    ("own", "due"),
    [
        pytest.param(stuck("a", 20, serves=True), None, id="serves"),
        pytest.param(stuck("a", 20, needs=0), None, id="wants no GPU"),
        pytest.param(gang("a", 20), None, id="starts"),
        pytest.param(gang("a", 20, yielded=AWAY), NOW + P / 10, id="away"),
        pytest.param(gang("a", 20, yielded=AWAY, stuck_since=NOW), NOW + P / 10, id="away, and its pods wait"),
        pytest.param(stuck("a", 20, for_s=TAKING / 2), NOW + TAKING / 2, id="may soon take from lower ones"),
        pytest.param(stuck("a", 20, for_s=P / 4), NOW + TAKING / 4, id="may take from lower ones"),
        pytest.param(stuck("a", 20, for_s=P / 4, lacks=0), NOW + P * 3 / 4, id="lacks none, not stuck for long yet"),
        pytest.param(stuck("a", 20, for_s=9 * P, lacks=0), NOW + P / 10, id="lacks none, stuck for long"),
    ],
)
def test_a_gang_that_waits_is_decided_again_by_the_clock(own: Gang, due: float | None) -> None:
    assert gangs.next_at(own, now=NOW, patience_s=P, taking_s=TAKING) == due
