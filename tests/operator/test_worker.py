"""A worker: an edit is reconciled at once, however the operator learns of it."""

from __future__ import annotations

import contextlib

import pytest

from omnipipeline_operator import errors
from omnipipeline_operator.cluster.store import Store
from omnipipeline_operator.controller.work_queue import CHANGED_RETRY_S, WorkQueue
from omnipipeline_operator.controller.worker import Worker

A = ("space", "a")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class House:
    """A worker whose reconciles do what a test wants."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.queue, self.store = WorkQueue(jitter=lambda: 0.0, clock=self.clock), Store()
        self.version, self.generation = 0, 1
        self.failures: list[str] = []
        self.during = [self.written]  #: Called in order by each reconcile.
        self.worker = Worker(
            self.queue,
            self.store,
            reconcile=self.reconcile,
            timed=contextlib.nullcontext,
            failed=self.failures.append,
        )
        self.answered()

    async def reconcile(self, key: tuple[str, str]) -> float | None:
        for each in self.during:
            each()
        return None

    def answered(self) -> None:
        """The store learns of the pipeline by the answer to a write of the operator."""
        self.version += 1
        self.store.put(
            {
                "kind": "OmniPipeline",
                "metadata": {
                    "namespace": A[0],
                    "name": A[1],
                    "uid": "u",
                    "generation": self.generation,
                    "resourceVersion": str(self.version),
                },
            }
        )

    def written(self) -> None:
        """A child is written."""
        self.version += 1
        labels = {"omnipipeline.dev/pipeline": A[1]}
        metadata = {"namespace": A[0], "name": "c", "uid": "c", "resourceVersion": str(self.version), "labels": labels}
        self.store.put({"kind": "ConfigMap", "metadata": metadata})

    def edited(self) -> None:
        """A user edits the spec; the answer to a status write brings it before the watch does."""
        self.generation += 1
        self.answered()

    def deleted(self) -> None:
        """The API server answers that the pipeline does not exist."""
        self.store.drop({"kind": "OmniPipeline", "metadata": {"namespace": A[0], "name": A[1], "uid": "u"}})

    def refused(self) -> None:
        raise errors.Unavailable("patch pods", 503, "the API server is busy")

    async def turns(self, count: int) -> None:
        """So many reconciles, each when it is due."""
        for _ in range(count):
            self.clock.now_s += self.next_in_s()
            await self.worker.turn()

    def next_in_s(self) -> float:
        found = self.queue.next_in_s()
        assert found is not None
        return max(found, 0.0)


@pytest.fixture
async def house() -> House:
    house = House()
    house.queue.add(A)
    return house


async def test_a_roll_is_reconciled_later_each_time(house: House) -> None:
    await house.turns(5)
    assert house.next_in_s() > 1.0


async def test_an_edit_that_comes_with_the_answer_to_a_write_is_reconciled_at_once(house: House) -> None:
    await house.turns(5)
    house.during.append(house.edited)
    await house.turns(1)
    assert house.next_in_s() == 0.0


async def test_an_edit_that_comes_during_a_failing_reconcile_ends_the_back_off(house: House) -> None:
    house.during = [house.refused]
    await house.turns(8)
    assert house.next_in_s() > CHANGED_RETRY_S
    house.during = [house.edited, house.refused]
    await house.turns(1)
    assert house.next_in_s() == CHANGED_RETRY_S
    assert house.failures == ["Unavailable"] * 9


async def test_a_deletion_that_comes_with_an_answer_is_reconciled_at_once(house: House) -> None:
    await house.turns(5)
    house.during.append(house.deleted)
    await house.turns(1)
    assert house.next_in_s() == 0.0
