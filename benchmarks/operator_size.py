"""The operator at scale: 500 pipelines beside 5,000 foreign pods on a real API server, by the kit's audit log.

    python benchmarks/operator_size.py [--pipelines 500] [--foreign 5000] [--edits 200] [--idle-s 320] [--json FILE]
    python benchmarks/operator_size.py --pipelines 5 --foreign 0 --edits 0 --idle-minutes 30

The same writes are sent once more without the operator with `--replay`, which shows what the API server alone needs.

Needs root and the kit beside the checkout ($OMNI_CLUSTER_KIT): it starts the control plane and simulated nodes. API
server, controllers and operator share the machine. $CLUSTER_DIR and `tests.cluster_parts.isolated` give the run a
cluster of its own beside others. Each figure stands beside what is promised; beyond it, exit 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec

from benchmarks.operatorlab import ground, replay
from benchmarks.operatorlab.ground import Ground
from benchmarks.operatorlab.operated import LEASES, USER, Audit, Operated, Request

STATUS = "omnipipelines/status"
SETTLE_LIMIT_S = 1800.0  # the controllers make 20 changes a second of each kind


class Figure(msgspec.Struct, frozen=True):
    """One measured number and the most that it may be; None: nothing was promised."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def holds(self) -> bool:
        return self.limit is None or self.value <= self.limit

    def __str__(self) -> str:
        promised = "" if self.limit is None else f"<= {self.limit:g} {self.unit}"
        return f"{self.name:58} {self.value:9.2f} {self.unit:7} {promised:14} {'' if self.holds else 'TOO MUCH'}"


