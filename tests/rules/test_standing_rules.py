"""Instances whose queue stands."""

from __future__ import annotations

from stage_runtime.rules.members.standing import Standing


def test_a_queue_stands_when_work_waits_and_none_is_begun_for_so_long() -> None:
    known = Standing(10.0)
    known.beat("v1", {"shout": 0}, {"shout": 5}, 0.0)
    known.beat("v1", {"shout": 3}, {"shout": 5}, 1.0)
    assert not known.stands("v1", 4, 9.9)
    known.beat("v1", {"shout": 4}, {"shout": 5}, 10.0)
    assert known.stands("v1", 4, 10.0)
    known.beat("v1", {"shout": 4}, {"shout": 6}, 11.0)
    assert not known.stands("v1", 4, 20.0)


def test_one_stage_of_a_process_that_stands_is_enough() -> None:
    known = Standing(10.0)
    for now in range(20):
        known.beat("v1", {"shout": 2, "write": 2}, {"shout": 5, "write": now}, float(now))
    assert known.stands("v1", 2, 19.0)


def test_an_instance_whose_beats_are_rare_does_not_stand_between_two_of_them() -> None:
    """Members of a large fleet beat every 16 s, others as rarely as their author has asked for."""
    known = Standing(10.0)
    known.beat("v1", {"shout": 3}, {"shout": 5}, 0.0)
    assert not known.stands("v1", 4, 31.9, beat_s=16.0)
    assert known.stands("v1", 4, 32.0, beat_s=16.0)


def test_without_work_nothing_stands_however_long() -> None:
    known = Standing(10.0)
    known.beat("v1", {"shout": 0}, {"shout": 5}, 0.0)
    known.beat("v1", {"shout": 0}, {"shout": 5}, 100.0)
    assert not known.stands("v1", 1, 105.0), "a long computation with nothing behind it"
    assert not known.stands("v2", 1, 105.0)


def test_one_that_is_silent_with_requests_bound_to_it_stands() -> None:
    known = Standing(10.0)
    known.beat("v1", {"shout": 0}, {"shout": 5}, 0.0)
    assert known.stands("v1", 1, 10.0) and not known.stands("v1", 0, 10.0)
    known.leave("v1")
    assert not known.stands("v1", 1, 10.0)
