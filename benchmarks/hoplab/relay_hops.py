"""A hop from end to end by each relay: a value checked, sent by that relay to another process, given to its function.

Echo pipelines of one stage and of two, all at once, asked in turns: a hop is the difference. Started by
`benchmarks.relays --hops`.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Sequence
from typing import cast

from benchmarks.hoplab.measuring import visits
from benchmarks.hoplab.pipelines import Running, pipeline, running, tensor
from omnipipeline_spec.types.relays import RelayBackend

SHORT, LONG = 1, 2  # stages
LARGE_NBYTES = 4 << 20  # from here on a turn asks fewer times
ASKED = 20


async def hops(names: Sequence[str], sizes: Sequence[int], rounds: int) -> dict[str, dict[int, dict[str, float]]]:
    """Relay -> bytes -> ``us``, wall time of a hop, and ``cpu_us``, processor time of a stage's visit."""
    times: dict[str, dict[int, list[tuple[float, float]]]] = {name: {size: [] for size in sizes} for name in names}
    async with contextlib.AsyncExitStack() as stack:
        started: dict[str, dict[int, Running]] = {}
        for name in names:
            started[name] = {}
            for stages in (SHORT, LONG):
                plan = pipeline(stages, processes=stages, relay=cast(RelayBackend, name))
                started[name][stages] = await stack.enter_async_context(running(plan, tcp=True, curve=False))
        for size in sizes:
            given = tensor(size)
            count = ASKED if size < LARGE_NBYTES else ASKED // 4
            for turn in range(rounds + 1):
                for name, both in started.items():
                    short, long = [
                        await visits(functools.partial(one.once, given), one.pids, count) for one in both.values()
                    ]
                    if turn:  # the first one warms up
                        times[name][size].append((long.wall_us - short.wall_us, long.cpu_us))
    return {
        name: {
            size: {
                key: round(statistics.median(column), 1)
                for key, column in zip(("us", "cpu_us"), zip(*rows, strict=True), strict=True)
            }
            for size, rows in of_relay.items()
        }
        for name, of_relay in times.items()
    }


def report(found: dict[str, dict[int, dict[str, float]]]) -> str:
    """A table: microseconds of a hop, and of processor time of a visit."""
    lines = [f"{'bytes':>12}" + "".join(f"{name + ' us':>14} {'cpu us':>10}" for name in found)]
    for size in next(iter(found.values())):
        row = "".join(f"{of_relay[size]['us']:>14.0f} {of_relay[size]['cpu_us']:>10.0f}" for of_relay in found.values())
        lines.append(f"{size:>12,}{row}")
    return "\n".join(lines)