class Measuring:
    """One run."""

    def __init__(self, arguments: argparse.Namespace, place: Ground, operated: Operated) -> None:
        self._arguments = arguments
        self._ground = place
        self._operated = operated
        self.figures: list[Figure] = []

    def record(self, name: str, value: float, unit: str, limit: float | None = None) -> None:
        self.figures.append(Figure(name, value, unit, limit))
        print(self.figures[-1], flush=True)

    async def first_start(self) -> float:
        """Returns the seconds from the process's start until each pipeline has its children and its first status."""
        audit = Audit(self._ground.audit)
        began, done, writes = time.monotonic(), set[tuple[str, str]](), list[Request]()
        api = self._ground.apiserver_s()
        self._operated.start(profile=self._arguments.profile)
        while len(done) < self._arguments.pipelines:
            self._check(began)
            await asyncio.sleep(0.25)
            new = own(audit.new())
            writes += new
            done |= {(each.namespace, each.name) for each in new if each.resource == STATUS and each.code == 200}
        while await ground.incomplete(self._ground, self._arguments.pipelines):
            self._check(began)
            await asyncio.sleep(0.25)
        took = time.monotonic() - began
        self.record("first start: until all pipelines are reconciled", took, "s", 60.0)
        self.record("  writes for one pipeline", len(writes) / self._arguments.pipelines, "")
        self.record("  processor time of the operator", self._operated.processor_s(), "s")
        self.record("  processor time of the API server", self._ground.apiserver_s() - api, "s")
        self._memory()
        self._kinds(writes)
        if self._arguments.start_only:
            return took
        await self._settle()
        later = own(audit.new())
        self.record("  later writes for one pipeline", len(later) / self._arguments.pipelines, "")
        self._kinds(later)
        self.record("  processor time of the operator", self._operated.processor_s(), "s")
        self.record(
            "  pipelines Ready once the controllers have finished", await ground.ready_pipelines(self._ground), ""
        )
        self._memory()
        return took

    async def second_start(self) -> None:
        """A restart with everything there: each pipeline is looked at, and nothing is written."""
        self._operated.stop()
        audit = Audit(self._ground.audit)
        began = time.monotonic()
        self._operated.start()
        while True:
            self._check(began)
            await asyncio.sleep(0.1)
            now = await self._operated.metrics()
            if now.get("reconcile_time_seconds_count", 0) >= self._arguments.pipelines and now["workqueue_depth"] == 0:
                break
        self.record("second start: until all pipelines have been looked at", time.monotonic() - began, "s", 60.0)
        await self._settle()
        self.record("  writes", float(len(own(audit.new()))), "", 0.0)
        self._memory()

    async def idle(self, for_s: float) -> None:
        """Requests, writes and restarts when nothing happens. Longer than 300 s it includes the repeated lists."""
        audit, before = Audit(self._ground.audit), await self._operated.metrics()
        spent = self._operated.processor_s()
        began = time.monotonic()
        while time.monotonic() - began < for_s:
            await asyncio.sleep(min(5.0, for_s))
            assert self._operated.runs, "the operator ended"
        after, seconds = await self._operated.metrics(), time.monotonic() - began
        written = [each for each in audit.new() if each.user == USER]
        requests = after["rest_client_requests_total"] - before["rest_client_requests_total"]
        self.record(f"idle for {seconds:.0f} s: requests to the API server", requests / seconds, "/s", 1.0)
        self.record("  of them writes of the Lease", sum(one.resource == LEASES for one in written) / seconds, "/s")
        self.record("  other writes", float(len(own(written))), "", 0.0)
        self.record("  processor", 100 * (self._operated.processor_s() - spent) / seconds, "%")
        self._memory()

    async def edits(self, name: str, *, foreign_per_s: float = 0.0, own_per_s: float = 0.0) -> None:
        """Measures from the arrival of a spec's edit to the end of the write of the child that it changes, by one
        clock.
        """
        audit, numbers = Audit(self._ground.audit), list(range(self._arguments.pipelines))
        word = f"{time.time():.3f}"
        async with ground.storm(self._ground, foreign_per_s=foreign_per_s, own_per_s=own_per_s):
            await asyncio.sleep(3.0 if foreign_per_s else 0.0)
            chosen = random.sample(numbers, min(self._arguments.edits, len(numbers)))
            for number in chosen:
                await ground.edit(self._ground, number, word)
                await asyncio.sleep(self._arguments.edit_every_s)
            found: list[Request] = []
            began = time.monotonic()
            while len(waits := delays(found)) < len(chosen):
                self._check(began)
                await asyncio.sleep(0.5)
                found += audit.new()
        middle, high = statistics.median(waits), _p99(waits)
        self.record(f"edit of a spec to its child's write, {name}: p50", 1000 * middle, "ms")
        self.record("  p99", 1000 * high, "ms", 1000.0)
        self.record("  at most", 1000 * max(waits), "ms")

    async def replayed(self, first_start_s: float) -> None:
        """The same writes without the operator, for as many other pipelines: what the API server alone needs."""
        self._operated.stop()
        again = await replay.prepare(self._ground)
        await self._ground.calm(limit_s=SETTLE_LIMIT_S)
        began, api, spent = time.monotonic(), self._ground.apiserver_s(), time.process_time()
        await again.run()
        took = time.monotonic() - began
        self.record("the same writes, sent without the operator", took, "s")
        self.record("  writes for one pipeline", again.writes / self._arguments.pipelines, "")
        self.record("  processor time of the API server", self._ground.apiserver_s() - api, "s")
        self.record("  processor time of the sender", time.process_time() - spent, "s")
        self.record("  the first start took this many times as long", first_start_s / took, "")
        if not self._arguments.edits:
            return
        await self._ground.calm(limit_s=SETTLE_LIMIT_S)
        waits = []
        for number in range(min(self._arguments.edits, self._arguments.pipelines)):
            waits.append(await again.edit(number, f"{time.time():.3f}"))
            await asyncio.sleep(self._arguments.edit_every_s)
        self.record(
            "edit and write of the child, sent without the operator: p50", 1000 * statistics.median(waits), "ms"
        )
        self.record("  p99", 1000 * _p99(waits), "ms")

    def _kinds(self, writes: list[Request]) -> None:
        for each, count in Counter(f"{one.verb} {one.resource}" for one in writes).most_common():
            print(f"    {each:40} {count / self._arguments.pipelines:6.2f} for one pipeline", flush=True)

    def _memory(self) -> None:
        now, highest = self._operated.resident()
        self.record("  resident memory", now, "MiB", 150.0)
        self.record("  at its highest", highest, "MiB", 150.0)

    async def _settle(self) -> None:
        await self._operated.at_rest(quiet_s=self._arguments.quiet_s, limit_s=SETTLE_LIMIT_S)

    def _check(self, began: float) -> None:
        """Raises: RuntimeError, TimeoutError: what it waits for cannot come any more."""
        if not self._operated.runs:
            raise RuntimeError("the operator ended")
        if time.monotonic() - began > SETTLE_LIMIT_S:
            raise TimeoutError


