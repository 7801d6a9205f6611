"""Pipelines of any size as a coordinator's status shows them, for the page."""

from __future__ import annotations

import time
from typing import Any

from stage_runtime.coordinator.events import HopTiming, RequestRecord, StageTiming
from stage_runtime.metrics import catalog
from stage_runtime.metrics.samples import Buckets, Samples

Edge = tuple[str, str, str]
LOADING = {"stage": "llm", "done": 1.2e9, "total": 2.8e9, "unit": "B"}


def status(
    groups: dict[str, str], edges: list[Edge], *, instances: int = 1, loading: int = 0, relay: str = "shm"
) -> dict[str, Any]:
    """groups: stage -> process group. instances: of each group; loading: so many of the first are not ready."""
    names = list(dict.fromkeys(groups.values()))
    rows = [
        {"source": source, "target": target, "relay": relay, "instances": {"memory": 1}, "transfer_bytes": 5e6}
        for source, target, _ in edges
        if groups[source] != groups[target]
    ]
    found: list[dict[str, Any]] = [
        {
            "incarnation": f"{place:08x}{number:08x}",
            "group": group,
            "unit": group,
            "revision": "5d41402a",
            "endpoint": f"tcp://10.0.{place}.{number}:5550",
            "stages": [stage for stage, own in groups.items() if own == group],
            "ready": place > 0 or number >= loading,
            "loading": [] if place > 0 or number >= loading else [LOADING],
            "draining": False,
            "aside": False,
            "ineligible_reason": None,
            "waiting": number % 3,
            "running": 1,
            "bound": 1,
            "bound_total": 100 + number,
            "gauges": {},
            "transports": rows if not place and not number else [],
        }
        for place, group in enumerate(names)
        for number in range(instances)
    ]
    return {
        "pipeline": "voice",
        "coordinator": "c0ffee00c0ffee00",
        "ready": True,
        "draining": False,
        "problem": None,
        "in_flight": 3,
        "awaiting_instance": 0,
        "stages": list(groups),
        "stage_groups": groups,
        "entry": next(iter(groups)),
        "terminals": [list(groups)[-1]],
        "edges": [list(edge) for edge in edges],
        "revisions": ["5d41402a"],
        "transports": [],
        "instances": found,
    }


def samples(groups: dict[str, str], *, done: int = 1000) -> Samples:
    return {
        catalog.REQUESTS: {("chat", "completed"): done, ("chat", "stage_failed"): 2},
        catalog.STAGE_WAITING: {(stage,): 2 for stage in groups},
        catalog.STAGE_RUNNING: {(stage,): 1 for stage in groups},
        catalog.STAGE_BUSY: {(stage,): (place % 10) / 10 for place, stage in enumerate(groups)},
        catalog.STAGE_QUEUE_TIME: {(stage,): Buckets((done,), done * 0.002) for stage in groups},
        catalog.STAGE_RUN_TIME: {(stage,): Buckets((done,), done * 0.020) for stage in groups},
    }


def record(request_id: str, stages: list[str], *, error: dict[str, Any] | None = None, **given: Any) -> RequestRecord:
    """A request that was 10 ms in each stage, and 2 on each way."""
    times = {
        stage: StageTiming(queue_ms=2, run_ms=8, start_ms=2 + 12 * place, end_ms=12 + 12 * place)
        for place, stage in enumerate(stages)
    }
    ways = zip(["coordinator", *stages], [*stages, "coordinator"], strict=True)
    hops = tuple(
        HopTiming(source=source, target=target, kind="payload", start_ms=12 * place, end_ms=12 * place + 2)
        for place, (source, target) in enumerate(ways)
    )
    fields = {
        "id": request_id,
        "kind": "chat",
        "state": "completed" if error is None else "failed",
        "age_ms": 500.0,
        "attempt": 1,
        "bindings": {},
        "first_event_ms": 12.0,
        "total_ms": 12.0 * len(stages) + 2,
        "admitted_at": time.time(),
        "stages": times,
        "hops": hops,
        "error": error,
    }
    return RequestRecord(**{**fields, **given})
