"""Pod templates of stage units and of the coordinator, and the Deployments around them.

Here: everything that is written once per (unit, revision) and never edited: containers, security, resources. Not
here: volumes (`volumes`), probes (`probes`), variables (`environment`), replicas (`changes.deciding.rollout` decides
them), the plan's text (`config`), the author's merge (`templates`). Called by `children`. The pods satisfy the
"restricted" pod security standard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Final

import msgspec

from omnipipeline_operator import kinds
from omnipipeline_operator.desired import naming, podgroups
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates import (
    affinity,
    devices,
    environment,
    fetching,
    podsecurity,
    probes,
    templates,
    volumes,
)
from omnipipeline_operator.errors import NotAllowed
from omnipipeline_operator.kinds import Manifest
from omnipipeline_operator.settings import OWN_USER, DefaultResources, NodeModels, PodUsers
from omnipipeline_spec.cluster import Resources
from omnipipeline_spec.types import quantities
from omnipipeline_spec.types.plan import CoordinatorPlan, UnitPlan
from omnipipeline_spec.types.pods import ADMIN_PORT, CONTROL_PORT, COORDINATOR, PROBE_PORT, PUBLISH_PORT

PRE_STOP_S: Final = 3  # endpoints and load balancers drop a pod before it stops listening
STAGE: Final = "stage"  # the container of a unit's pods; that of the coordinator's has the unit's name
COORDINATOR_START_S: Final = 120.0  # it loads no model
AFTER_START_S: Final = 600  # Kubernetes' own deadline of a Deployment: for a node, an image, a volume
NODE_LOSS_S: Final = 60  # instead of 300: a lost node's pods are replaced about 110 s after the loss


class PodFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a template needs beside the plan; pinned for the life of a pipeline revision."""

    owner: Owner
    image: str  #: Used where the spec names none.
    control_secret: str
    claim: str | None = None  #: The model cache's claim, when the operator makes it.
    allow_privileged: bool = False
    default_resources: DefaultResources = DefaultResources()
    users: PodUsers = OWN_USER
    node_models: NodeModels | None = None  #: None: not allowed.
    groups: podgroups.Groups = podgroups.Groups()  #: No new pod names one where there is a queue.
    queue: str = ""  #: Kueue's, for the units' pods.


def unit_deployment(unit: UnitPlan, facts: PodFacts) -> Manifest:
    """The Deployment of one unit revision, without replicas."""
    owner, ports = facts.owner, [_port(f"control-{group.index}", CONTROL_PORT + group.index) for group in unit.groups]
    variables = [
        *environment.common(unit),
        environment.variable(
            "OMNI_COORDINATOR", f"tcp://{naming.peers(owner.name)}.{owner.namespace}.svc:{CONTROL_PORT}"
        ),
    ]
    container = _container(STAGE, ["supervisor"], unit.pod, facts, variables, groups=len(unit.groups))
    container["ports"] = [_port("probes", PROBE_PORT), *ports]
    return _deployment(
        unit,
        unit.name,
        container,
        facts,
        shared_memory=unit.pod.get("sharedMemory"),
        startup_deadline_s=unit.startup_deadline_s,
        before=_fetch(unit, container, facts),
    )


def coordinator_deployment(plan: CoordinatorPlan, facts: PodFacts) -> Manifest:
    """The Deployment of one revision of the coordinator, without replicas."""
    variables = [
        *environment.common(plan),
        environment.variable("OMNI_REVISIONS", f"{volumes.REVISIONS_DIR}/revisions.json"),
        environment.variable("OMNI_LISTEN", f"tcp://*:{CONTROL_PORT}"),
        environment.variable("OMNI_ADVERTISE", f"tcp://$(OMNI_POD_IP):{CONTROL_PORT}"),
        environment.variable("OMNI_PUBLISH", f"tcp://*:{PUBLISH_PORT}"),
        environment.variable("OMNI_PUBLISH_ADVERTISE", f"tcp://$(OMNI_POD_IP):{PUBLISH_PORT}"),
        environment.variable("OMNI_HTTP_HOST", "*"),
        environment.variable("OMNI_HTTP_PORT", str(plan.http_port)),
        environment.variable("OMNI_ADMIN_PORT", str(ADMIN_PORT)),
        environment.variable("OMNI_PROBE_PORT", str(PROBE_PORT)),
        *(
            [environment.variable("OMNI_API_KEY_FILE", f"{volumes.API_KEY_DIR}/key")]
            if "apiKeySecretRef" in plan.pod
            else []
        ),
        *(environment.certificate() if "tlsSecretName" in plan.pod else []),
    ]
    container = _container(COORDINATOR, ["coordinator"], plan.pod, facts, variables)
    container["ports"] = [
        _port("http", plan.http_port),
        _port("probes", PROBE_PORT),
        _port("control", CONTROL_PORT),
        _port("publish", PUBLISH_PORT),
    ]
    container["volumeMounts"].append(volumes.mount("revisions", volumes.REVISIONS_DIR, read_only=True))
    revisions: Manifest = {"name": "revisions", "configMap": {"name": naming.revisions(plan.pipeline)}}
    return _deployment(
        plan,
        COORDINATOR,
        container,
        facts,
        shared_memory=None,
        startup_deadline_s=COORDINATOR_START_S,
        more_volumes=[revisions],
    )


