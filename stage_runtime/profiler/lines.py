"""A request as lines for people: one for each stage's stay, one for each hop. `omni trace` and the page draw them.

Pure. It draws a record of the coordinator, or of a profile's events, which are brought to the record's form first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from omnipipeline_spec.types.pods import COORDINATOR
from stage_runtime.profiler import events, views
from stage_runtime.profiler.event_files import Moment

QUEUE, FUNCTION, HOP = "queue", "function", "hop"
_COMES: Final = (events.STAGE_INPUT_RECEIVED, events.STAGE_DISPATCH)
_BEGINS: Final = (events.STAGE_RUN_START, events.SCHEDULER_PREFILL_START)
_ENDS: Final = (events.STAGE_COMPLETE, events.STAGE_RUN_END)


class Line(NamedTuple):
    """Milliseconds since the admission."""

    label: str
    stage: str  #: The stage; of a hop its source.
    start_ms: float
    end_ms: float
    parts: tuple[tuple[str, float], ...]  #: (`QUEUE`, `FUNCTION` or `HOP`, milliseconds), one after the other.


def of_record(stages: Mapping[str, Mapping[str, Any]], hops: Iterable[Mapping[str, Any]]) -> list[Line]:
    """Lines in order of time. stages, hops: as in the answer of ``GET /v1/requests/{id}``."""
    found = [
        Line(name, name, each["start_ms"], each["end_ms"], ((QUEUE, each["queue_ms"]), (FUNCTION, each["run_ms"])))
        for name, each in stages.items()
        if each["start_ms"] is not None
    ]
    for hop in hops:
        arrow = "⇢" if hop["kind"] == "stream" else "→"
        took = ((HOP, hop["end_ms"] - hop["start_ms"]),)
        found.append(
            Line(f"{hop['source']} {arrow} {hop['target']}", hop["source"], hop["start_ms"], hop["end_ms"], took)
        )
    return sorted(found, key=lambda line: (line.start_ms, line.end_ms))


def of_events(moments: Sequence[Moment], hops: Iterable[views.Hop]) -> list[Line]:
    """The lines of one request. hops: of the same events (`views.paired`). A stage without an end lasts until the
    request's.
    """
    start = views.anchor_ns(moments)
    stages = {_name(key, end): _stay(times, start) for key, times, end in _stays(moments)}
    return of_record(stages, [_hop(*each, start) for each in (*_first_hops(hops), *_outer_hops(moments))])


def _stays(moments: Sequence[Moment]) -> Iterator[tuple[tuple[str, str], tuple[int, int, int], bool]]:
    """((stage, attempt), when its first input came, its function began, it was over), and whether it was."""
    came: dict[tuple[str, str], int] = {}
    began: dict[tuple[str, str], int] = {}
    over: dict[tuple[str, str], int] = {}
    for each in moments:
        if each.name not in _OF_STAYS:
            continue
        key = each.stage, str(each.metadata.get("attempt", 1))
        if each.name in _ENDS:
            over[key] = max(each.time_ns, over.get(key, 0))
        else:
            came.setdefault(key, each.time_ns)
            if each.name in _BEGINS:
                began.setdefault(key, each.time_ns)
    last = views.end_ns(moments)
    for key, at in came.items():
        end = max(over.get(key, last), at)
        yield key, (at, min(began.get(key, at if key in over else end), end), end), key in over


_OF_STAYS: Final = frozenset((*_COMES, *_BEGINS, *_ENDS))


def _name(key: tuple[str, str], ended: bool) -> str:
    tried = "" if key[1] in ("0", "1") else f", attempt {key[1]}"
    return f"{key[0]}{tried}{'' if ended else ' (no end)'}"


def _stay(times: tuple[int, int, int], start: int) -> dict[str, float]:
    came, began, end = times
    return {
        "start_ms": (came - start) / 1e6,
        "end_ms": (end - start) / 1e6,
        "queue_ms": (began - came) / 1e6,
        "run_ms": (end - began) / 1e6,
    }


def _first_hops(hops: Iterable[views.Hop]) -> Iterator[tuple[str, str, str, int, int]]:
    """The hops, and of a stream only that of its first chunk."""
    first: dict[tuple[str, str], views.Hop] = {}
    for hop in hops:
        if hop.kind != "stream":
            yield hop.source, hop.destination, hop.kind, hop.start_ns, hop.end_ns
        elif hop.start_ns < first.setdefault((hop.source, hop.destination), hop).start_ns:
            first[hop.source, hop.destination] = hop
    for (source, destination), hop in first.items():
        yield source, destination, hop.kind, hop.start_ns, hop.end_ns


def _outer_hops(moments: Sequence[Moment]) -> Iterator[tuple[str, str, str, int, int]]:
    """The hop from the client's admission to the entry, and the one from the last stage to the answer."""
    admitted = answered = complete = entered = None
    for each in moments:
        match each.name:
            case events.REQUEST_ADMISSION:
                admitted = admitted or each
            case events.STAGE_INPUT_RECEIVED if entered is None and each.metadata.get("from_stage") == COORDINATOR:
                entered = each
            case events.STAGE_COMPLETE:
                complete = each
            case events.TERMINAL_RESPONSE:
                answered = each
    if admitted and entered:
        yield COORDINATOR, entered.stage, "payload", admitted.time_ns, entered.time_ns
    if complete and answered:
        yield complete.stage, COORDINATOR, "payload", complete.time_ns, answered.time_ns


def _hop(source: str, target: str, kind: str, start_ns: int, end_ns: int, start: int) -> dict[str, Any]:
    """Clocks are known to some microseconds only: no hop ends before it begins."""
    ms = (start_ns - start) / 1e6, (max(end_ns, start_ns) - start) / 1e6
    return {"source": source, "target": target, "kind": kind, "start_ms": ms[0], "end_ms": ms[1]}
