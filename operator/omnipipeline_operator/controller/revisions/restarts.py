"""Restarts of all units that neither the spec nor the plan asks for: another key, or one image for all.

Here: whether one is due, and why the key stays meanwhile. Not here: writing it (`writing.ChildWriter.restart_units`).
Called by `reconciling`, before it writes anything else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from omnipipeline_operator.changes.reporting.status_inputs import is_available
from omnipipeline_operator.cluster.applying import Applier
from omnipipeline_operator.controller.observing import missing
from omnipipeline_operator.controller.observing.snapshots import Snapshot
from omnipipeline_operator.controller.revisions import canaries
from omnipipeline_operator.controller.revisions.planned import Planned
from omnipipeline_operator.desired import config, naming
from omnipipeline_operator.kinds import Manifest


class KeyChange(msgspec.Struct, frozen=True, kw_only=True):
    """The change of the control key that is asked for, or needed."""

    is_lost: bool  #: Its Secret is missing.
    rotation: str | None  #: The value that asks for another key, which was not made yet.
    stays: str | None  #: Why the units may not restart with another key now.

    @property
    def kept(self) -> str | None:
        """Why the key is not replaced, though its Secret is missing or another one is asked for."""
        return self.stays if self.is_lost or self.rotation is not None else None


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """A restart of all units."""

    message: str
    level: int = logging.INFO
    rekey: bool
    rotation: str | None = None


async def key_change(
    resource: Manifest, planned: Planned, snapshot: Snapshot, before: Mapping[str, Any], applier: Applier, *, now: float
) -> KeyChange:
    """before: the status, as it was reported last."""
    asked = asked_rotation(resource)
    rotates = planned.spec.control.security.mode == "Curve" and asked not in (None, "", planned.pins.rotation)
    return KeyChange(
        is_lost=await _secret_is_lost(planned, snapshot, applier, now=now),
        rotation=asked if rotates else None,
        stays=canaries.holds_key(planned, before),
    )


def due(planned: Planned, snapshot: Snapshot, key: KeyChange) -> Restart | None:
    """The restart that comes before everything else. None: none is due."""
    if key.is_lost and not (key.stays and is_available(snapshot.entries(), snapshot.workloads)):
        message = f"Secret {planned.pins.control_secret} is missing: a new one is created, and all units restart"
        return Restart(message=message, level=logging.WARNING, rekey=True)
    if key.rotation is not None and key.stays is None:
        message = f"the key is rotated ({key.rotation}): all units restart"
        return Restart(message=message, rekey=True, rotation=key.rotation)
    if planned.pins.has_mixed_images:
        return Restart(message="the units run different images: all units restart", rekey=False)
    return None


def asked_rotation(resource: Manifest) -> str | None:
    """The value for which `kubectl omni rotate-key` has asked for a new key."""
    asked = resource["metadata"].get("annotations", {}).get(naming.KEY_ROTATION)
    return None if asked is None else str(asked)


async def _secret_is_lost(planned: Planned, snapshot: Snapshot, applier: Applier, *, now: float) -> bool:
    """Whether the key's Secret is missing; asked before new workloads are made, and when pods do not start."""
    if planned.spec.control.security.mode != "Curve" or planned.pins.is_new:
        return False
    existing = {(each.unit, each.revision) for each in snapshot.workloads}
    creates = any((each.unit, each.revision) not in existing for each in planned.desired.workloads)
    if not creates and not missing.pods_are_stuck(snapshot.workloads, now):
        return False
    manifest = config.secret(planned.pins.control_secret, snapshot.owner, bytes(config.KEY_BYTES))
    return await applier.secret_is_missing(manifest)
