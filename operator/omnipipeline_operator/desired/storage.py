"""The model cache: its claim, and the Job that fills it before pods start.

Here: these two. Not here: how pods mount the claim (`pods`). Called by `children`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.pod_templates import fetching, pods, templates, volumes
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec import scaling
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types import canonical
from omnipipeline_spec.types.plan import PipelinePlan

#: Fields of the coordinator's pod that the Job's pod has, too. Volumes, sidecars and time to drain are not among them.
_KEPT: Final = (
    "securityContext",
    "imagePullSecrets",
    "serviceAccountName",
    "tolerations",
    "nodeSelector",
    "affinity",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "hostAliases",
    "dnsPolicy",
    "dnsConfig",
)


def claim(spec: PipelineConfig, plan: PipelinePlan, facts: PodFacts) -> Manifest | None:
    """The claim that the operator creates. It has no owner: the model survives the pipeline that fetched it."""
    cache = spec.model_cache
    if cache.type != "PersistentVolumeClaim" or cache.claim_name:
        return None
    owner = facts.owner
    labels = naming.labels(owner.name)
    del labels[naming.INSTANCE_LABEL]  # Argo CD tracks by it, and would prune what has it and no owner
    manifest = naming.child(kinds.CLAIM, naming.claim(owner.name), owner, of=labels)
    del manifest["metadata"]["ownerReferences"]
    many = sum(scaling.most(plan, unit) for unit in plan.replicas) > 1
    claim_spec: Manifest = {
        "accessModes": ["ReadWriteMany" if many else "ReadWriteOnce"],
        "resources": {"requests": {"storage": cache.size}},
    }
    if cache.storage_class_name:
        claim_spec["storageClassName"] = cache.storage_class_name
    return {**manifest, "spec": claim_spec}


def prefetch(spec: PipelineConfig, plan: PipelinePlan, facts: PodFacts) -> Manifest | None:
    """The Job that fetches one revision of one model.

    Its pod is like the coordinator's: image, placement, accounts, and what the author's ``podTemplate`` says of them
    and of labels and annotations. Volumes and resources are its own. An annotation of the Job is a hash of the pod.
    """
    cache = spec.model_cache
    if not cache.prefetch.enabled or cache.type != "PersistentVolumeClaim" or spec.model_path is None:
        return None
    owner = facts.owner
    named = naming.prefetch(owner.name, spec.model_path, spec.model_revision or "")
    like = pods.coordinator_deployment(plan.coordinator, facts)["spec"]["template"]["spec"]
    container = like["containers"][0]
    fetch = fetching.container(
        container,
        spec.model_path,
        spec.model_revision,
        secret=cache.prefetch.secret_name,
        resources=pods.default_resources(facts.default_resources.coordinator),
    )
    pod = {key: like[key] for key in _KEPT if key in like} | {
        "containers": [fetch],
        "volumes": [
            volumes.temporary(),
            volumes.models({"type": cache.type, "claimName": cache.claim_name}, owner),
        ],
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",  # a failed pod keeps its termination message; a restarted one is deleted
    }
    template = {"metadata": _metadata(plan.coordinator.pod.get("podTemplate", {}), owner.name), "spec": pod}
    stamp = {naming.TEMPLATE: canonical.short_hash(template)}
    manifest = naming.child(kinds.JOB, named, owner, of=naming.labels(owner.name), annotations=stamp)
    return {**manifest, "spec": {"backoffLimit": 6, "template": template}}


def _metadata(patch: Mapping[str, Any], pipeline: str) -> Manifest:
    """The author's labels and annotations, and our labels: none of a unit, whose Service and budget select its pods."""
    given = templates.merge({}, patch.get("metadata", {}))
    authors = {key: value for key, value in given.get("labels", {}).items() if key not in naming.OWN_LABELS}
    made: Manifest = {"labels": {**authors, **naming.labels(pipeline)}}
    return made | ({"annotations": given["annotations"]} if given.get("annotations") else {})