def own(requests: list[Request]) -> list[Request]:
    """The operator's writes, without its Lease."""
    return [each for each in requests if each.user == USER and each.resource != LEASES]


def delays(requests: list[Request]) -> list[float]:
    """Seconds from each edit to the first write of that pipeline's Service after it."""
    edited: dict[tuple[str, str], float] = {}
    found = []
    for each in sorted(requests, key=lambda one: one.began):
        key = (each.namespace, each.name)
        if each.resource == "omnipipelines" and each.user != USER and each.code == 200:
            edited[key] = each.began
        elif each.resource == "services" and each.user == USER and key in edited:
            found.append(each.ended - edited.pop(key))
    return found


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


async def main(arguments: argparse.Namespace) -> int:
    random.seed(0)
    with tempfile.TemporaryDirectory(prefix="omni-size-") as folder:
        async with ground.ready() as place:
            await ground.furnish(place, pipelines=arguments.pipelines, foreign=arguments.foreign)
            print(f"{arguments.pipelines} pipelines, {arguments.foreign} foreign pods", flush=True)
            operated = Operated(place, Path(folder), logs=arguments.log or Path(folder))
            measuring = Measuring(arguments, place, operated)
            try:
                first_s = await measuring.first_start()
                if arguments.start_only:
                    pass
                elif arguments.idle_minutes:
                    await measuring.idle(60.0 * arguments.idle_minutes)
                else:
                    await measuring.second_start()
                    await measuring.idle(arguments.idle_s)
                if arguments.edits and not arguments.start_only:
                    await measuring.edits("at rest")
                    await measuring.edits("in a storm", foreign_per_s=arguments.storm, own_per_s=arguments.storm / 2)
                if arguments.replay:
                    await measuring.replayed(first_s)
            finally:
                operated.stop()
    if arguments.json:
        Path(arguments.json).write_bytes(msgspec.json.format(msgspec.json.encode(measuring.figures)))
    broken = [each for each in measuring.figures if not each.holds]
    return 1 if broken else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=500)
    parser.add_argument("--foreign", type=int, default=5000, help="unrelated pods")
    parser.add_argument("--edits", type=int, default=200, help="specs edited at rest, and as many in a storm; 0: none")
    parser.add_argument("--edit-every-s", type=float, default=0.2, help="pause between two edits")
    parser.add_argument("--storm", type=float, default=40.0, help="changes of foreign pods a second; own pods: half")
    parser.add_argument("--idle-s", type=float, default=320.0, help="how long to watch it do nothing")
    parser.add_argument("--idle-minutes", type=float, default=0.0, help="only that, for so long")
    parser.add_argument("--start-only", action="store_true", help="only the first start, not until all is ready")
    parser.add_argument(
        "--replay", action="store_true", help="at last the writes of a first start without the operator"
    )
    parser.add_argument("--quiet-s", type=float, default=15.0, help="at rest is: no look for so long")
    parser.add_argument("--log", type=Path, help="keep the operator's log in this folder")
    parser.add_argument("--profile", type=Path, help="write cProfile's data of the first start there")
    parser.add_argument("--json", help="write the figures there")
    sys.exit(asyncio.run(main(parser.parse_args())))
