"""The model cache: its claim, and the Job that fills it before pods start.

Here: these two. Not here: how pods mount the claim (`pods`). Called by `children`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.pod_templates import pods, templates, volumes
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec import scaling
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types import canonical, stores
from omnipipeline_spec.types.plan import PipelinePlan
from omnipipeline_spec.types.pods import PROBE_PORT

FETCH: Final = """\
import contextlib, os, signal, sys, traceback
LOG = "/dev/termination-log"
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # PID 1 ignores what it does not handle; what came stays
for offline in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # meant for the pods that come after
    os.environ.pop(offline, None)
from huggingface_hub import snapshot_download
from tqdm.auto import tqdm
class Lines(tqdm):  # a line for every ten per cent: a pod's log has no terminal, where a bar could grow
    shown, said = None, None  # the first bar of bytes; its last line
    def __init__(self, *args, **options):
        options.pop("name", None)
        if Lines.shown is None and options.get("unit") == "B":
            Lines.shown = self
        super().__init__(*args, **{**options, "disable": False})
    def display(self, *args, **options):
        line = f"{int(10 * self.n / self.total)}0 % of {self.format_sizeof(self.total)}B" if self.total else None
        if Lines.shown is self and line not in (None, Lines.said):
            Lines.said = line
            print("fetched", line, flush=True)
def report():
    return (int(Lines.shown.n), int(Lines.shown.total or 0)) if Lines.shown else (0, 0)
try:
    from stage_runtime.processes.containers.fetching import serving
except ImportError:  # the image has an earlier version
    serving = lambda *_: contextlib.nullcontext()
path, revision = os.environ["OMNI_MODEL_PATH"], os.environ.get("OMNI_MODEL_REVISION") or None
try:
    with serving(report, os.environ):
        print("fetched to", snapshot_download(path, revision=revision, tqdm_class=Lines))
except Exception as error:
    traceback.print_exc()
    cause = f"cannot fetch {path}: {type(error).__name__}: {' '.join(str(error).split())}"
    if os.path.exists(LOG):  # the contract's `crashes` has its form
        with open(LOG, "w", errors="replace") as log:
            log.write(f"{cause[:500]}\\n---\\n{traceback.format_exc()[-1000:]}")
    sys.exit(cause)
"""
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
    if not cache.prefetch.enabled or spec.model_path is None:
        return None
    owner = facts.owner
    named = naming.prefetch(owner.name, spec.model_path, spec.model_revision or "")
    like = pods.coordinator_deployment(plan.coordinator, facts)["spec"]["template"]["spec"]
    container = like["containers"][0]
    is_stored = stores.is_address(spec.model_path)
    place = {"name": "OMNI_MODELS_DIR", "value": volumes.MODELS_DIR} if is_stored else None
    model = [
        place or {"name": "HF_HOME", "value": volumes.HUB_DIR},
        {"name": "OMNI_MODEL_PATH", "value": spec.model_path},
        {"name": "OMNI_MODEL_REVISION", "value": spec.model_revision or ""},
        {"name": "OMNI_PROGRESS_PORT", "value": str(PROBE_PORT)},
    ]
    fetch = {
        key: container[key] for key in ("image", "imagePullPolicy", "envFrom", "securityContext") if key in container
    }
    fetch |= {
        "name": "prefetch",
        "command": ["python3", "-m", "stage_runtime", "prefetch"] if is_stored else ["python3", "-c", FETCH],
        "env": [*(each for each in container["env"] if not each["name"].startswith("OMNI_")), *model],
        "resources": pods.default_resources(facts.default_resources.coordinator),
        "volumeMounts": [
            volumes.mount("tmp", "/tmp", read_only=False),
            volumes.mount("models", volumes.MODELS_DIR, read_only=False),
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if cache.prefetch.secret_name:
        fetch["envFrom"] = [*fetch.get("envFrom", ()), {"secretRef": {"name": cache.prefetch.secret_name}}]
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
