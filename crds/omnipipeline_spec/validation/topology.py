"""Validation of a pipeline: one list of all its faults, each with its path and the names involved.

Here: the order of the rules, and the entry points. The rules themselves: form (`shapes`), graph (`graph`), processes
and GPUs (`placement`), the cluster's fields (`deployment`). Called by `planning`, `loading`, ``omni validate`` and the
operator. The API server checks a part of them in CEL (`celrules`); every spec that passes here passes there.
"""

from __future__ import annotations

import msgspec

from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.canonical import NotCanonical, check_bounds
from omnipipeline_spec.types.errors import Fault, InvalidPipeline
from omnipipeline_spec.types.values import to_document
from omnipipeline_spec.validation import deployment, disaggregation, graph, placement, shapes, transports


def faults(spec: PipelineConfig) -> tuple[Fault, ...]:
    """All faults of a spec: of its form, its graph, its pairs, its placement, its cluster fields, in this order."""
    return _read(spec)[1]


def check(spec: PipelineConfig) -> PipelineConfig:
    """The spec in canonical form, as the API server would return it.

    Raises: InvalidPipeline: with all faults.
    """
    checked, found = _read(spec)
    if found or checked is None:
        raise InvalidPipeline(found)
    return checked


def check_on_cluster(spec: PipelineConfig) -> None:
    """The operator checks with it a spec that `check` accepts.

    Raises: InvalidPipeline: some of it works on one machine only; names the places.
    """
    found = faults_on_cluster(spec)
    if found:
        raise InvalidPipeline(found)


def faults_on_cluster(spec: PipelineConfig) -> tuple[Fault, ...]:
    """Faults of settings that work on one machine only, of a spec that `check` accepts."""
    return tuple(transports.on_cluster(spec))


def warnings(spec: PipelineConfig) -> tuple[Fault, ...]:
    """Problems that some requests of a valid spec meet, and `sure_warnings`."""
    return (*graph.warnings(spec), *sure_warnings(spec))


def sure_warnings(spec: PipelineConfig) -> tuple[Fault, ...]:
    """Hooks that no request calls, and faults that the spec has on a cluster: whatever its routes choose."""
    return (*graph.uncalled(spec), *transports.on_cluster(spec))


def of_document(document: object) -> tuple[PipelineConfig | None, tuple[Fault, ...]]:
    """The spec that a document cleaned by `shapes.check` holds, and its faults of meaning.

    None if the form is so wrong that no value can be built; then only the faults of form are known.
    """
    try:
        spec = msgspec.convert(document, PipelineConfig)
    except msgspec.ValidationError:
        return None, ()
    found = (
        *graph.faults(spec),
        *disaggregation.faults(spec),
        *placement.faults(spec),
        *deployment.faults(spec),
        *transports.faults(spec),
    )
    return spec, tuple(dict.fromkeys(found))


def _read(spec: PipelineConfig) -> tuple[PipelineConfig | None, tuple[Fault, ...]]:
    # Building a PipelineConfig in Python checks nothing, so its form is checked here as a file's would be.
    try:
        check_bounds(spec)
    except NotCanonical as error:
        return None, (Fault(path=error.place, message=error.message),)
    document, malformed = shapes.check(to_document(spec), PipelineConfig, spelling="plain")
    checked, found = of_document(document)
    return checked, (*malformed, *found)
