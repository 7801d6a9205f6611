"""The environment variables of the containers of stages and of the coordinator.

Here: those that every container has, the certificate's, and the author's merged over them. Called by `pods`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omnipipeline_operator.desired.pod_templates import templates, volumes
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.types import stores
from omnipipeline_spec.types.plan import CoordinatorPlan, UnitPlan
from omnipipeline_spec.validation.variables import JOINED


def common(plan: UnitPlan | CoordinatorPlan) -> list[Manifest]:
    settings = plan.pod
    environment = [
        variable("OMNI_PLAN", f"{volumes.PLAN_DIR}/plan.json"),
        {"name": "OMNI_POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
        {"name": "OMNI_POD_UID", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.uid"}}},
        variable("OMNI_LOG_FORMAT", "json"),
        variable("OMNI_PROFILE_ROOT", volumes.PROFILES_DIR),
    ]
    if plan.code_config_map:
        environment.append(variable(JOINED, volumes.CODE_DIR))
    if plan.security == "Curve":
        environment.append(variable("OMNI_CONTROL_KEY_FILE", f"{volumes.CONTROL_DIR}/key"))
    cache = settings.get("modelCache", {}).get("type", "Image")
    if cache == "Node" and isinstance(plan, UnitPlan) and not stores.is_address(plan.model_path):
        # HF_HOME stays in /tmp, since libraries write there: code of a model, a token.
        environment += [variable("HF_HUB_CACHE", f"{volumes.HUB_DIR}/hub"), variable("HF_HUB_OFFLINE", "1")]
    elif cache == "Node":
        environment.append(variable("OMNI_MODELS_DIR", volumes.MODELS_DIR))
    elif cache != "Image":  # nothing is downloaded beside an image
        environment.append(variable("HF_HOME", volumes.HUB_DIR))
        if isinstance(plan, UnitPlan) and stores.is_address(plan.model_path):
            environment.append(variable("OMNI_MODELS_DIR", volumes.MODELS_DIR))
    tracing = settings.get("tracing", {})
    if tracing.get("endpoint"):
        environment += [
            variable("OTEL_EXPORTER_OTLP_ENDPOINT", tracing["endpoint"]),
            variable("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
            variable("OTEL_TRACES_SAMPLER_ARG", str(tracing.get("sampleRatio", 1))),
        ]
    return environment


def with_authors(environment: list[Manifest], given: Sequence[Mapping[str, Any]]) -> list[Manifest]:
    """The author's variables merged over ours; `validation.variables` has refused those that would break the pod."""
    ours = {variable["name"]: variable for variable in environment}
    joined = [
        {**one, "value": ":".join(filter(None, (ours[JOINED]["value"], one.get("value"))))}
        if one["name"] == JOINED and JOINED in ours
        else one
        for one in given
    ]
    merged: list[Manifest] = templates.merge({"env": environment}, {"env": joined})["env"]
    return merged


def certificate() -> list[Manifest]:
    files = (("OMNI_TLS_CERT_FILE", "tls.crt"), ("OMNI_TLS_KEY_FILE", "tls.key"))
    return [variable(name, f"{volumes.TLS_DIR}/{file}") for name, file in files]


def variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}
