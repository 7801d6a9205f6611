"""Requests that meet producers in any order are all served by a consumer with few places, within its bound."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.rules.flow.turns import TakeEarly, Turn, TurnAway, decide
from tests.thoroughness import examples

A, B = ("a", "1"), ("b", "1")


def turn(request: str, *, begun: bool = False, waits: bool = False, open: str = "ab", held: str = "") -> Turn[str]:
    by_name = {"a": A, "b": B}
    return Turn(
        request, begun, waits, frozenset(by_name[name] for name in open), frozenset(by_name[name] for name in held)
    )


RUNS = turn("r1", begun=True, waits=True, open="b")


@pytest.mark.parametrize(
    ("turns", "stalled", "places", "room", "steps"),
    [
        ([RUNS, turn("r2", held="b")], {B}, 1, 9, [TakeEarly("r2", B)]),
        ([RUNS, turn("r2", held="b")], set(), 1, 9, []),  # the producer works
        ([RUNS, turn("r2", held="a")], {A}, 1, 9, []),  # r1 waits for another one, which works
        ([RUNS, turn("r2", held="b")], {B}, 2, 9, []),  # there is a place
        ([turn("r1", begun=True), turn("r2", held="b")], {B}, 1, 9, []),  # r1 computes: it will end
        ([RUNS, turn("r0", begun=True), turn("r2", held="b")], {B}, 2, 9, []),
        ([RUNS, turn("r2", held="b"), turn("r3", held="ab")], {A, B}, 1, 0, [TurnAway("r3")]),
        ([RUNS, turn("r2", held="ab")], {A, B}, 1, 9, [TakeEarly("r2", B)]),  # nobody waits for the other one
        ([RUNS, turn("r2", held="a")], {A, B}, 1, 0, []),
        ([RUNS], {B}, 1, 0, []),
        # It reads one source to its end, and another one's window is full.
        ([turn("r1", begun=True, waits=True, held="b")], {B}, 64, 9, [TakeEarly("r1", B)]),
        ([turn("r1", begun=True, waits=True, held="b")], {B}, 64, 0, []),
        ([turn("r1", begun=True, waits=True, held="b")], {B}, 1, 0, [TurnAway("r1")]),
        ([turn("r1", begun=True, held="b")], {B}, 1, 9, []),
    ],
)
def test_who_gives_way_is_who_keeps_a_producer_from_a_request_that_has_a_place(
    turns: list[Turn[str]], stalled: set[Any], places: int, room: int, steps: list[Any]
) -> None:
    assert decide(turns, stalled, places=places, room=room) == steps


class Model:
    """Producers with few workers, one consumer with few places, windows, and a chance that decides who moves next."""

    WINDOW = 2

    def __init__(
        self, orders: list[list[int]], workers: int, places: int, room: int, chunks: int, in_order: bool, seed: int
    ) -> None:
        self.chance = random.Random(seed)
        self.queues = [list(order) for order in orders]
        self.workers = workers
        self.places = places
        self.room = room
        self.in_order = in_order
        self.requests = sorted(orders[0])
        self.at: list[dict[int, int]] = [{} for _ in orders]  # producer -> request -> chunks left
        self.length = {(p, r): self.chance.randint(0, chunks) for p in range(len(orders)) for r in self.requests}
        self.held = dict.fromkeys(self.length, 0)  # here, unread, in the window
        self.early = dict.fromkeys(self.length, 0)  # here, unread, counted as taken
        self.ended: set[tuple[int, int]] = set()
        self.known: list[int] = []  # in the order of their first messages
        self.begun: list[int] = []
        self.done: set[int] = set()
        self.failed: set[int] = set()

    def over(self, request: int) -> bool:
        return request in self.done or request in self.failed

    def stalled(self) -> set[Any]:
        return {
            (str(p), "1")
            for p, at in enumerate(self.at)
            if len(at) == self.workers and all(left and self.held[p, r] >= self.WINDOW for r, left in at.items())
        }

    def readable(self, request: int) -> list[int]:
        open_ones = [
            p
            for p in range(len(self.queues))
            if (p, request) not in self.ended or self.held[p, request] or self.early[p, request]
        ]
        asked = open_ones[:1] if self.in_order else open_ones
        return [p for p in asked if self.held[p, request] or self.early[p, request]]

    def turns(self) -> list[Turn[int]]:
        producers = range(len(self.queues))
        return [
            Turn(
                request,
                request in self.begun,
                request in self.begun and not self.readable(request),
                frozenset((str(p), "1") for p in producers if (p, request) not in self.ended),
                frozenset((str(p), "1") for p in producers if self.held[p, request]),
            )
            for request in self.known
            if not self.over(request)
        ]

    def moves(self) -> list[Any]:
        found: list[Any] = []
        for p, at in enumerate(self.at):
            if len(at) < self.workers and self.queues[p]:
                found.append(("begin", p))
            found += [("give", p, r) for r, left in at.items() if not left or self.held[p, r] < self.WINDOW]
        waiting = [r for r in self.known if r not in self.begun and not self.over(r)]
        if waiting and len(self.begun) < self.places:
            found.append(("place", waiting[0]))
        found += [("read", p, r) for r in self.begun for p in self.readable(r)]
        room = self.room - sum(self.early.values())
        found += [("step", step) for step in decide(self.turns(), self.stalled(), places=self.places, room=room)]
        return found

    def move(self, move: Any) -> None:
        match move:
            case ("begin", p):
                request = self.queues[p].pop(0)
                if not self.over(request):
                    self.at[p][request] = self.length[p, request]
            case ("give", p, r):
                if r not in self.known:
                    self.known.append(r)
                if self.at[p][r]:
                    self.at[p][r] -= 1
                    self.held[p, r] += 1
                else:
                    del self.at[p][r]
                    self.ended.add((p, r))
            case ("place", r):
                self.begun.append(r)
            case ("read", p, r):
                table = self.early if self.early[p, r] else self.held
                table[p, r] -= 1
            case ("step", TakeEarly(request=r, source=source)):
                p = int(source[0])
                self.early[p, r] += self.held[p, r]
                self.held[p, r] = 0
            case ("step", TurnAway(request=r)):
                self.end(r, self.failed)
        for r in list(self.begun):
            if all((p, r) in self.ended and not self.held[p, r] + self.early[p, r] for p in range(len(self.queues))):
                self.end(r, self.done)

    def end(self, request: int, where: set[int]) -> None:
        where.add(request)
        if request in self.begun:
            self.begun.remove(request)
        for p, at in enumerate(self.at):
            at.pop(request, None)
            self.held[p, request] = self.early[p, request] = 0

    def run(self) -> None:
        while moves := self.moves():
            self.move(self.chance.choice(moves))
            assert sum(self.early.values()) < self.room + self.WINDOW * len(self.length), "beyond the bound"


@st.composite
def worlds(draw: Any) -> dict[str, Any]:
    requests = list(range(draw(st.integers(1, 6))))
    return {
        "orders": draw(st.lists(st.permutations(requests), min_size=1, max_size=3)),
        "workers": draw(st.integers(1, 2)),
        "places": draw(st.integers(1, 2)),
        "chunks": draw(st.integers(0, 12)),
        "in_order": draw(st.booleans()),
        "seed": draw(st.integers(0, 1 << 32)),
    }


@pytest.mark.proves("opposite-orders")
@settings(max_examples=examples(400), deadline=None)
@given(worlds(), st.integers(0, 6))
def test_every_request_ends_whatever_the_orders_and_the_bound_holds(world: dict[str, Any], room: int) -> None:
    model = Model(room=room, **world)
    model.run()
    assert model.done | model.failed == set(model.requests)


@settings(max_examples=examples(200), deadline=None)
@given(worlds())
def test_with_room_enough_nobody_is_turned_away(world: dict[str, Any]) -> None:
    model = Model(room=10_000, **world)
    model.run()
    assert model.done == set(model.requests)


def test_without_the_rule_two_producers_in_opposite_orders_lock_each_other_out() -> None:
    """The positive control of the model."""
    for seed in range(50):
        model = Model([[1, 2], [2, 1]], 1, 1, 10_000, 12, False, seed)
        while moves := [move for move in model.moves() if move[0] != "step"]:
            model.move(model.chance.choice(moves))
        if model.done != {1, 2}:
            return
    raise AssertionError("nobody is ever locked out: the model shows nothing")
