"""Compares live children with desired ones, and distinguishes ours from those of others. Plain dicts.

Here: hashes of what was applied, differences, ownership. Not here: writing anything (`cluster.applying`). Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Manifest


def stamped(manifest: Manifest) -> Manifest:
    """The manifest with a hash of itself: a field that leaves the manifest later changes the hash."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    stamp = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), naming.APPLIED: stamp}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def matches(desired: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether ``live`` has every field of ``desired``; fields that others added are ignored."""
    return _covers(live, desired)


def is_ours(live: Mapping[str, Any], owner: Owner) -> bool:
    return foreign_owner(live, owner) is None


def foreign_owner(live: Mapping[str, Any], owner: Owner) -> str | None:
    """The owner of an object, for messages; None: this pipeline."""
    references = live["metadata"].get("ownerReferences", ())
    if any(reference.get("uid") == owner.uid for reference in references):
        return None
    for reference in references:
        if reference.get("controller"):
            return f"{reference['kind']} {reference['name']} (uid {reference['uid']})"
    return "no pipeline: it has no owner"


def belongs_to_predecessor(live: Mapping[str, Any], owner: Owner) -> bool:
    """Whether an OmniPipeline of the same name and another uid owns it: the garbage collector will delete it."""
    return any(
        reference.get("kind") == kinds.PIPELINE.name and reference.get("name") == owner.name
        for reference in live["metadata"].get("ownerReferences", ())
    )


def is_orphan(live: Mapping[str, Any], owner: Owner) -> bool:
    """Whether an object without an owner was made by this operator for a pipeline of this name.

    Proof: its name, all our labels, and what only this operator writes: a hash, a selector, an immutable plan.
    """
    metadata = live["metadata"]
    if metadata.get("ownerReferences") or "deletionTimestamp" in metadata:
        return False
    labels, name, pipeline = metadata.get("labels", {}), str(metadata["name"]), owner.name
    unit, revision = labels.get(naming.UNIT_LABEL), labels.get(naming.REVISION_LABEL)
    if not _covers(labels, naming.labels(pipeline, unit, revision)):
        return False
    stamped = naming.APPLIED in metadata.get("annotations", {})
    match live["kind"]:
        case kinds.DEPLOYMENT.name if unit and revision:
            selector: Mapping[str, str] = live["spec"]["selector"].get("matchLabels", {})
            return selector == naming.selector(pipeline, unit, revision) and name == naming.unit(
                pipeline, unit, revision
            )
        case kinds.CONFIG_MAP.name if unit and revision:
            return (stamped or bool(live.get("immutable"))) and name == naming.plan(pipeline, unit, revision)
        case kinds.DEVICES.name if unit and revision:
            return stamped and name == naming.devices(pipeline, unit, revision)
        case kinds.CONFIG_MAP.name:
            return stamped and name == naming.revisions(pipeline)
        case kinds.SERVICE.name:
            return stamped and name in (naming.service(pipeline), naming.peers(pipeline))
        case kinds.INGRESS.name | kinds.ROUTE.name | kinds.POD_GROUP.name:  # either kind of PodGroup
            return stamped and name == pipeline
        case kinds.POLICY.name:
            return stamped and name in (naming.pods_policy(pipeline), naming.http_policy(pipeline))
        case kinds.BUDGET.name if unit:
            return stamped and name == naming.budget(pipeline, unit)
        case kinds.JOB.name:
            return name.startswith(f"{pipeline}-prefetch-")
    return False


def _covers(live: Any, desired: Any) -> bool:
    if type(desired) is str:  # most values; the checks for a Mapping take ten times as long
        return bool(live == desired)
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and all(
            _comparison(key)(live.get(key), value) or (key not in live and _is_dropped(key, value))
            for key, value in desired.items()
        )
    if isinstance(desired, list | tuple):
        if not isinstance(live, list):
            return False
        if desired and all(
            isinstance(each, Mapping) and "targetPort" in each for each in desired
        ):  # others may add ports
            return all(any(_covers(one, other) for one in live) for other in desired)
        same_length = len(live) == len(desired)
        return same_length and all(_covers(one, other) for one, other in zip(live, desired, strict=True))
    return bool(live == desired)


def _comparison(key: str) -> Callable[[Any, Any], bool]:
    return _is_same if key in _WHOLE else _covers


def _is_same(live: Any, desired: Any) -> bool:
    """Whether each has every field of the other: one label more selects other pods."""
    return _covers(live, desired) and _covers(desired, live)


#: Fields whose value counts as a whole.
_WHOLE: Final = ("selector", "podSelector", "namespaceSelector")


def _is_dropped(key: str, value: Any) -> bool:
    """Whether the API server leaves this field out: an empty list or map of texts. It keeps ``emptyDir: {}``."""
    return not value and (isinstance(value, list | tuple) or (isinstance(value, Mapping) and key in _OF_TEXTS))


_OF_TEXTS: Final = ("matchLabels", "labels", "annotations", "nodeSelector", "limits", "requests")