def gpus(deployment: Mapping[str, Any]) -> int:
    """GPUs that one pod of a Deployment requests; annotations of the template name the resource, or count a claim's."""
    template = deployment["spec"]["template"]
    annotations = template["metadata"].get("annotations", {})
    if CLAIMED_GPUS in annotations:
        return _whole(annotations[CLAIMED_GPUS])
    resource = annotations.get(GPU_RESOURCE)
    if not resource:
        return 0
    limits = (one.get("resources", {}).get("limits", {}) for one in template["spec"]["containers"])
    return sum(_whole(limit.get(resource, 0)) for limit in limits)


def _whole(amount: Any) -> int:
    """A number of devices; 0 for what the API server would refuse, and for what no node has."""
    return int(amount) if str(amount).isdecimal() and len(str(amount)) < MAX_DIGITS else 0


#: Volumes that the cluster autoscaler may delete with the pod. Any other emptyDir makes it keep the pod's node.
LOSES_NOTHING: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
GPU_RESOURCE: Final = "omnipipeline.dev/gpu-resource"  # the extended resource, or the DeviceClass
CLAIMED_GPUS: Final = "omnipipeline.dev/claimed-gpus"  # per pod, where they come by a claim
MAX_DIGITS: Final = 10  # of a number of devices; an annotation may have thousands, which Python refuses to read


def _deployment(
    plan: UnitPlan | CoordinatorPlan,
    unit: str,
    container: Manifest,
    facts: PodFacts,
    *,
    shared_memory: str | None,
    startup_deadline_s: float,
    more_volumes: Sequence[Manifest] = (),
    before: Sequence[Manifest] = (),
) -> Manifest:
    owner = facts.owner
    own = volumes.volumes(
        plan,
        unit,
        owner=owner,
        control_secret=facts.control_secret,
        shared_memory=shared_memory,
        node_models=facts.node_models.path if facts.node_models else "",
    )
    pod = _pod(plan, unit, facts, [container], [*own, *more_volumes], before)
    annotations = {
        "kubectl.kubernetes.io/default-container": container["name"],
        LOSES_NOTHING: ",".join(volumes.disposable(own)),
        **_gpu_annotations(plan.pod),
    }
    labels = naming.labels(owner.name, unit, plan.revision)
    deployment = naming.child(
        kinds.DEPLOYMENT,
        naming.unit(owner.name, unit, plan.revision),
        owner,
        of=labels,
        annotations={naming.IMAGE_PIN: facts.image},
    )
    deployment["spec"] = {
        "selector": {"matchLabels": naming.selector(owner.name, unit, plan.revision)},
        # A template edited by hand (kubectl rollout restart) needs this: no pod is removed before its successor is
        # ready.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "progressDeadlineSeconds": ceil(startup_deadline_s) + AFTER_START_S,
        "revisionHistoryLimit": 1,
        "template": _template(pod, labels, annotations, plan.pod, unit, facts),
    }
    return deployment


