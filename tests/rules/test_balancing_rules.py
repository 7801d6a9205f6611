"""Load: coordinators that know each other only by beats spread requests evenly and herd on nobody."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scalelab import simulation
from benchmarks.scalelab.simulation import Fleet
from omnipipeline_spec.types.plan import PipelineRevision
from stage_runtime.rules.binding import balancing, subsets
from stage_runtime.rules.binding.balancing import GroupLoad, Load
from stage_runtime.rules.binding.membership_state import MembershipState
from stage_runtime.rules.graph import edges
from stage_runtime.wire.parts import Member
from tests.thoroughness import rows

WORST = 1.3  # of the mean

FLEETS = [
    Fleet(instances=3),
    Fleet(instances=10),
    Fleet(instances=30),
    Fleet(instances=100),
    Fleet(instances=100, coordinators=1),
    Fleet(instances=100, coordinators=2, beat_s=3.0),
    Fleet(instances=100, lengths="exponential"),
    Fleet(instances=100, slow=3.0),
    Fleet(instances=100, shares=(9, 1, 1, 1)),
    Fleet(instances=100, busy=1.02),
    Fleet(instances=100, concurrency=32, seconds=12.0),
    Fleet(instances=300, seconds=15.0),
    Fleet(instances=1000, seconds=9.0),
]


@pytest.mark.proves("several-coordinators")
@pytest.mark.parametrize("fleet", rows(FLEETS, each_run=5), ids=str)
def test_the_worst_instance_has_at_most_1_3_times_the_mean(fleet: Fleet) -> None:
    outcome = simulation.run(fleet)
    assert outcome.worst_average <= WORST
    if outcome.mean >= 20:  # with fewer, one request is a large part of the mean
        assert outcome.worst_moment <= WORST
    assert outcome.worst_partners <= subsets.SUBSET + subsets.SUBSET // 2  # what load sent elsewhere included


@settings(max_examples=25)
@given(
    st.builds(
        Fleet,
        instances=st.integers(3, 40),
        coordinators=st.integers(1, 6),
        busy=st.floats(0.7, 1.0),
        beat_s=st.floats(0.2, 3.0),
        lengths=st.sampled_from(sorted(simulation.LENGTHS)),
        slow=st.floats(1.0, 3.0),
        seed=st.integers(0, 1000),
    )
)
def test_whatever_the_fleet_is_nobody_has_more_than_1_3_times_the_mean(fleet: Fleet) -> None:
    assert simulation.run(fleet).worst_average <= WORST


def test_a_coordinator_takes_away_its_part_of_a_surplus_and_not_all_of_it() -> None:
    """It sees 40 requests at one instance and 8 at each of the others, of which 2 each are its own."""
    group = GroupLoad()
    loads = [Load(incarnation=str(number)) for number in range(5)]
    for one in loads:
        for _ in range(2):
            group.bind(one)
    for _ in range(100):
        for one in loads:
            group.beat(one, 0, 40 if one is loads[0] else 8)
    surplus = loads[0].score - loads[1].score
    assert group.parts == pytest.approx(72 / 10)
    assert surplus == pytest.approx(32 / (72 / 10), abs=0.1)


def test_what_others_bind_is_seen_in_the_beats_and_avoided() -> None:
    group = GroupLoad()
    busy, idle = Load(incarnation="busy"), Load(incarnation="idle")
    for _ in range(10):
        group.beat(busy, 0, 30)
        group.beat(idle, 0, 0)
    for _ in range(5):
        assert balancing.least([busy, idle]) is idle


@pytest.mark.parametrize(
    ("scores", "taken"),
    [
        ([0.0], {0}),
        ([0.5], {0}),  # no partner without a link can be idler by more than a link is worth
        ([0.6], {None}),
        ([0.0, 0.0], {0, 1}),
        ([0.0, 9.0], {0, None}),  # two at random may be the same one
        ([], {None}),
    ],
)
def test_an_idle_partner_with_a_link_is_taken_and_a_loaded_one_is_compared(
    scores: list[float], taken: set[int | None]
) -> None:
    linked = [Load(incarnation=str(number), score=score) for number, score in enumerate(scores)]
    chance = random.Random(1).random
    found = [balancing.idle(linked, chance) for _ in range(300)]
    assert {None if one is None else int(one.incarnation) for one in found} == taken


@given(st.lists(st.tuples(st.sampled_from(["bind", "unbind", "beat", "leave"]), st.integers(0, 3)), max_size=60))
def test_the_sums_of_a_group_are_those_of_its_instances(steps: list[tuple[str, int]]) -> None:
    group, loads = GroupLoad(), {number: Load(incarnation=str(number)) for number in range(4)}
    for step, number in steps:
        one = loads.get(number)
        if one is None:
            continue
        match step:
            case "bind":
                group.bind(one)
            case "unbind" if one.bound:
                balancing.unbind(one)
            case "beat":
                group.beat(one, number, 2 * number)
            case "leave":
                group.leave(loads.pop(number))
        assert one.score == pytest.approx(one.bound + one.others)
    assert group.reported == sum(one.waiting + one.running for one in loads.values())
    assert group.bound_at_beat == sum(one.bound_at_beat for one in loads.values())


@given(st.lists(st.tuples(st.sampled_from(["bind", "unbind", "beat", "rest"]), st.integers(0, 3)), max_size=60))
def test_a_beat_of_an_instance_at_rest_changes_nothing(steps: list[tuple[str, int]]) -> None:
    """So the coordinator leaves out those that come again."""
    group, load = GroupLoad(), Load(incarnation="one")
    for step, number in steps:
        match step:
            case "bind":
                group.bind(load)
            case "unbind" if load.bound:
                balancing.unbind(load)
            case "beat":
                group.beat(load, number, 2 * number)
            case "rest":
                while load.bound:
                    balancing.unbind(load)
                for _ in range(40):  # the average needs a while
                    group.beat(load, 0, 0)
                assert load.at_rest
        if load.at_rest:
            before = msgspec.structs.astuple(load), msgspec.structs.astuple(group)
            group.beat(load, 0, 0)
            assert (msgspec.structs.astuple(load), msgspec.structs.astuple(group)) == before


# --- within the membership ----------------------------------------------------------------------------------------

#: a → b, c → d: the last stage joins two.
DIAMOND = PipelineRevision(
    revision="r",
    units=dict.fromkeys("abcd", "u"),
    groups={name: name for name in "abcd"},
    stages={name: name for name in "abcd"},
    entry="a",
    terminals=("d",),
    edges=(("a", "b", "normal"), ("a", "c", "normal"), ("b", "d", "normal"), ("c", "d", "normal")),
)
SCHEMAS = edges.of_revision(DIAMOND)


def fleet(count: int, seed: int = 1) -> MembershipState:
    chance = random.Random(seed)
    made = MembershipState([DIAMOND], chance=chance.random)
    for group in "abcd":
        for _ in range(count):
            name = f"{group}{chance.getrandbits(60):015x}"
            made.join(Member(name, group, group, "u", name, {}, (), True), SCHEMAS[group])
    return made


@pytest.mark.proves("several-coordinators")
def test_pairs_stay_within_subsets_and_every_instance_gets_its_share() -> None:
    count, requests = 60, 3000
    made, chance = fleet(count), random.Random(2)
    pairs: dict[tuple[str, str], set[str]] = {}
    served: Counter[str] = Counter()
    under_way = []
    for number in range(requests):
        _, bindings = made.bind()
        served.update(set(bindings.values()))
        for source, target, _ in DIAMOND.edges:
            pairs.setdefault((bindings[source], target), set()).add(bindings[target])
        under_way.append(bindings)
        if number % 3:  # load varies
            made.unbind(under_way.pop(int(chance.random() * len(under_way))))
    assert max(len(partners) for partners in pairs.values()) <= subsets.SUBSET
    assert len(served) == 4 * count
    mean = len(under_way) / count
    for one in made.instances.values():
        assert mean / WORST <= one.bound <= WORST * mean


def test_one_request_at_a_time_stays_on_linked_pairs() -> None:
    """No load says otherwise, so no link is opened that is not needed."""
    count = 60
    made = fleet(count)
    pairs = set()
    for _ in range(1000):
        _, bindings = made.bind()
        made.unbind(bindings)
        pairs |= {(bindings[source], bindings[target]) for source, target, _ in DIAMOND.edges}
    assert len(pairs) <= 2 * len(DIAMOND.edges) * count


@pytest.mark.parametrize("seed", range(3))
def test_idle_entry_instances_are_bound_in_turn_and_a_busy_one_is_passed_over(seed: int) -> None:
    count = 60
    made = fleet(count, seed)
    _, first = made.bind()  # goes on
    bound: Counter[str] = Counter()
    for _ in range(3 * count):
        _, bindings = made.bind()
        made.unbind(bindings)
        bound[bindings["a"]] += 1
    assert bound[first["a"]] == 0
    assert len(bound) == count - 1
    assert max(bound.values()) <= 3 + 3  # its own turns, and those of the busy one


def test_load_takes_a_request_out_of_its_subset() -> None:
    """All partners of one instance are full, by other coordinators' requests, and an instance elsewhere is idle."""
    made = fleet(60)
    made.bind()
    for _ in range(20):
        for name, instance in made.instances.items():
            if instance.member.group in "bd":
                made.beat(name, 30, 30)
    idle = set(sorted(name for name, one in made.instances.items() if one.member.group == "b")[::2])
    for _ in range(40):
        for name in idle:
            made.beat(name, 0, 0)
    assert all(made.bind()[1]["b"] in idle for _ in range(30))


