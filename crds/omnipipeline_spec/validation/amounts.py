"""Faults of amounts: what the API server refuses only when a pod template is created, without a place in the spec.

Here: requests and limits of containers, of each process group and added up over those that share a pod. Not here: their
form (`shapes`), devices that the operator itself requests (`placement`). Called by `placement`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from omnipipeline_spec.cluster import Resources
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types import quantities
from omnipipeline_spec.types.errors import Fault
from omnipipeline_spec.types.quantities import QUOTA_PREFIX
from omnipipeline_spec.validation.graph import quoted
from omnipipeline_spec.validation.grouping import Grouping

MOST_DEVICES: Final = 10**15  # the API server takes a larger amount for one with a fraction
_PAGES: Final = "hugepages-"


def faults(spec: PipelineConfig, groups: Grouping, devices: Mapping[str, Collection[str]]) -> Iterator[Fault]:
    """devices: process group -> the resources that the operator sets for its pod, with its own amounts."""
    given = {group.name: group.resources for group in spec.process_groups if group.resources is not None}
    at = {group.name: f"processGroups[{index}].resources" for index, group in enumerate(spec.process_groups)}
    found = {name: list(of_container(its, at[name], name, devices.get(name, ()))) for name, its in given.items()}
    for each in found.values():
        yield from each
    yield from of_container(spec.coordinator.resources or Resources(), "coordinator.resources", "coordinator", ())
    for members in groups.units.values():
        own = [name for name in members if name in given]
        if len(own) > 1 and not any(found[name] for name in own):
            summed = Resources(
                requests=quantities.sum_quantities(given[name].requests for name in own),
                limits=quantities.sum_quantities(given[name].limits for name in own),
            )
            beside = f"; {quoted(own)} share a pod, and their resources are added"
            yield from of_container(summed, at[own[-1]], own[-1], devices.get(own[-1], ()), beside)


def of_container(
    given: Resources, path: str, name: str, devices: Collection[str] = (), beside: str = ""
) -> Iterator[Fault]:
    """Faults of one container's resources. devices: as in `faults`, of its pod. beside: the end of each message."""
    for resource in sorted({*given.requests, *given.limits} - {*devices}):
        request, limit = given.requests.get(resource), given.limits.get(resource)
        if resource.startswith(QUOTA_PREFIX):
            message = f"begins with {QUOTA_PREFIX}, as in a quota: leave that out"
            yield Fault(path=f"{path}.{'limits' if limit else 'requests'}.{resource}", message=message, names=(name,))
            continue
        is_counted = "/" in resource and "kubernetes.io/" not in resource
        for kind, amount in (("requests", request), ("limits", limit)):
            why = _refused(resource, amount, is_counted=is_counted) if amount is not None else None
            if why is not None:
                yield Fault(path=f"{path}.{kind}.{resource}", message=f"{amount} {why}{beside}", names=(name,))
        if request is None:
            continue
        if is_counted or resource.startswith(_PAGES):
            if limit is None or quantities.parse_quantity(request) != quantities.parse_quantity(limit):
                message = f"{request} needs a limit of the same amount, not {limit or 'none'}{beside}"
                yield Fault(path=f"{path}.requests.{resource}", message=message, names=(name,))
        elif limit is not None and quantities.parse_quantity(limit) < quantities.parse_quantity(request):
            message = f"{limit} is less than the request of {request}{beside}"
            yield Fault(path=f"{path}.limits.{resource}", message=message, names=(name,))


def _refused(resource: str, amount: str, *, is_counted: bool) -> str | None:
    """Why a container cannot have so much of it; None: it can."""
    value = quantities.parse_quantity(amount)
    if is_counted and (value.denominator != 1 or value >= MOST_DEVICES):
        return "is not a number of devices"
    if resource.startswith(_PAGES) and value % quantities.parse_quantity(resource.removeprefix(_PAGES)):
        return f"is not a multiple of {resource.removeprefix(_PAGES)}"
    return None
