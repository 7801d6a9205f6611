"""What is chosen once for a pipeline and must not change while it runs: the image of a revision, the key's Secret.

Here: reading it back from the revisions ConfigMap and the Deployments, and choosing it the first time. Not here: the
ConfigMap's form (`desired.config`), writing it (`writing`). Called by `reconciling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.controller.snapshots import Snapshot
from omnipipeline_operator.desired import config, naming
from omnipipeline_spec.types.plan import PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen once and holds while a pipeline revision (its image) or the pipeline (its key) lives."""

    image: str
    images: Mapping[str, str]  #: Of other pipeline revisions.
    control_secret: str
    rekeyed: str | None = None  #: Names the occasion on which all units were made anew: a lost Secret, mixed images.
    is_new: bool  #: The Secret may not have been made yet.
    has_mixed_images: bool = False  #: Units of the wanted revision run different images, and more of it is to be made.


def pins(
    snapshot: Snapshot,
    observed: Sequence[Workload],
    *,
    update: PipelineRevision,
    coordinator: str,
    image: str | None,
    default_image: str,
    random_id: str,
) -> Pins:
    """Read back from the revisions ConfigMap and the Deployments, else chosen now.

    update: the wanted revision. coordinator: its coordinator's. image: that the spec names.
    """
    live = snapshot.revisions()
    annotations = live["metadata"].get("annotations", {}) if live else {}
    secrets = [each.control_secret for each in observed if each.control_secret]
    secret = annotations.get(naming.SECRET_PIN) or (secrets[0] if secrets else None)
    desired = {**update.units, COORDINATOR: coordinator}
    own = [each for each in observed if desired.get(each.unit) == each.revision]
    images = config.read_images(live)
    chosen = image or pinned_image(own, images.get(update.revision), default_image)
    busy = [each for each in own if not each.idle]
    return Pins(
        image=chosen,
        images=images,
        control_secret=secret or naming.control_secret(snapshot.owner.name, random_id),
        rekeyed=annotations.get(naming.REKEYED_PIN),
        is_new=secret not in secrets,
        has_mixed_images=image is None
        and len({each.image for each in busy if each.started}) > 1
        and len(busy) < len(desired),
    )


def pinned_image(own: Sequence[Workload], remembered: str | None, default_image: str) -> str:
    """The one image of a pipeline revision, for units whose spec names none.

    What runs decides: it is not restarted, and the rest is to be like it. Where nothing runs and the image cannot be
    had, the image of the day: it may be the cure. Else what the revision was made with.

    own: the revision's Deployments.
    """
    running = [each.image for each in own if each.started]
    if running:
        return max(set(running), key=lambda each: (running.count(each), each))
    if any(each.waits_for_image for each in own):
        return default_image
    made = sorted((each for each in own if each.image), key=lambda each: (not each.idle, each.created_at))
    return remembered or (made[-1].image if made else default_image)


def rekeyed(snapshot: Snapshot) -> str | None:
    """What is added to every unit's revision since a Secret was lost."""
    live = snapshot.revisions()
    pinned = live["metadata"].get("annotations", {}).get(naming.REKEYED_PIN) if live else None
    return None if pinned is None else str(pinned)
