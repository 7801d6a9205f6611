"""The history of a pipeline: the spec of each revision that has served, as a ControllerRevision.

Here: the object, its name, and which ones are beyond the limit. Not here: when a revision is recorded
(`controller.revisions.revision_history`), going back to one (`kubectl.history`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.types import canonical
from omnipipeline_spec.types.plan import PipelinePlan

#: Annotation of the revisions ConfigMap: name of the last recorded entry, so that a reconcile without changes writes
#: nothing.
RECORDED: Final = "omnipipeline.dev/recorded"


def name(pipeline: str, plan: PipelinePlan) -> str:
    """The entry's name; two specs have the same one if changing between them restarts no pod."""
    return f"{pipeline}-{canonical.short_hash([plan.current.revision, plan.coordinator.revision])}"


def entry(resource: Mapping[str, Any], plan: PipelinePlan, owner: Owner) -> Manifest:
    """The spec as it is now, numbered by the resource's generation."""
    labels = naming.labels(owner.name, None, plan.current.revision)
    head = naming.child(kinds.CONTROLLER_REVISION, name(owner.name, plan), owner, of=labels)
    return {**head, "revision": number(resource), "data": {"spec": resource["spec"]}}


def number(resource: Mapping[str, Any]) -> int:
    return int(resource["metadata"]["generation"])


def beyond(entries: Sequence[Manifest], limit: int) -> list[Manifest]:
    """The entries to delete: all but the newest and ``limit`` more."""
    return sorted(entries, key=lambda one: one["revision"], reverse=True)[limit + 1 :]
