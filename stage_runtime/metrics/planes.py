"""The numbers of one process's planes: by name, as `Beat`, `/status` and the status pipe carry them, and as
samples of metrics.

Called by `coordinator` and `stage`, which read their own, and by `web` and the pod, which serve them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

from omnipipeline_spec.types.metrics import Metric
from stage_runtime.metrics import catalog
from stage_runtime.metrics.samples import Labels, Samples

Gauges: TypeAlias = Mapping[str, float]


class EdgeGauges(Protocol):
    """`transfers.accounts.EdgeNumbers`."""

    nbytes: int
    copied_nbytes: int
    failovers: int
    retries: int
    in_flight: int
    oldest_s: float
    quarantined: int


BUSY_DIGITS: Final = 3  # of a share
BYTES: Final = "B"  #: The unit of a loading stage that counts bytes.

_RELAY: Final = "relay_"
_BUSY: Final = "stage_busy:"
_PLACES: Final = "stage_places:"
_LOADING: Final = "stage_loading_"  #: Followed by ``done:``, ``total:`` or ``bytes:`` and the stage.
_SLOTS: Final = "relay_slots_"
_EVENT: Final = "control_"
_RELAYS: Final[Mapping[str, Metric]] = {**catalog.RELAY, **catalog.NIXL}
_ENGINE: Final = "engine_"
_ALL_BLOCKS: Final = f"{_ENGINE}kv_blocks"
_USED_BLOCKS: Final = f"{_ENGINE}kv_blocks_used"
_TAKES: Final = f"{_ENGINE}adapters:"
_ADAPTER: Final = f"{_ENGINE}adapter_requests_total."
_OF_STAGE: Final[Mapping[str, Metric]] = {
    **catalog.ENGINE,
    **catalog.KV,
    **catalog.SPECULATION,
    **catalog.LORA,
    **catalog.CACHE,
}
_RANK: Final = re.compile(r"rank([0-9]{1,9})/(.+)")  # Python makes no number of thousands of digits
_EDGE: Final[Mapping[str, Metric]] = {
    "edge_transfer_bytes": catalog.EDGE_TRANSFER_BYTES,
    "edge_transfers_in_flight": catalog.EDGE_TRANSFERS_IN_FLIGHT,
    "edge_copied_bytes": catalog.EDGE_COPIED_BYTES,
    "edge_oldest_transfer": catalog.EDGE_OLDEST_TRANSFER,
    "edge_quarantined": catalog.EDGE_QUARANTINED,
    "edge_failovers": catalog.EDGE_FAILOVERS,
    "edge_retries": catalog.EDGE_RETRIES,
}
_INSTANCES: Final = "edge_instances"
_PLAIN: Final[Mapping[str, Metric]] = {
    "transfers_in_flight": catalog.TRANSFERS_IN_FLIGHT,
    "sends_queued": catalog.SENDS_QUEUED,
    "relay_arena_bytes": catalog.ARENA_BYTES,
    "relay_arena_bytes_in_use": catalog.ARENA_BYTES_IN_USE,
    "relay_arena_bytes_resident": catalog.ARENA_BYTES_RESIDENT,
    "relay_late_releases": catalog.LATE_RELEASES,
}


def gauges(
    *,
    relays: Mapping[str, float],
    transfers_in_flight: int,
    sends_queued: int,
    events: Mapping[str, int],
    edges: Mapping[tuple[str, str, str], EdgeGauges] = {},
    edge_transports: Mapping[tuple[str, str, str, str], int] = {},
    engines: Mapping[str, Gauges] = {},
    busy: Mapping[str, float] = {},
) -> dict[str, float]:
    """relays: `Relays.stats`. events: counters of the control plane. edges: `SendQueues.edges`. edge_transports:
    instances by source, target, relay and medium. engines: by stage, what its engine reports of itself. busy: by
    stage, the share of the time in which it computed something.
    """
    return {
        **{_RELAY + name: float(value) for name, value in relays.items()},
        "transfers_in_flight": float(transfers_in_flight),
        "sends_queued": float(sends_queued),
        **{_EVENT + name: float(count) for name, count in events.items()},
        **{
            f"{name}:{':'.join(edge)}": float(value)
            for edge, numbers in edges.items()
            for name, value in zip(_EDGE, _of_edge(numbers), strict=True)
        },
        **{f"{_INSTANCES}:{':'.join(each)}": float(count) for each, count in edge_transports.items()},
        **{
            f"{_ENGINE}{name}:{stage}": float(value)
            for stage, values in engines.items()
            for name, value in values.items()
        },
        **{_BUSY + stage: share for stage, share in busy.items()},
    }


def adapters(processes: Iterable[Gauges]) -> frozenset[str] | None:
    """The names of the adapters that all engines of all stages with adapters have. None: no stage takes any."""
    found: frozenset[str] | None = None
    for numbers in processes:
        for stage in (name.removeprefix(_TAKES) for name in numbers if name.startswith(_TAKES)):
            end = f":{stage}"
            names = {
                one[len(_ADAPTER) : -len(end)] for one in numbers if one.startswith(_ADAPTER) and one.endswith(end)
            }
            found = frozenset(names) if found is None else found & names
    return found


def busy(gauges: Gauges) -> dict[str, float]:
    """The busy shares by stage, as `gauges` was given them."""
    return {name.removeprefix(_BUSY): share for name, share in gauges.items() if name.startswith(_BUSY)}


def kv_blocks(gauges: Gauges) -> tuple[float, float]:
    """All blocks of a process's caches, and those that requests use, of all its stages."""
    found = {_ALL_BLOCKS: 0.0, _USED_BLOCKS: 0.0}
    for key, value in gauges.items():
        if key.startswith(_ALL_BLOCKS):
            name = key.partition(":")[0]
            if name in found:
                found[name] += value
    return found[_ALL_BLOCKS], found[_USED_BLOCKS]


