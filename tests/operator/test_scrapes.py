"""A scrape of the operator's metrics: the same text as in one go, while other tasks run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import generate_latest

from omnipipeline_operator.handlers import metrics, probes
from omnipipeline_operator.handlers.metrics import OperatorMetrics


def pipeline(number: int) -> dict[str, Any]:
    conditions = [{"type": each, "status": "True", "reason": "Fine"} for each in ("Accepted", "Ready")]
    units = [{"name": each, "replicas": 2, "updated": 1, "ready": 0, "reason": "Loads"} for each in ("a", "b")]
    return {
        "metadata": {"namespace": "space", "name": f'p"{number}'},
        "status": {"conditions": conditions, "units": units},
    }


def served(pipelines: int) -> OperatorMetrics:
    """The metrics of an operator with so many pipelines; each kind of metric has a value."""
    made = OperatorMetrics()
    made.count_request("GET", "pods", 200)
    made.reconcile_time.observe(0.5)
    made.read(metrics.WATCH_EVENTS, lambda: 7.0)
    made.read_status(lambda: [pipeline(number) for number in range(pipelines)])
    return made


@pytest.mark.parametrize("pipelines", [0, 1, probes.SAMPLES // 2, probes.SAMPLES, 3 * probes.SAMPLES])
async def test_a_scrape_has_the_text_of_all_metrics_in_one_go(pipelines: int) -> None:
    registry = served(pipelines).registry
    assert (await probes.written(registry)).decode() == generate_latest(registry).decode()


async def test_other_tasks_run_while_a_scrape_is_written() -> None:
    turns, ended = 0, asyncio.Event()

    async def other() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    await probes.written(served(500).registry)
    ended.set()
    await running
    assert turns > 5 * 1000 // probes.SAMPLES, "two conditions and two units of 500 pipelines"
