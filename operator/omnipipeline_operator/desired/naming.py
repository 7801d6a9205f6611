"""Names, labels and owner references of a pipeline's children.

Here: how each child is called and how it is found again. Not here: what is in it (`pods`, `services`, `config`).
Called by every builder and by what reads children back. Two pipelines of one namespace never have children of the same
name: a name ends in a fixed word, or in a hash over the pipeline's and the unit's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec

from omnipipeline_operator.kinds import PIPELINE, Kind, Manifest
from omnipipeline_spec.types import quantities

PIPELINE_LABEL: Final = "omnipipeline.dev/pipeline"
UNIT_LABEL: Final = "omnipipeline.dev/unit"
INSTANCE_LABEL: Final = "app.kubernetes.io/instance"
REVISION_LABEL: Final = "omnipipeline.dev/revision"
#: Label of the resource and of the pods of its units: Kueue decides when they get nodes.
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
#: Annotation of the revisions ConfigMap: what was chosen once and must not change while the pipeline runs: the image of
#: the newest pipeline revision, those of the others where they differ (JSON), the key. Annotation of a Deployment:
#: the image that was pinned when it was made.
IMAGES_PIN: Final = "omnipipeline.dev/images"
IMAGE_PIN: Final = "omnipipeline.dev/image"
SECRET_PIN: Final = "omnipipeline.dev/control-secret"
#: There too: id of the last forced restart (a lost Secret, mixed images). Part of every unit's revision.
REKEYED_PIN: Final = "omnipipeline.dev/rekeyed"
#: Annotation of the resource: a new value (`kubectl omni rotate-key`) asks for a new key. Annotation of the revisions
#: ConfigMap: the value that the present key was made for.
KEY_ROTATION: Final = "omnipipeline.dev/key-rotation"
#: Annotation of a Deployment whose pods are refused: when a retry was last requested.
RETRIED_AT: Final = "omnipipeline.dev/tried"
#: Annotation of every mutable child: hash of what was applied; it changes when a field leaves the manifest.
APPLIED: Final = "omnipipeline.dev/applied"
#: Annotation of the Job that fetches the model: hash of its pod template. One that differs is replaced until it has
#: succeeded.
TEMPLATE: Final = "omnipipeline.dev/template"
#: Annotation of the coordinator's pods: a change makes the kubelet update the mounted file at once (0.7 s, else up to
#: 64 s).
REVISIONS_DIGEST: Final = "omnipipeline.dev/revisions"
MAX_NAME: Final = 63  # a Deployment's name becomes a label and the start of a host name


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The OmniPipeline that children belong to."""

    namespace: str
    name: str
    uid: str

    def reference(self) -> Manifest:
        """The owner reference. It blocks the owner's foreground deletion, as a controller's does."""
        return {
            "apiVersion": PIPELINE.api_version,
            "kind": PIPELINE.name,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def unit(pipeline: str, name: str, revision: str) -> str:
    """A unit's Deployment: ``<pipeline>-<unit>-<revision>``, cut to 63 characters with a hash of what was cut."""
    slug = quantities.slug(name)
    room = MAX_NAME - len(pipeline) - len(revision) - 2
    if len(slug) > room:
        slug = f"{slug[: room - 5].rstrip('-')}-{_hash(name, 4)}"
    return f"{pipeline}-{slug}-{revision}"


def plan(pipeline: str, name: str, revision: str) -> str:
    return f"{unit(pipeline, name, revision)}-plan"


def devices(pipeline: str, name: str, revision: str) -> str:
    """The ResourceClaimTemplate of a unit revision's GPUs."""
    return f"{unit(pipeline, name, revision)}-gpus"


def budget(pipeline: str, name: str) -> str:
    """A unit's PodDisruptionBudget; the hash keeps ``a`` + ``b-c`` apart from ``a-b`` + ``c``."""
    return unit(pipeline, name, _hash(f"{pipeline}/{name}", 6))


def service(pipeline: str) -> str:
    return pipeline


def peers(pipeline: str) -> str:
    """The headless Service of all live coordinators. (No pipeline's name may end so.)"""
    return f"{pipeline}-peers"


def revisions(pipeline: str) -> str:
    return f"{pipeline}-revisions"


def control_secret(pipeline: str, random_id: str) -> str:
    return f"{pipeline}-control-{random_id}"


def claim(pipeline: str) -> str:
    return f"{pipeline}-models"


def prefetch(pipeline: str, model: str, revision: str) -> str:
    return f"{pipeline}-prefetch-{_hash(f'{model}@{revision}', 8)}"


def pods_policy(pipeline: str) -> str:
    return f"{pipeline}-pods"


def http_policy(pipeline: str) -> str:
    return f"{pipeline}-http"


def selector(pipeline: str, unit: str | None = None, revision: str | None = None) -> dict[str, str]:
    """The labels that select pods."""
    given = {PIPELINE_LABEL: pipeline, UNIT_LABEL: unit, REVISION_LABEL: revision}
    return {label: value for label, value in given.items() if value is not None}


def labels(pipeline: str, unit: str | None = None, revision: str | None = None) -> dict[str, str]:
    """All labels of a child."""
    return {
        "app.kubernetes.io/name": "omnipipeline",
        INSTANCE_LABEL: pipeline,
        "app.kubernetes.io/managed-by": "omnipipeline-operator",
        **({"app.kubernetes.io/component": unit} if unit else {}),
        **selector(pipeline, unit, revision),
    }


#: The keys of `labels`.
OWN_LABELS: Final = frozenset(labels("pipeline", "unit", "revision"))


def child(
    kind: Kind, name: str, owner: Owner, *, of: Mapping[str, str], annotations: Mapping[str, str] = {}
) -> Manifest:
    """apiVersion, kind and metadata of a child. ``of``: its labels."""
    metadata: Manifest = {"name": name, "namespace": owner.namespace, "labels": dict(of)}
    if annotations:
        metadata["annotations"] = dict(annotations)
    metadata["ownerReferences"] = [owner.reference()]
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}


def _hash(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
