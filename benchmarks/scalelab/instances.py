"""A process of many light instances. Started and ordered by `fleet`."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from typing import Any

from benchmarks.scalelab import children
from benchmarks.scalelab.fakes import GROUPS, LightInstance

START_EVERY_S = 0.005  # in each process


class Instances:
    """The orders of such a process."""

    def __init__(self, folder: str, dead_after_s: float, coordinators: tuple[str, ...]) -> None:
        self._dead_after_s = dead_after_s
        self._folder = folder
        self._coordinators = coordinators
        self._loop = asyncio.get_running_loop()
        self._chance = random.Random(0)
        self._mean_work_s = 0.0
        self._all: list[LightInstance] = []
        self._fenced = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, of_each_group: int, unit_revision: str) -> dict[str, Any]:
        """Start so many instances of each group; they register by themselves."""
        for _ in range(of_each_group):
            for group in GROUPS:
                self._all.append(self._make(group, unit_revision))
                await asyncio.sleep(START_EVERY_S)
        return {}

    async def work(self, mean_s: float) -> dict[str, Any]:
        """Sets the mean time of each request at each instance, from now on; the times are exponentially distributed."""
        self._mean_work_s = mean_s
        return {}

    async def roll(self, unit_revision: str, at_once: int) -> dict[str, Any]:
        """Replace each instance by one of this revision: a new one, then the old one drains, so many at a time."""
        old = list(self._all)
        for start in range(0, len(old), at_once):
            leaving = old[start : start + at_once]
            new = [self._make(one.member.group, unit_revision) for one in leaving]
            self._all += new
            async with asyncio.timeout(120):
                while any(len(one.registration.coordinators) < len(self._coordinators) for one in new):
                    await asyncio.sleep(0.02)
            await asyncio.gather(*(one.drain() for one in leaving))
            for one in leaving:
                await one.close()
                self._all.remove(one)
        return {}

    async def beats(self, count: int, seconds: float) -> dict[str, Any]:
        """So many beats of these instances together, at even distances."""
        begun = self._loop.time()
        for number in range(count):
            late_s = begun + number * seconds / count - self._loop.time()
            if late_s > 0:
                await asyncio.sleep(late_s)
            self._all[number % len(self._all)].beat()
        return {"sent": count}

    async def usage(self) -> dict[str, Any]:
        heard: Counter[str] = Counter()
        for one in self._all:
            heard += one.heard
        return {
            **children.own_usage(),
            "instances": len(self._all),
            "fenced": self._fenced,
            "links": sum(one.links for one in self._all),
            "most_links": max((one.links for one in self._all), default=0),
            "heard": heard,
            "served": {one.incarnation: [one.member.group, one.served, one.account()] for one in self._all},
        }

    def _reborn(self, instance: LightInstance) -> None:
        """It was declared dead: another takes its place."""
        self._fenced += 1
        if instance in self._all:
            self._all.remove(instance)
            self._all.append(self._make(instance.member.group, instance.member.revision))
        task = self._loop.create_task(instance.close())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _make(self, group: str, unit_revision: str) -> LightInstance:
        return LightInstance(
            group,
            unit_revision,
            folder=self._folder,
            fenced=self._reborn,
            coordinators=self._coordinators,
            dead_after_s=self._dead_after_s,
            loop=self._loop,
            work_s=lambda: self._chance.expovariate(1 / self._mean_work_s) if self._mean_work_s else 0.0,
        )


def main() -> None:
    folder, dead_after_s, *coordinators = sys.argv[1:]

    def make() -> dict[str, Any]:
        made = Instances(folder, float(dead_after_s), tuple(coordinators))
        return {"begin": made.begin, "work": made.work, "roll": made.roll, "beats": made.beats, "usage": made.usage}

    children.serve(make)


if __name__ == "__main__":
    main()