def places(by_stage: Mapping[str, int]) -> dict[str, float]:
    """How many requests each stage computes at once, for a beat."""
    return {_PLACES + stage: float(count) for stage, count in by_stage.items()}


def places_of(gauges: Gauges, stage: str) -> int:
    """The number that `places` was given for a stage; 0: unknown."""
    count = gauges.get(_PLACES + stage, 0.0)
    return int(count) if math.isfinite(count) else 0


def loading(shares: Mapping[str, tuple[float, float, str]]) -> dict[str, float]:
    """How far each loading stage is, for a beat. shares: by stage done, total (0: not known) and unit."""
    found: dict[str, float] = {}
    for stage, (done, total, unit) in shares.items():
        if done > 0 or total > 0:
            found[f"{_LOADING}done:{stage}"], found[f"{_LOADING}total:{stage}"] = done, total
            if unit == BYTES:
                found[f"{_LOADING}bytes:{stage}"] = 1.0
    return found


def loading_of(gauges: Gauges) -> list[dict[str, Any]]:
    """Rows for `/status`: what `loading` was given. Numbers that no share can have are left out."""
    rows = []
    for name, done in gauges.items():
        stage = name.removeprefix(f"{_LOADING}done:")
        if stage == name:
            continue
        total = gauges.get(f"{_LOADING}total:{stage}", 0.0)
        if math.isfinite(done) and math.isfinite(total) and done >= 0 and total >= 0:
            unit = BYTES if f"{_LOADING}bytes:{stage}" in gauges else ""
            rows.append({"stage": stage, "done": done, "total": total, "unit": unit})
    return rows


def transports(gauges: Gauges) -> list[dict[str, Any]]:
    """Rows for `/status`: one for each relay that an edge uses or has used, with its target's instances by medium."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for name in sorted(name for name in gauges if name.startswith("edge_")):
        value = gauges[name]
        short, *labels = name.split(":")
        if short in _EDGE and len(labels) == 3:
            _row(rows, labels)[short.removeprefix("edge_")] = value
        elif short == _INSTANCES and len(labels) == 4:
            _row(rows, labels[:3])["instances"][labels[3]] = value
    return [rows[edge] for edge in sorted(rows)]


def _row(rows: dict[tuple[str, ...], dict[str, Any]], edge: Sequence[str]) -> dict[str, Any]:
    named = dict(zip(("source", "target", "relay"), edge, strict=True))
    return rows.setdefault(tuple(edge), {**named, "instances": {}})


def of_ranks(gauges: Mapping[int, Gauges]) -> dict[str, float]:
    """Rank → its gauges, as rank 0 carries them beside its own."""
    return {f"rank{rank}/{name}": value for rank, values in gauges.items() for name, value in values.items()}


def by_rank(gauges: Gauges) -> dict[int, dict[str, float]]:
    """The values that `of_ranks` has put beside rank 0's own, apart again."""
    found: dict[int, dict[str, float]] = {0: {}}
    for name, value in gauges.items():
        ranked = _RANK.fullmatch(name)
        rank, own = (0, name) if ranked is None else (int(ranked[1]), ranked[2])
        found.setdefault(rank, {})[own] = value
    return found


def _of_edge(numbers: EdgeGauges) -> tuple[float, ...]:
    """The numbers in the order of `_EDGE`."""
    return (
        numbers.nbytes,
        numbers.in_flight,
        numbers.copied_nbytes,
        numbers.oldest_s,
        numbers.quarantined,
        numbers.failovers,
        numbers.retries,
    )


def samples(processes: Mapping[str, Gauges]) -> Samples:
    """Samples of each process. A name without a metric is left out: a process of another version may have more of
    them.
    """
    found: dict[Metric, dict[Labels, float]] = {
        metric: {} for metric in (*catalog.PLANES, *catalog.ENGINES, *catalog.CACHES)
    }
    for process, numbers in processes.items():
        for metric, labels, value in _read(numbers):
            found.setdefault(metric, {})[process, *labels] = value
    return found


def _read(numbers: Gauges) -> Iterator[tuple[Metric, Labels, float]]:
    for name, value in numbers.items():
        if (plain := _PLAIN.get(name)) is not None:
            yield plain, (), value
        elif name.startswith(_SLOTS):
            yield catalog.ARENA_SLOTS, (name.removeprefix(_SLOTS),), value
        elif name.startswith(_EVENT):
            yield catalog.CONTROL_EVENTS, (name.removeprefix(_EVENT),), value
        elif (edge := name.split(":"))[0] in _EDGE and len(edge) == 4:
            yield _EDGE[edge[0]], (edge[1], edge[2], edge[3]), value
        elif edge[0] == _INSTANCES and len(edge) == 5:
            yield catalog.EDGE_INSTANCES, tuple(edge[1:]), value
        elif name.startswith(_ENGINE):
            full, _, stage = name.removeprefix(_ENGINE).partition(":")
            short, dot, label = full.partition(".")
            labels = (stage, label) if dot else (stage,)
            if (metric := _OF_STAGE.get(short)) is not None and len(metric.labels) == 1 + len(labels):
                yield metric, labels, value
        elif name.startswith(_RELAY) and (of_relay := _of_relay(name.removeprefix(_RELAY))) is not None:
            yield of_relay[0], (of_relay[1],), value


def _of_relay(name: str) -> tuple[Metric, str] | None:
    """Metric and relay of a number of a relay's, whose name may have a ``_`` of its own."""
    at = name.find("_")
    while at >= 0:
        metric = _RELAYS.get(name[at + 1 :])
        if metric is not None:
            return metric, name[:at]
        at = name.find("_", at + 1)
    return None
