"""The ConfigMaps that processes read (a unit's plan, the coordinator's list of pipeline revisions), and the key.

Here: their content, and reading the list back. Not here: which revisions belong in the list
(`changes.deciding.rollout`). Called by `children` and by `controller`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.cluster import Profiling
from omnipipeline_spec.types import canonical
from omnipipeline_spec.types.plan import CanaryShare, CoordinatorPlan, PipelineRevision, UnitPlan
from omnipipeline_spec.types.pods import CANARY_FILE, ON_DEMAND_FILE, PROFILING_FILE

PLAN_FILE: Final = "plan.json"
REVISIONS_FILE: Final = "revisions.json"
ASIDE_FILE: Final = "aside.json"
KEY_FILE: Final = "key"
KEY_BYTES: Final = 32


def plan(plan: UnitPlan | CoordinatorPlan, unit: str, owner: Owner) -> Manifest:
    """The plan of one unit revision; immutable, as its Deployment's template is, unless it holds inline code.

    A comment in a module changes the text and not the revision: the next process of a pod then reads the new text.
    """
    named = naming.plan(owner.name, unit, plan.revision)
    labels = naming.labels(owner.name, unit, plan.revision)
    manifest = naming.child(kinds.CONFIG_MAP, named, owner, of=labels)
    fixed = {} if plan.code else {"immutable": True}
    return {**manifest, **fixed, "data": {PLAN_FILE: canonical.encode(plan).decode()}}


def digests(data: Mapping[str, str]) -> dict[str, str]:
    """Each text of a ConfigMap as a hash of it: what the store keeps of a plan."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in data.items()}


def revisions(
    entries: Sequence[PipelineRevision],
    owner: Owner,
    *,
    image: str,
    control_secret: str,
    rekeyed: str | None = None,
    rotation: str | None = None,
    images: Mapping[str, str] = {},
    aside: Sequence[str] | None = None,
    profiling: Profiling | None = None,
    on_demand: Sequence[str] | None = None,
    canary: CanaryShare | None = None,
    has_canary: bool = False,
) -> Manifest:
    """The pipeline revisions that may be served, newest last, and what is pinned for them.

    image:  of the newest.
    images: of the others, as far as known.
    aside:  addresses of pods that were taken out of their unit and get no more requests. None: there never were any.
    profiling: whether profiles may be taken, and for how long. None: the defaults, which were never changed.
    on_demand: groups that requests wait for, however long they have had no instance. None: there never were any.
    canary: the share of a revision that is tried. has_canary: whether the list says so, or that none is tried.
    """
    pins = {naming.IMAGE_PIN: image, naming.SECRET_PIN: control_secret}
    pinned = {each.revision: images[each.revision] for each in entries[:-1] if each.revision in images}
    if set(pinned.values()) - {image}:
        pins[naming.IMAGES_PIN] = canonical.encode(pinned).decode()
    if rekeyed is not None:
        pins[naming.REKEYED_PIN] = rekeyed
    if rotation is not None:
        pins[naming.KEY_ROTATION] = rotation
    named = naming.revisions(owner.name)
    manifest = naming.child(kinds.CONFIG_MAP, named, owner, of=naming.labels(owner.name), annotations=pins)
    listed = {REVISIONS_FILE: canonical.encode(list(entries)).decode()}
    if aside is not None:
        listed[ASIDE_FILE] = canonical.encode(sorted(aside)).decode()
    if profiling is not None:
        limits = {"enabled": profiling.enabled, "maxSeconds": profiling.max_seconds}
        listed[PROFILING_FILE] = canonical.encode(limits).decode()
    if on_demand is not None:
        listed[ON_DEMAND_FILE] = canonical.encode(sorted(on_demand)).decode()
    if has_canary:
        listed[CANARY_FILE] = canonical.encode(canary).decode()
    return {**manifest, "data": listed}


def read_revisions(manifest: Mapping[str, Any] | None) -> tuple[PipelineRevision, ...]:
    """The list in a ConfigMap; empty when it cannot be read: the operator then writes it again."""
    if manifest is None:
        return ()
    try:
        text = manifest.get("data", {}).get(REVISIONS_FILE, "[]")
        listed = msgspec.json.decode(text, type=list[PipelineRevision])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return ()
    return tuple(listed) if all(map(_is_whole, listed)) else ()


def _is_whole(revision: PipelineRevision) -> bool:
    """Whether each stage that it names has a group, and each group a unit: somebody may have edited the list."""
    prefills = {source for source, _, kind in revision.edges if kind == "kv"}
    units = {revision.groups.get(group) for group in revision.stages.values()}
    return prefills <= revision.stages.keys() and units <= revision.units.keys()


def read_images(manifest: Mapping[str, Any] | None) -> dict[str, str]:
    """Pipeline revision -> its pinned image; a revision without one of its own has that of the newest."""
    annotations = (manifest or {}).get("metadata", {}).get("annotations", {})
    usual = annotations.get(naming.IMAGE_PIN)
    found = {each.revision: usual for each in read_revisions(manifest)} if usual else {}
    try:
        return found | msgspec.json.decode(annotations.get(naming.IMAGES_PIN, "{}"), type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return found


def has_aside(manifest: Mapping[str, Any] | None) -> bool:
    """Whether the list names pods set aside, perhaps none; once it does, an empty list must be written."""
    return ASIDE_FILE in (manifest or {}).get("data", {})


def has_profiling(manifest: Mapping[str, Any] | None) -> bool:
    """Whether coordinators have got other limits than the defaults: then every change must be written."""
    return PROFILING_FILE in (manifest or {}).get("data", {})


def has_on_demand(manifest: Mapping[str, Any] | None) -> bool:
    """Whether the list names groups that requests wait for, perhaps none."""
    return ON_DEMAND_FILE in (manifest or {}).get("data", {})


def has_canary(manifest: Mapping[str, Any] | None) -> bool:
    """Whether the list has said which revision is tried: then it must say that none is."""
    return CANARY_FILE in (manifest or {}).get("data", {})


def digest(manifest: Mapping[str, Any]) -> str:
    """A hash of the list, for the annotation that makes kubelets update the mounted file."""
    held = manifest["data"]
    files = (REVISIONS_FILE, ASIDE_FILE, PROFILING_FILE, ON_DEMAND_FILE, CANARY_FILE)
    return hashlib.sha256("".join(held.get(name, "") for name in files).encode()).hexdigest()[:8]


def secret(name: str, owner: Owner, key: bytes) -> Manifest:
    """The Secret with the control plane's key; the operator may create Secrets and may not read them."""
    manifest = naming.child(kinds.SECRET, name, owner, of=naming.labels(owner.name))
    return {**manifest, "type": "Opaque", "immutable": True, "data": {KEY_FILE: base64.b64encode(key).decode()}}