def _pod(
    plan: UnitPlan | CoordinatorPlan,
    unit: str,
    facts: PodFacts,
    containers: Sequence[Manifest],
    mounted: Sequence[Manifest],
    before: Sequence[Manifest],
) -> Manifest:
    """The pod's spec. mounted: its volumes. before: containers that end before the others start."""
    settings, placement = plan.pod, _placement(plan, unit, facts.owner)
    pod: Manifest = {
        **({"initContainers": [*before]} if before else {}),
        "containers": [*containers],
        "volumes": [*mounted],
        "securityContext": _pod_security(facts.users),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": PRE_STOP_S + int(plan.drain_timeout_s),
        "tolerations": [*_node_loss(), *placement.get("tolerations", ())],
    }
    for field, theirs in _PLACEMENT.items():
        if placement.get(field):
            pod[theirs] = placement[field]
    for field in ("imagePullSecrets", "serviceAccountName"):
        if settings.get(field):
            pod[field] = settings[field]
    return pod | devices.of_pod(settings, naming.devices(facts.owner.name, unit, plan.revision))


def _placement(plan: UnitPlan | CoordinatorPlan, unit: str, owner: Owner) -> Mapping[str, Any]:
    """The author's placement, and what coordinators and ``near`` add to its affinity."""
    placement: Mapping[str, Any] = plan.pod.get("placement", {})
    if unit == COORDINATOR and not placement.get("topologySpreadConstraints"):
        placement = {**placement, "affinity": {**_apart(owner.name, plan.revision), **placement.get("affinity", {})}}
    ours = affinity.of(placement, owner.name)
    if ours:
        placement = {**placement, "affinity": {**placement.get("affinity", {}), **ours}}
    return placement


def _gpu_annotations(settings: Mapping[str, Any]) -> dict[str, str]:
    """The annotations that `gpus` reads."""
    if "gpuClaim" in settings:
        return {GPU_RESOURCE: settings["gpuClaim"]["deviceClassName"], CLAIMED_GPUS: str(settings["gpus"])}
    return {GPU_RESOURCE: settings["gpuResourceName"]} if settings.get("gpus") else {}


def _template(
    pod: Manifest,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    settings: Mapping[str, Any],
    unit: str,
    facts: PodFacts,
) -> Manifest:
    """The author's ``podTemplate`` over ours; with the scheduler's group and Kueue's queue, where the pod has them."""
    group = facts.groups.kind if unit != COORDINATOR and podgroups.is_member(settings) else None
    if group is not None:
        pod = {**pod, "schedulerName": facts.groups.scheduler}
    queue = {naming.QUEUE_LABEL: facts.queue} if facts.queue and unit != COORDINATOR else {}
    metadata = {"labels": {**queue, **labels}, "annotations": {**annotations}}
    template = _merged({"metadata": metadata, "spec": pod}, settings.get("podTemplate", {}), unit, facts)
    # Last: labels must match the selector, and the GPUs of a pipeline decide on those of others.
    template["metadata"]["labels"] = {**template["metadata"].get("labels", {}), **labels}
    theirs = template["metadata"].get("annotations", {})
    template["metadata"]["annotations"] = {
        **{name: text for name, text in theirs.items() if name not in (GPU_RESOURCE, CLAIMED_GPUS)},
        **_gpu_annotations(settings),
    }
    return template if group is None else podgroups.joined(template, group, facts.owner.name)


def _merged(template: Manifest, patch: Mapping[str, Any], unit: str, facts: PodFacts) -> Manifest:
    """The author's ``podTemplate`` merged over ours; checked against the restricted standard unless more is allowed."""
    path = f"{'coordinator' if unit == COORDINATOR else f'processGroups[{unit}]'}.podTemplate"
    generated = template["spec"]["containers"][0]["name"]
    merged = templates.merge(template, patch)
    templates.check_form(merged, path, generated=generated)
    if facts.allow_privileged:
        return merged
    for kind in ("initContainers", "containers"):
        for container in merged["spec"].get(kind, ()):
            if (kind, container["name"]) != ("containers", generated):
                own = container.get("securityContext", {})
                container["securityContext"] = templates.merge(podsecurity.ADDED_CONTAINER, own)
    checked = {**merged, "spec": {**merged["spec"], "volumes": _without_node_models(merged, facts)}}
    podsecurity.refuse(checked, path, generated=generated)
    return merged


def _without_node_models(template: Manifest, facts: PodFacts) -> Any:
    """Its volumes but the directory of nodes, which the operator's settings allow as it is."""
    given, allowed = template["spec"].get("volumes"), facts.node_models
    if allowed is None or not isinstance(given, list):
        return given
    own = volumes.models({"type": "Node"}, facts.owner, allowed.path)
    return [each for each in given if each != own]


