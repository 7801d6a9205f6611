"""`rules.members.demand` as tables: what a coordinator knows of the demand for its process groups."""

from __future__ import annotations

from typing import Any

import pytest

from omnipipeline_spec.scaling import Load
from stage_runtime.rules.members.demand import Demand, StageBeat

STAGES = {"think": "thinker", "talk": "talker", "code": "talker"}


def beat(stage: str, **fields: Any) -> StageBeat:
    return StageBeat(stage=stage, group=STAGES.get(stage, "other"), **{"waiting": 0, "running": 0, **fields})


def loads(demand: Demand, *beats: StageBeat, now: float, held: dict[str, int] | None = None) -> dict[str, Load]:
    return demand.loads(STAGES, beats, ready={"thinker": 2}, loading={"talker": 1}, held=held or {}, now=now)


def test_a_group_without_requests_has_no_load_and_no_service_time() -> None:
    assert loads(Demand(0.0), now=100.0) == {
        "thinker": Load(ready=2, arrivals_per_s=0.0),
        "talker": Load(ready=0, pending=1, arrivals_per_s=0.0),
    }


@pytest.mark.parametrize(
    ("at", "per_s"),
    [
        (1.0, 5.0),  # of the two seconds that are taken at least
        (10.0, 1.0),  # since the start
        (15.0, 10 / 15),
        (30.0, 0.0),
    ],
)
def test_arrivals_are_a_rate_over_fifteen_seconds_or_since_the_start(at: float, per_s: float) -> None:
    demand = Demand(0.0)
    for _ in range(10):
        demand.arrived(["thinker"], 0.5)
    assert loads(demand, now=at)["thinker"].arrivals_per_s == pytest.approx(per_s)
    assert loads(demand, now=at)["talker"].arrivals_per_s == 0.0
    assert demand.totals() == {"thinker": 10}


@pytest.mark.parametrize(("at", "per_s"), [(104.0, 5 / 4), (114.0, 5 / 14), (116.5, 2 / 15), (121.0, 1 / 15)])
def test_arrivals_of_each_second_leave_the_window_by_themselves(at: float, per_s: float) -> None:
    demand = Demand(100.0)
    for now in (100.5, 100.6, 100.7, 101.5, 101.6):
        demand.arrived(["thinker"], now)
    if at > 120:
        demand.arrived(["thinker"], 120.5)
    assert loads(demand, now=at)["thinker"].arrivals_per_s == pytest.approx(per_s)


def test_where_requests_take_long_their_rate_is_taken_over_twice_that_time() -> None:
    demand = Demand(0.0)
    demand.served(["think"], {"think": 40.0})
    demand.arrived(["thinker"], 50.0)
    assert loads(demand, now=100.0)["thinker"].arrivals_per_s == pytest.approx(1 / 80)


def test_a_request_that_did_not_meet_a_stage_makes_its_mean_smaller() -> None:
    demand = Demand(0.0)
    demand.served(["think", "talk"], {"think": 2.0, "talk": 1.0})
    demand.served(["think", "talk"], {"think": 4.0})
    found = loads(demand, now=1.0)
    assert (found["thinker"].service_s, found["talker"].service_s) == (3.0, 0.5)


def test_the_mean_follows_what_ended_lately() -> None:
    demand = Demand(0.0)
    for took in [10.0] * 100 + [1.0] * 400:
        demand.served(["think"], {"think": took})
    service_s = loads(demand, now=1.0)["thinker"].service_s
    assert service_s is not None and 1.0 < service_s < 1.1


def test_a_group_of_several_stages_is_as_loaded_as_the_one_that_needs_most_instances() -> None:
    beats = (
        beat("talk", running=4, places=8),
        beat("code", running=1, waiting=2, places=1),
        beat("other"),
    )
    talker = loads(Demand(0.0), *beats, now=1.0)["talker"]
    assert (talker.running, talker.waiting, talker.per_instance) == (1, 2, 1)


def test_all_instances_count_and_so_do_requests_that_wait_for_one() -> None:
    beats = (beat("think", running=3, waiting=1, places=4), beat("think", running=4, places=4))
    assert loads(Demand(0.0), *beats, held={"thinker": 5}, now=1.0)["thinker"] == Load(
        ready=2, arrivals_per_s=0.0, running=7, waiting=6, held=5, per_instance=4
    )


def test_an_engine_that_does_not_say_works_on_as_many_as_it_was_seen_to() -> None:
    demand = Demand(0.0)
    assert loads(demand, beat("think", running=6), now=1.0)["thinker"].per_instance == 6
    assert loads(demand, beat("think", running=2), now=2.0)["thinker"].per_instance == 6