def test_a_retry_avoids_the_instances_given_even_a_whole_subset() -> None:
    made = fleet(60)
    everyone = {name for name, one in made.instances.items() if one.member.group == "b"}
    spared = sorted(everyone)[7]
    for _ in range(20):
        assert made.bind(avoid=everyone - {spared})[1]["b"] == spared
    assert made.bind(avoid=everyone)[1]["b"] in everyone, "no other one is left"


def test_who_drains_is_bound_no_more_and_who_comes_is_bound_soon() -> None:
    made = fleet(60)
    for _ in range(60):
        made.bind()
    drained = sorted(name for name, one in made.instances.items() if one.member.group == "c")[::3]
    for name in drained:
        made.mark(name, draining=True)
    made.join(Member("c-new", "c", "c", "u", "c-new", {}, (), True), SCHEMAS["c"])
    bound = [made.bind()[1]["c"] for _ in range(200)]
    assert not set(bound) & set(drained)
    assert "c-new" in bound


# --- a group that grows -------------------------------------------------------------------------------------------


class Growing:
    """Coordinators of a pipeline with two groups, both larger than a subset; each binds a part of all requests."""

    def __init__(self, entries: int, coordinators: int, seed: int = 1) -> None:
        self._chance, self._names = random.Random(seed), random.Random(0)
        self.states = [MembershipState([simulation.REVISION], chance=self._chance.random) for _ in range(coordinators)]
        self.join("entry", entries)

    def join(self, group: str, count: int) -> list[str]:
        names = [f"{group[0]}{self._names.getrandbits(60):015x}" for _ in range(count)]
        schema = edges.of_revision(simulation.REVISION)[group]
        for state in self.states:
            for name in names:
                state.join(Member(name, group, group, "u", name, {}, (), True), schema)
        return names

    def serve(self, requests: int, at_once: int) -> list[tuple[str, str]]:
        """The instances of each request, of the two groups. Requests end in any order."""
        found, under_way = [], []
        for number in range(requests):
            state = self.states[number % len(self.states)]
            _, bindings = state.bind()
            found.append((bindings["take"], bindings["do"]))
            under_way.append((state, bindings))
            if len(under_way) >= at_once:
                state, bindings = under_way.pop(self._chance.randrange(len(under_way)))
                state.unbind(bindings)
        for state, bindings in under_way:
            state.unbind(bindings)
        return found