def _fetch(unit: UnitPlan, container: Manifest, facts: PodFacts) -> list[Manifest]:
    """The container that fetches the model to the node before the stages start.

    Raises: NotAllowed: the operator has no directory on nodes.
    """
    cache = unit.pod.get("modelCache", {})
    if cache.get("type") != "Node" or not unit.model_path:
        return []
    if facts.node_models is None:
        raise NotAllowed("modelCache.type", "Node: this operator has no directory on nodes (nodeModels.path)")
    bound = ["--bound", facts.node_models.bound] if facts.node_models.bound else []
    made = fetching.container(
        container,
        unit.model_path,
        unit.model_revision,
        secret=cache.get("secretName"),
        resources=default_resources(facts.default_resources.coordinator),
        options=["--quick", *bound],
    )
    return [made]


_PLACEMENT: Final = {
    "nodeSelector": "nodeSelector",
    "affinity": "affinity",
    "topologySpreadConstraints": "topologySpreadConstraints",
    "priorityClassName": "priorityClassName",
    "runtimeClassName": "runtimeClassName",
}


def _container(
    name: str,
    arguments: list[str],
    settings: Mapping[str, Any],
    facts: PodFacts,
    variables: list[Manifest],
    *,
    groups: int = 1,
) -> Manifest:
    """The generated container. ``groups``: process groups in it; each adds the default resources."""
    container: Manifest = {
        "name": name,
        "image": settings.get("image") or facts.image,
        "args": arguments,
        "env": environment.with_authors(variables, settings.get("env", [])),
        "resources": _resources(settings, getattr(facts.default_resources, name), groups),
        **probes.probes(),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _container_security(),
        "volumeMounts": volumes.mounts(settings, variables),
    }
    for field in ("imagePullPolicy", "envFrom"):
        if settings.get(field):
            container[field] = settings[field]
    return container


def _resources(settings: Mapping[str, Any], default: Resources, groups: int) -> Manifest:
    """Requests and limits; a resource for which the author gives either has no default."""
    given = settings.get("resources", {})
    requests, limits = dict(given.get("requests", {})), dict(given.get("limits", {}))
    named = {*requests, *limits}
    for amounts, defaults in ((requests, default.requests), (limits, default.limits)):
        times = quantities.sum_quantities([defaults] * groups)
        amounts.update({resource: amount for resource, amount in times.items() if resource not in named})
    counts = {settings["gpuResourceName"]: settings["gpus"]} if "gpuResourceName" in settings else {}
    if "rdma" in settings:
        counts[settings["rdma"]["resourceName"]] = settings["rdma"].get("count", 1)
    for resource, count in counts.items():  # validation has refused other amounts; those of several groups are one
        requests.pop(resource, None)
        limits[resource] = str(count)
    amounts_of = {kind: amounts for kind, amounts in (("requests", requests), ("limits", limits)) if amounts}
    return amounts_of | devices.of_container(settings)


def default_resources(default: Resources) -> Manifest:
    """Requests and limits of a container for which the author gives none."""
    return _resources({}, default, groups=1)


def _apart(pipeline: str, revision: str) -> Manifest:
    """Coordinators prefer nodes and zones of their own. The author's own rules for that replace these.

    Those of one revision count: a roll's new coordinators need not avoid the old ones' nodes. Not a spread constraint:
    the scheduler gives no score for it to nodes without a zone.
    """
    selector = {"matchLabels": naming.selector(pipeline, COORDINATOR, revision)}
    preferred = [
        {"weight": weight, "podAffinityTerm": {"labelSelector": selector, "topologyKey": key}}
        for weight, key in ((100, "kubernetes.io/hostname"), (50, "topology.kubernetes.io/zone"))
    ]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _node_loss() -> list[Manifest]:
    return [
        {
            "key": f"node.kubernetes.io/{what}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": NODE_LOSS_S,
        }
        for what in ("not-ready", "unreachable")
    ]


def _pod_security(users: PodUsers) -> Manifest:
    chosen = {field: number for field, number in msgspec.to_builtins(users).items() if number is not None}
    return {
        "runAsNonRoot": True,
        **chosen,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container_security() -> Manifest:
    """No capability is added: a process that is not root does not get it (kubernetes#56374). How much memory an RDMA
    device may lock is the limit that the container runtime sets.
    """
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}
