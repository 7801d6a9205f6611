"""Choices made once for a pipeline, which must not change while it runs: the image of a revision, the key's Secret.

Here: reading it back from the revisions ConfigMap and the Deployments, and choosing it the first time. Not here: the
ConfigMap's form (`desired.config`), writing it (`writing`). Called by `reconciling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from omnipipeline_operator.changes.workloads import Workload
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.desired import config, naming
from omnipipeline_spec.types.plan import PipelineRevision
from omnipipeline_spec.types.pods import COORDINATOR


class PinnedChoices(msgspec.Struct, frozen=True, kw_only=True):
    """Choices made once, for the life of a pipeline revision (its image) or of the pipeline (its key)."""

    image: str
    images: Mapping[str, str]  #: Images of other pipeline revisions.
    control_secret: str
    rekeyed: str | None = None  #: Id of the last forced restart of all units: after a lost Secret, or mixed images.
    rotation: str | None = None  #: The request for a new key that the present one answers.
    is_new: bool  #: The Secret may not have been created yet.
    has_mixed_images: bool = False  #: Units of the desired revision run different images, and not all of them exist.


def pins(
    snapshot: Snapshot,
    observed: Sequence[Workload],
    *,
    update: PipelineRevision,
    coordinator: str,
    image: str | None,
    default_image: str,
    random_id: str,
    asked_rotation: str | None,
) -> PinnedChoices:
    """Read the pins from the revisions ConfigMap and the Deployments, or choose them now.

    update:        the desired pipeline revision.
    coordinator:   the coordinator's desired revision.
    image:         the spec's; None: it names none.
    default_image: the chart's stage image.
    random_id:     suffix of the Secret's name, if one is created.
    asked_rotation: the resource's `naming.KEY_ROTATION`; a pipeline without a key gets its first one for it.
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
    return PinnedChoices(
        image=chosen,
        images=images,
        control_secret=secret or naming.control_secret(snapshot.owner.name, random_id),
        rekeyed=annotations.get(naming.REKEYED_PIN),
        rotation=annotations.get(naming.KEY_ROTATION) if secret else asked_rotation,
        is_new=secret not in secrets,
        has_mixed_images=image is None
        and len({each.image for each in busy if each.started}) > 1
        and len(busy) < len(desired),
    )


def pinned_image(own: Sequence[Workload], remembered: str | None, default_image: str) -> str:
    """The one image of a pipeline revision, for units whose spec names none.

    The image of running pods: they are not restarted, and the others must match them. If none runs and the image cannot
    be pulled: the chart's present image, which may fix it. Otherwise the image that the revision was made with.

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
    """The id of the last forced restart; it is part of every unit's revision."""
    live = snapshot.revisions()
    pinned = live["metadata"].get("annotations", {}).get(naming.REKEYED_PIN) if live else None
    return None if pinned is None else str(pinned)
