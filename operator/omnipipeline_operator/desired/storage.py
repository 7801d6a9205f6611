"""The model cache: its claim, and the Job that fills it before pods start.

Here: these two. Not here: how pods mount the claim (`pods`). Called by `children`.
"""

from __future__ import annotations

from typing import Final

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming, pods, volumes
from omnipipeline_operator.desired.pods import PodFacts
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.plan import PipelinePlan

FETCH: Final = """\
import os, sys, traceback
LOG = "/dev/termination-log"
for offline in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # meant for the pods that come after
    os.environ.pop(offline, None)
from huggingface_hub import snapshot_download
path, revision = os.environ["OMNI_MODEL_PATH"], os.environ.get("OMNI_MODEL_REVISION") or None
try:
    print("fetched to", snapshot_download(path, revision=revision))
except Exception as error:
    traceback.print_exc()
    cause = f"cannot fetch {path}: {type(error).__name__}: {' '.join(str(error).split())}"
    if os.path.exists(LOG):  # the contract's `crashes` has its form
        with open(LOG, "w", errors="replace") as log:
            log.write(f"{cause[:500]}\\n---\\n{traceback.format_exc()[-1000:]}")
    sys.exit(cause)
"""


def claim(spec: PipelineConfig, plan: PipelinePlan, facts: PodFacts) -> Manifest | None:
    """The claim that the operator creates. It has no owner: the model survives the pipeline that fetched it."""
    cache = spec.model_cache
    if cache.type != "PersistentVolumeClaim" or cache.claim_name:
        return None
    owner = facts.owner
    labels = naming.labels(owner.name)
    manifest = naming.child(kinds.CLAIM, naming.claim(owner.name), owner, of=labels)
    del manifest["metadata"]["ownerReferences"]
    many = sum(plan.replicas.values()) > 1
    claim_spec: Manifest = {
        "accessModes": ["ReadWriteMany" if many else "ReadWriteOnce"],
        "resources": {"requests": {"storage": cache.size}},
    }
    if cache.storage_class_name:
        claim_spec["storageClassName"] = cache.storage_class_name
    return {**manifest, "spec": claim_spec}


def prefetch(spec: PipelineConfig, plan: PipelinePlan, facts: PodFacts) -> Manifest | None:
    """The Job that fetches one revision of one model.

    Its pod is like the coordinator's: image, placement, accounts, and what the author's ``podTemplate`` says of them.
    Volumes and resources are its own.
    """
    cache = spec.model_cache
    if not cache.prefetch.enabled or spec.model_path is None:
        return None
    owner = facts.owner
    named = naming.prefetch(owner.name, spec.model_path, spec.model_revision or "")
    manifest = naming.child(kinds.JOB, named, owner, of=naming.labels(owner.name))
    like = pods.coordinator_deployment(plan.coordinator, facts)["spec"]["template"]["spec"]
    container = like["containers"][0]
    model = [
        {"name": "HF_HOME", "value": volumes.HUB_DIR},
        {"name": "OMNI_MODEL_PATH", "value": spec.model_path},
        {"name": "OMNI_MODEL_REVISION", "value": spec.model_revision or ""},
    ]
    fetch = {
        key: container[key] for key in ("image", "imagePullPolicy", "envFrom", "securityContext") if key in container
    }
    fetch |= {
        "name": "prefetch",
        "command": ["python3", "-c", FETCH],
        "env": [*(each for each in container["env"] if not each["name"].startswith("OMNI_")), *model],
        "resources": pods.default_resources(facts.default_resources.coordinator),
        "volumeMounts": [
            volumes.mount("tmp", "/tmp", read_only=False),
            volumes.mount("models", volumes.MODELS_DIR, read_only=False),
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    kept = ("securityContext", "imagePullSecrets", "serviceAccountName", "tolerations", "nodeSelector", "affinity")
    pod = {key: like[key] for key in kept if key in like} | {
        "containers": [fetch],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            volumes.models({"type": cache.type, "claimName": cache.claim_name}, owner),
        ],
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",  # a failed pod keeps its termination message; a restarted one is deleted
    }
    template = {"metadata": {"labels": naming.labels(owner.name)}, "spec": pod}
    return {**manifest, "spec": {"backoffLimit": 6, "template": template}}
