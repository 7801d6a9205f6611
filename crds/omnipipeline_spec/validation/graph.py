"""Faults of the graph of stages: edges, joins, routes, reachability.

Here: the faults that follow from ``next``, ``waitFor``, ``streamTo`` and the hooks beside them. Not here: processes
and GPUs (`placement`), the cluster's fields (`deployment`). Called by `topology` on a spec of valid form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from omnipipeline_spec.pipeline import PipelineConfig, StageConfig
from omnipipeline_spec.types.errors import Fault


def faults(spec: PipelineConfig) -> Iterator[Fault]:
    """All faults of the graph."""
    names = frozenset(stage.name for stage in spec.stages)
    for index, stage in enumerate(spec.stages):
        path = f"stages[{index}]"
        yield from _unknown_targets(stage, path, names)
        yield from _ways_out(stage, path)
        yield from _hooks(stage, path)
    yield from _pipeline_names(spec, names)
    yield from _joins(spec)
    yield from _second_payloads(spec)
    yield from _cycles(spec)
    yield from _unreachable(spec)


def warnings(spec: PipelineConfig) -> Iterator[Fault]:
    """Problems that some requests of a valid spec meet, depending on what its routes choose."""
    for index, stage in enumerate(spec.stages):
        feeders = _feeders(spec, stage)
        if len(feeders) > 1 and not stage.wait_for:
            message = f"{stage.name!r} gets results of {quoted(feeders)} and has no waitFor: a request in which more "
            message += "than one of them sends to it fails"
            yield Fault(path=f"stages[{index}]", message=message, names=(stage.name, *feeders))


def uncalled(spec: PipelineConfig) -> Iterator[Fault]:
    """Hooks of a valid spec that no request calls."""
    for index, stage in enumerate(spec.stages):
        targets = sorted({*stage.project_payload} - {*stage.next})
        if targets:
            message = f"{quoted(targets)} {'gets' if len(targets) == 1 else 'get'} no result of {stage.name!r}, only "
            message += "chunks, which are not projected: the function is never called"
            yield Fault(path=f"stages[{index}].projectPayload", message=message, names=(stage.name, *targets))


def quoted(names: Sequence[str]) -> str:
    """Names as a message lists them."""
    return ", ".join(repr(name) for name in names)


def edges(spec: PipelineConfig) -> Mapping[str, tuple[str, ...]]:
    """Stage -> the stages that get its result or its chunks, each once; unknown ones left out."""
    names = {stage.name for stage in spec.stages}
    return {
        stage.name: tuple(dict.fromkeys(name for name in (*stage.next, *stage.stream_to) if name in names))
        for stage in spec.stages
    }


def _unknown_targets(stage: StageConfig, path: str, names: frozenset[str]) -> Iterator[Fault]:
    for field, targets in (("next", stage.next), ("waitFor", stage.wait_for), ("streamTo", stage.stream_to)):
        unknown = sorted(set(targets) - names)
        if unknown:
            verb = "is not a stage" if len(unknown) == 1 else "are not stages"
            yield Fault(path=f"{path}.{field}", message=f"{quoted(unknown)} {verb}", names=tuple(unknown))
        if stage.name in targets:
            yield Fault(path=f"{path}.{field}", message=f"{stage.name!r} names itself", names=(stage.name,))
    stray = sorted(set(stage.project_payload) - {*stage.next, *stage.stream_to})
    if stray:
        message = f"{quoted(stray)} must be in next or streamTo of {stage.name!r}"
        yield Fault(path=f"{path}.projectPayload", message=message, names=(stage.name, *stray))
    held = sorted(set(stage.stream_at_end) - {*stage.stream_to})
    if held:
        message = f"{quoted(held)} must be in streamTo of {stage.name!r}"
        yield Fault(path=f"{path}.streamAtEnd", message=message, names=(stage.name, *held))


def _ways_out(stage: StageConfig, path: str) -> Iterator[Fault]:
    if stage.terminal and stage.next:
        message = f"{stage.name!r} is terminal and has next; exactly one of the two must be set"
        yield Fault(path=path, message=message, names=(stage.name,))
    if not stage.terminal and not stage.next:
        message = f"{stage.name!r} has neither next nor terminal: true; exactly one of the two must be set"
        yield Fault(path=path, message=message, names=(stage.name,))
    if stage.route_fn and not stage.next:
        message = f"{stage.name!r} has no next to choose from" + ("; it is terminal" if stage.terminal else "")
        yield Fault(path=f"{path}.routeFn", message=message, names=(stage.name,))


def _hooks(stage: StageConfig, path: str) -> Iterator[Fault]:
    wants = (
        ("mergeFn", bool(stage.wait_for) and not stage.merge_fn, "is required, because waitFor is set"),
        ("mergeFn", bool(stage.merge_fn) and not stage.wait_for, "has nothing to merge without waitFor"),
        ("waitForFn", bool(stage.wait_for_fn) and not stage.wait_for, "has nothing to choose from without waitFor"),
        ("streamDoneToFn", bool(stage.stream_done_to_fn) and not stage.stream_to, "has no targets without streamTo"),
    )
    for field, broken, message in wants:
        if broken:
            yield Fault(path=f"{path}.{field}", message=f"of {stage.name!r} {message}", names=(stage.name,))


def _pipeline_names(spec: PipelineConfig, names: frozenset[str]) -> Iterator[Fault]:
    if spec.entry_stage and spec.entry_stage not in names:
        yield Fault(path="entryStage", message=f"{spec.entry_stage!r} is not a stage", names=(spec.entry_stage,))
    if not spec.terminal_stages:
        yield Fault(path="stages", message="no stage is terminal, so no request would ever end")
    for name in sorted(set(spec.runtime_overrides) - names):
        yield Fault(path=f"runtimeOverrides.{name}", message=f"{name!r} is not a stage", names=(name,))
    for index, fused in enumerate(spec.fused_stages):
        unknown = sorted(set(fused) - names)
        if unknown:
            verb = "is not a stage" if len(unknown) == 1 else "are not stages"
            yield Fault(path=f"fusedStages[{index}]", message=f"{quoted(unknown)} {verb}", names=tuple(unknown))


def _joins(spec: PipelineConfig) -> Iterator[Fault]:
    by_name = {stage.name: stage for stage in spec.stages}
    for index, stage in enumerate(spec.stages):
        path = f"stages[{index}].waitFor"
        if stage.wait_for and stage.name == spec.resolved_entry_stage:
            message = f"{stage.name!r} is the entry: new requests come from no stage, so its fan-in is never complete"
            yield Fault(path=path, message=message, names=(stage.name,))
        for source in stage.wait_for:
            if source in by_name and source != stage.name and stage.name not in by_name[source].next:
                message = f"{source!r} never routes to {stage.name!r}, so its fan-in is never complete: add it to "
                message += f"next of {source!r}"
                yield Fault(path=path, message=message, names=(source, stage.name))


def _second_payloads(spec: PipelineConfig) -> Iterator[Fault]:
    """Stages without a join that every request sends several payloads, and joins that leave out a source."""
    certain = _always_sent(spec)
    for index, stage in enumerate(spec.stages):
        feeders = _feeders(spec, stage)
        always = [name for name in feeders if name in certain]
        strays = [name for name in feeders if name not in stage.wait_for]
        if not stage.wait_for and len(always) > 1:
            message = f"{stage.name!r} takes one payload per request, but {quoted(always)} send it one each: join them "
            message += "by waitFor and mergeFn, or choose one by routeFn"
            yield Fault(path=f"stages[{index}]", message=message, names=(stage.name, *always))
        elif stage.wait_for and strays:
            message = f"of {stage.name!r} leaves out {quoted(strays)}, which {'send' if len(strays) > 1 else 'sends'} "
            message += "to it: a request in which that happens fails"
            yield Fault(path=f"stages[{index}].waitFor", message=message, names=(stage.name, *strays))


def _feeders(spec: PipelineConfig, stage: StageConfig) -> list[str]:
    """The stages that may send it their result, without those in a cycle with it (a fault of its own)."""
    behind = reachable(stage.name, edges(spec))
    return [other.name for other in spec.stages if stage.name in other.next and other.name not in behind]


def _always_sent(spec: PipelineConfig) -> set[str]:
    """The stages that every request passes and that have no route: each sends its result to all of ``next``."""
    passed: set[str] = {spec.resolved_entry_stage}
    while True:
        sends = {stage.name for stage in spec.stages if stage.name in passed and not stage.route_fn}
        more = set(passed)
        for stage in spec.stages:
            feeders = sends.intersection(_feeders(spec, stage))
            if (feeders and not stage.wait_for) or (
                stage.wait_for and not stage.wait_for_fn and feeders >= set(stage.wait_for)
            ):
                more.add(stage.name)
        if more == passed:
            return sends
        passed = more


def _cycles(spec: PipelineConfig) -> Iterator[Fault]:
    """One fault per strongly connected component, with a cycle of it. A stage that names itself has its own fault."""
    out = edges(spec)
    index_of = {stage.name: index for index, stage in enumerate(spec.stages)}
    seen: set[str] = set()
    for start in out:
        if start in seen:
            continue
        cycle = _cycle_through(start, out)
        if cycle:
            seen |= _mutual(start, out)
            way = " → ".join([*cycle, start])
            path = f"stages[{index_of[start]}]"
            yield Fault(path=path, message=f"the graph has a cycle: {way}", names=tuple(cycle))


def _cycle_through(start: str, out: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The shortest path from a stage back to itself; empty if no path leads back."""
    ways = [[start]]
    seen: set[str] = set()
    while ways:
        way = ways.pop(0)
        for target in out[way[-1]]:
            if target == start and len(way) > 1:
                return way
            if target not in seen and target != start:
                seen.add(target)
                ways.append([*way, target])
    return []


def _mutual(start: str, out: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {name for name in reachable(start, out) if start in reachable(name, out)}


def reachable(start: str, out: Mapping[str, tuple[str, ...]]) -> set[str]:
    """All stages reachable from a stage, itself included."""
    found: set[str] = set()
    open_ends = [start] if start in out else []
    while open_ends:
        name = open_ends.pop()
        if name not in found:
            found.add(name)
            open_ends.extend(out[name])
    return found


def _unreachable(spec: PipelineConfig) -> Iterator[Fault]:
    entry = spec.resolved_entry_stage
    touched = reachable(entry, edges(spec))
    if not touched:
        return
    for index, stage in enumerate(spec.stages):
        if stage.name not in touched:
            message = f"{stage.name!r} cannot be reached from the entry {entry!r}"
            yield Fault(path=f"stages[{index}]", message=message, names=(stage.name, entry))