GROWTHS = [
    (100, 100, 100, 1, 1),
    (100, 100, 100, 20, 1),
    (100, 100, 100, 100, 1),
    (100, 100, 100, 400, 1),
    (100, 100, 20, 1, 1),
    (100, 100, 20, 20, 1),
    (20, 100, 100, 1, 1),
    (4, 40, 40, 1, 1),
    (4, 40, 40, 8, 1),
    (40, 40, 10, 4, 1),
    (40, 40, 10, 20, 1),
    (40, 40, 10, 40, 1),
    (100, 100, 100, 20, 4),
]


@pytest.mark.parametrize(
    ("entries", "old", "new", "at_once", "coordinators"),
    rows(GROWTHS, each_run=5),
)
def test_in_a_group_that_has_grown_each_instance_gets_its_share(
    entries: int, old: int, new: int, at_once: int, coordinators: int
) -> None:
    fleet = Growing(entries, coordinators)
    before, requests = fleet.join("work", old), 12_000
    first = Counter(target for _, target in fleet.serve(requests, at_once))
    assert set(first) == set(before) and max(first.values()) <= WORST * requests / old

    joined = fleet.join("work", new)
    found = fleet.serve(requests, at_once)
    served = Counter(target for _, target in found)
    assert set(served) == {*before, *joined}
    assert max(served.values()) <= WORST * requests / (old + new)
    assert sum(served[name] for name in joined) >= requests * new / (old + new) / WORST
    partners: dict[str, set[str]] = {}
    for source, target in found:
        partners.setdefault(source, set()).add(target)
    assert max(map(len, partners.values())) <= subsets.size(entries, old + new)


@pytest.mark.parametrize(("old", "new", "at_once"), [(60, 60, 1), (40, 10, 8), (60, 60, 20)])
@pytest.mark.parametrize("grown", ["b", "d"])
def test_before_and_behind_a_join_a_grown_group_shares_requests_too(
    grown: str, old: int, new: int, at_once: int
) -> None:
    made, chance, requests = fleet(old), random.Random(2), 6000
    names = {name for name, one in made.instances.items() if one.member.group == grown}
    served: Counter[str] = Counter()
    under_way: list[dict[str, str]] = []
    for number in range(2 * requests):
        if number == requests:
            served.clear()
            for joining in range(new):
                name = f"{grown}{chance.getrandbits(60):015x}{joining}"
                made.join(Member(name, grown, grown, "u", name, {}, (), True), SCHEMAS[grown])
                names.add(name)
        _, bindings = made.bind()
        served.update(set(bindings.values()))
        under_way.append(bindings)
        if len(under_way) >= at_once:
            made.unbind(under_way.pop(chance.randrange(len(under_way))))
    for group in "bcd":
        counts = [served[name] for name, one in made.instances.items() if one.member.group == group]
        assert min(counts) > 0 and max(counts) <= WORST * requests / len(counts), group
    assert names <= set(served)


def test_a_link_is_forgotten_when_its_instance_is_no_partner_any_more() -> None:
    fleet = Growing(40, 1)
    (state,) = fleet.states
    for count in (40, 20, 20, 20, 20):
        fleet.join("work", count)
        fleet.serve(2000, 40)
    linked = [len(one.linked) for one in state.instances.values() if one.member.group == "entry"]
    assert max(linked) <= subsets.size(40, 120)
