"""GPUs by Dynamic Resource Allocation: the ResourceClaimTemplate of a unit revision, and how its pods use it.

Here: pure functions from settings of a plan to the template and to fields of a pod. Not here: the pod (`pods`), GPUs as
an extended resource (`pods`), which devices a claim gets (the scheduler). Called by `children` and `pods`. A template
cannot be edited, as a Deployment's pods are not, so each unit revision has one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.types.plan import UnitPlan

REQUEST: Final = "gpus"  # the name of the claim in a pod, and of its one request


def template(unit: UnitPlan, owner: Owner) -> Manifest | None:
    """The ResourceClaimTemplate; None: the unit has no GPU, or has them as an extended resource."""
    claim = unit.pod.get("gpuClaim")
    if claim is None:
        return None
    labels = naming.labels(owner.name, unit.name, unit.revision)
    exactly: Manifest = {
        "deviceClassName": claim["deviceClassName"],
        "allocationMode": "ExactCount",
        "count": unit.pod["gpus"],
    }
    if claim.get("selectors"):
        exactly["selectors"] = [{"cel": {"expression": each}} for each in claim["selectors"]]
    manifest = naming.child(kinds.DEVICES, naming.devices(owner.name, unit.name, unit.revision), owner, of=labels)
    devices = {"requests": [{"name": REQUEST, "exactly": exactly}]}
    return {**manifest, "spec": {"metadata": {"labels": labels}, "spec": {"devices": devices}}}


def of_pod(settings: Mapping[str, Any], named: str) -> Manifest:
    """The fields of a pod's spec that ask for the claim. ``named``: its template."""
    if "gpuClaim" not in settings:
        return {}
    return {"resourceClaims": [{"name": REQUEST, "resourceClaimTemplateName": named}]}


def of_container(settings: Mapping[str, Any]) -> Manifest:
    """The part of a container's resources that gives it the devices of the claim."""
    return {"claims": [{"name": REQUEST}]} if "gpuClaim" in settings else {}
