"""The page's view of a coordinator at one moment, and what has changed since the last one. Pure.

Rows are encoded once, so that a row that has not changed is recognised by its bytes and not sent again: with 500
instances a second brings a few of them. Counts only grow: the page makes rates of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from stage_runtime.coordinator.events import RequestRecord
from stage_runtime.metrics import catalog
from stage_runtime.metrics.samples import Buckets, Samples

MOST_BARS: Final = 60  # stages of a request in its row; all are in its waterfall
MOST_LETTERS: Final = 1000  # of a failure's reason

Rows = Mapping[str, bytes]


class Snapshot(NamedTuple):
    """JSON, ready to be sent."""

    pipeline: bytes
    load: bytes
    instances: Rows  #: Rows by incarnation.
    requests: Rows  #: Rows by id, newest first.
    draining: bool = False


class Frame(NamedTuple):
    """One event: its name and its data."""

    name: str
    data: Mapping[str, Any] | msgspec.Raw


_encode = msgspec.json.Encoder(enc_hook=str).encode


def take(
    status: Mapping[str, Any],
    samples: Samples,
    records: Iterable[RequestRecord],
    *,
    now: float,
    about: Mapping[str, Any],
) -> Snapshot:
    """status, samples, records: as of `RequestManagerApi`. now: seconds since the epoch. about: what stays."""
    instances = status.get("instances", ())
    facts = {
        **about,
        **{name: status.get(name) for name in ("pipeline", "coordinator", "revisions", "entry", "terminals")},
        "groups": status.get("stage_groups", {}),
        "edges": status.get("edges", ()),
    }
    load = {
        "now": now,
        **{name: status.get(name) for name in ("in_flight", "awaiting_instance", "ready", "draining", "problem")},
        "outcomes": _outcomes(samples),
        "stages": _stages(samples),
        "edges": _edges([status, *instances]),
    }
    return Snapshot(
        _encode(facts),
        _encode(load),
        {one["incarnation"]: _encode(_instance(one)) for one in instances},
        {one.id: _encode(_request(one)) for one in records},
        bool(status.get("draining")),
    )


def changes(before: Snapshot | None, now: Snapshot) -> Iterator[Frame]:
    """The events that bring a page from ``before`` to ``now``. None: it shows nothing yet."""
    if before is None or before.pipeline != now.pipeline:
        yield Frame("pipeline", msgspec.Raw(now.pipeline))
    yield Frame("load", msgspec.Raw(now.load))
    for name in ("instances", "requests"):
        old: Rows = {} if before is None else getattr(before, name)
        new: Rows = getattr(now, name)
        changed = [msgspec.Raw(row) for key, row in new.items() if old.get(key) != row]
        gone = [key for key in old if key not in new]
        if changed or gone or before is None:
            yield Frame(name, {"changed": changed, "gone": gone})


def _outcomes(samples: Samples) -> dict[str, float]:
    found: dict[str, float] = {}
    for (_, outcome), count in samples.get(catalog.REQUESTS, {}).items():
        if not isinstance(count, Buckets):
            found[outcome] = found.get(outcome, 0) + count
    return found


def _stages(samples: Samples) -> dict[str, dict[str, float]]:
    """The totals of each stage. done: requests that it has computed; queue_s, run_s: of all of them together."""
    found: dict[str, dict[str, float]] = {}
    plain = {catalog.STAGE_WAITING: "waiting", catalog.STAGE_RUNNING: "running", catalog.STAGE_BUSY: "busy"}
    summed = {catalog.STAGE_QUEUE_TIME: "queue_s", catalog.STAGE_RUN_TIME: "run_s"}
    for metric, name in (plain | summed).items():
        for (stage, *_), value in samples.get(metric, {}).items():
            row = found.setdefault(stage, {})
            if isinstance(value, Buckets):
                row[name] = value.sum
                row["done"] = value.counts[-1]
            else:
                row[name] = value
    return found


def _edges(processes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each relay that an edge uses, of all processes together. media: instances of its target by medium."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for process in processes:
        for row in process.get("transports", ()):
            key = row["source"], row["target"], row["relay"]
            total = found.setdefault(
                key, {**dict(zip(("source", "target", "relay"), key, strict=True)), "bytes": 0.0, "in_flight": 0.0}
            )
            total["bytes"] += row.get("transfer_bytes", 0)
            total["in_flight"] += row.get("transfers_in_flight", 0)
            media = total.setdefault("media", {})
            for medium, count in row["instances"].items():
                media[medium] = media.get(medium, 0) + count
    return list(found.values())


def _instance(one: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("incarnation", "group", "revision", "endpoint", "waiting", "running", "bound", "bound_total", "loading")
    return {**{name: one[name] for name in kept}, "state": _state(one), "reason": one["ineligible_reason"]}


def _state(one: Mapping[str, Any]) -> str:
    if one["draining"]:
        return "draining"
    if one["aside"]:
        return "aside"
    if not one["ready"]:
        return "loading"
    return "ready" if one["ineligible_reason"] is None else "unused"


def _request(one: RequestRecord) -> dict[str, Any]:
    """bars: [stage, start, end] in milliseconds."""
    error = one.error
    bars = [[name, each.start_ms, each.end_ms] for name, each in one.stages.items() if each.start_ms is not None]
    return {
        "id": one.id,
        "kind": one.kind,
        "state": one.state,
        "admitted_at": one.admitted_at,
        "total_ms": one.total_ms,
        "first_event_ms": one.first_event_ms,
        "attempt": one.attempt,
        "waiting_for": one.waiting_for,
        "usage": one.usage,
        "error": None if error is None else {**error, "message": str(error["message"])[:MOST_LETTERS]},
        "bars": bars[:MOST_BARS],
    }
