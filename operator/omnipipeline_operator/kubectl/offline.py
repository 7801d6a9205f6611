"""The faults, the plan and the manifests of a pipeline's file, without a cluster.

Here: from a file (or a resource) to values. Not here: drawing them (`picture`). Called by the commands. The manifests
are made by the operator's own builders, so that what is reviewed is what will run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omnipipeline_operator.desired import children, naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec import loading, planning, terminal
from omnipipeline_spec.loading import LoadedPipeline
from omnipipeline_spec.types.plan import PipelinePlan
from omnipipeline_spec.validation import topology

NO_KEY = "manual"  # in place of the random id that the operator chooses


def read(file: str, overrides: Sequence[str] = ()) -> tuple[LoadedPipeline, PipelinePlan]:
    """A file's spec and its plan; entries that set nothing are warned of. Raises: SpecError: with all faults."""
    loaded = loading.load(file, overrides=overrides)
    for warning in loaded.dropped:
        terminal.echo(f"warning: {warning}", err=True)
    planned = planning.plan(loaded.spec, name=loaded.name)
    topology.check_on_cluster(loaded.spec)
    return loaded, planned


def of_resource(resource: Mapping[str, Any]) -> PipelinePlan:
    """The plan of a resource that was read from the API server. Raises: SpecError."""
    loaded = loading.from_resource(resource, source=f"omnipipeline/{resource['metadata']['name']}")
    return planning.plan(loaded.spec, name=loaded.name)


def manifests(
    loaded: LoadedPipeline, plan: PipelinePlan, *, namespace: str, image: str, key: bytes | None
) -> list[Manifest]:
    """Every object that the operator would make, in an order in which they can be applied.

    key:    of the control plane. None leaves the Secret out, for review.
    Raises: NotAllowed: a podTemplate asks for what an operator refuses by default.
    """
    owner = Owner(namespace=namespace, name=plan.pipeline, uid="")
    facts = PodFacts(owner=owner, image=image, control_secret=naming.control_secret(plan.pipeline, NO_KEY))
    made = children.manifests(loaded.spec, plan, facts, key=key or bytes(32))
    return [_unowned(manifest) for manifest in made if key is not None or manifest["kind"] != "Secret"]


def stages_of(plan: PipelinePlan) -> dict[str, tuple[str, ...]]:
    """unit -> the stages that run in it."""
    return {unit.name: tuple(stage.name for stage in unit.stages) for unit in plan.units}


def _unowned(manifest: Manifest) -> Manifest:
    """The manifest without its owner reference: the resource has no uid yet, so the garbage collector would delete the
    object.
    """
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}
    return {**manifest, "metadata": metadata}
