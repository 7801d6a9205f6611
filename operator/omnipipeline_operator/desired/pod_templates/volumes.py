"""Volumes of our pods and where they are mounted: plan, keys, code, shared memory, models, profiles.

Here: all of it, for units and the coordinator. Not here: the claims themselves (`storage`). Called by `pods`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from omnipipeline_operator.desired import naming
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.types.plan import CoordinatorPlan, UnitPlan
from omnipipeline_spec.validation.variables import JOINED

PLAN_DIR: Final = "/etc/omnipipeline/plan"
REVISIONS_DIR: Final = "/etc/omnipipeline/revisions"
CONTROL_DIR: Final = "/etc/omnipipeline/control"
API_KEY_DIR: Final = "/etc/omnipipeline/api-key"
TLS_DIR: Final = "/etc/omnipipeline/tls"
CODE_DIR: Final = "/etc/omnipipeline/code"
MODELS_DIR: Final = "/models"
HUB_DIR: Final = f"{MODELS_DIR}/huggingface"  #: HF_HOME
PROFILES_DIR: Final = "/profiles"
#: A pod that writes more is evicted, before its node's disk is full. Converted weights and compiled code lie here.
TMP_SIZE: Final = "32Gi"
PROFILES_SIZE: Final = "8Gi"  # torch's trace of a minute is a few hundred MB; ``profiling.storage`` changes it


def mounts(settings: Mapping[str, Any], environment: list[Manifest]) -> list[Manifest]:
    """The mounts of a container with this environment."""
    names = {variable["name"] for variable in environment}
    mounts = {
        "plan": ("plan", PLAN_DIR, True),
        "control": ("control", CONTROL_DIR, True) if "OMNI_CONTROL_KEY_FILE" in names else None,
        "api-key": ("api-key", API_KEY_DIR, True) if "OMNI_API_KEY_FILE" in names else None,
        "tls": ("tls", TLS_DIR, True) if "OMNI_TLS_CERT_FILE" in names else None,
        "code": ("code", CODE_DIR, True) if JOINED in names else None,
        "shm": ("shm", "/dev/shm", False),
        "tmp": ("tmp", "/tmp", False),
        "profiles": ("profiles", PROFILES_DIR, False),
        "models": ("models", MODELS_DIR, _is_read_only(settings)) if "modelCache" in settings else None,
    }
    return [mount(name, path, read_only=read_only) for name, path, read_only in filter(None, mounts.values())]


def volumes(
    plan: UnitPlan | CoordinatorPlan,
    unit: str,
    *,
    owner: Owner,
    control_secret: str,
    shared_memory: str | None,
    node_models: str,
) -> list[Manifest]:
    """The volumes of a pod of ``unit``. shared_memory: the limit of /dev/shm; node_models: the directory of nodes."""
    named = naming.plan(owner.name, unit, plan.revision)
    made: list[Manifest] = [{"name": "plan", "configMap": {"name": named}}]
    if plan.security == "Curve":
        secret = {"secretName": control_secret, "defaultMode": 0o440}
        made.append({"name": "control", "secret": secret})
    if "apiKeySecretRef" in plan.pod:
        key = plan.pod["apiKeySecretRef"]
        items = [{"key": key["key"], "path": "key"}]
        made.append({"name": "api-key", "secret": {"secretName": key["name"], "items": items, "defaultMode": 0o440}})
    if "tlsSecretName" in plan.pod:
        items = [{"key": name, "path": name} for name in ("tls.crt", "tls.key")]
        secret = {"secretName": plan.pod["tlsSecretName"], "items": items, "defaultMode": 0o440}
        made.append({"name": "tls", "secret": secret})
    if plan.code_config_map:
        made.append({"name": "code", "configMap": {"name": plan.code_config_map}})
    memory: Manifest = {"medium": "Memory"} | ({"sizeLimit": shared_memory} if shared_memory else {})
    made += [
        {"name": "shm", "emptyDir": memory},
        temporary(),
        {"name": "profiles", **_profiles(plan.pod.get("profilingStorage", {}))},
    ]
    if "modelCache" in plan.pod:
        made.append(models(plan.pod["modelCache"], owner, node_models))
    return made


def disposable(made: Iterable[Manifest]) -> list[str]:
    """The emptyDirs of a pod that hold nothing for longer than its process lives; a fetched model is kept."""
    return [each["name"] for each in made if "emptyDir" in each and each["name"] != "models"]


def _profiles(storage: Mapping[str, Any]) -> Manifest:
    if storage.get("claimName"):
        return {"persistentVolumeClaim": {"claimName": storage["claimName"]}}
    limit = storage.get("emptyDir", {}).get("sizeLimit")
    return {"emptyDir": {"sizeLimit": limit or PROFILES_SIZE}}


def temporary() -> Manifest:
    """The volume of ``/tmp``."""
    return {"name": "tmp", "emptyDir": {"sizeLimit": TMP_SIZE}}


def models(cache: Mapping[str, Any], owner: Owner, node_models: str = "") -> Manifest:
    """The volume of the model cache."""
    if cache["type"] == "Node":
        return {"name": "models", "hostPath": {"path": node_models, "type": "DirectoryOrCreate"}}
    if cache["type"] == "EmptyDir":
        return {"name": "models", "emptyDir": {"sizeLimit": cache["size"]} if cache.get("size") else {}}
    if cache["type"] == "Image":
        policy = {"pullPolicy": cache["pullPolicy"]} if cache.get("pullPolicy") else {}
        return {"name": "models", "image": {"reference": cache["image"], **policy}}
    claim = cache.get("claimName") or naming.claim(owner.name)
    return {"name": "models", "persistentVolumeClaim": {"claimName": claim}}


def _is_read_only(settings: Mapping[str, Any]) -> bool:
    return settings["modelCache"]["type"] in ("Image", "Node")


def mount(name: str, path: str, *, read_only: bool) -> Manifest:
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
