"""Hostile specs: whatever JSON an author writes is planned with all its children, or refused with the place.

Only a `SpecError` or a `NotAllowed` is reported in the status; any other exception would be retried without an end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnipipeline_operator.desired import children, references
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_operator.errors import NotAllowed
from omnipipeline_spec import loading, planning
from omnipipeline_spec.types.errors import SpecError
from omnipipeline_spec.types.resource import API_VERSION, KIND
from tests.patience import patience
from tests.thoroughness import examples

OWNER = Owner(namespace="space", name="demo", uid="uid-1")

#: Field names of a pod template whose values the operator reads, and some that it copies.
FIELDS = (
    *("metadata", "labels", "annotations", "spec", "containers", "initContainers", "volumes", "imagePullSecrets"),
    *("name", "env", "ports", "containerPort", "volumeMounts", "mountPath", "resources", "limits", "requests"),
    *("securityContext", "capabilities", "add", "drop", "sysctls", "seLinuxOptions", "type", "user", "runAsUser"),
    *(
        "seccompProfile",
        "procMount",
        "privileged",
        "hostPort",
        "lifecycle",
        "preStop",
        "httpGet",
        "host",
        "livenessProbe",
    ),
    *("configMap", "secret", "secretName", "projected", "sources", "valueFrom", "secretKeyRef", "envFrom", "emptyDir"),
    *("tolerations", "nodeSelector", "affinity", "serviceAccountName", "value", "image", "windowsOptions"),
    *("container.apparmor.security.beta.kubernetes.io/x", "omnipipeline.dev/gpu-resource", "nvidia.com/gpu", "odd"),
)
WORDS = st.sampled_from(
    ["stage", "coordinator", "ALL", "plan", "tmp", "shm", "models", "/tmp", "TOKEN", "http", "", "x"]
)
SCALARS = st.none() | st.booleans() | st.integers(-1, 9000) | st.floats(-1, 1e22) | WORDS | st.text(max_size=3)
NAMED = st.fixed_dictionaries({"name": WORDS})


def _deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    maps = st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)
    items = st.builds(lambda one, other: {**one, **other}, NAMED, maps)
    return maps | st.lists(inner | items, max_size=3)


ODD = st.recursive(SCALARS, _deeper, max_leaves=12)
CONTAINERS = st.lists(
    st.builds(
        lambda name, rest: {"name": name, **rest},
        st.sampled_from(["stage", "coordinator", "more"]),
        st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=4),
    ),
    max_size=2,
)
PODS = st.builds(
    lambda containers, rest: {**rest, "containers": containers},
    CONTAINERS,
    st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3),
)
TEMPLATES = st.fixed_dictionaries({}, optional={"spec": PODS | ODD, "metadata": ODD, "odd": ODD})
QUANTITIES = st.sampled_from(
    [
        0,
        1,
        -1,
        5.5,
        True,
        "0",
        "0Mi",
        "0.0",
        ".0001",
        "1e99",
        "1e30",
        "1e-30",
        "9" * 20,
        "1n",
        "1E",
        "",
        ".",
        "Gi",
        {},
        [],
    ]
)
AMOUNTS = st.dictionaries(st.sampled_from(["cpu", "memory", "nvidia.com/gpu", ""]), QUANTITIES, max_size=3)
RESOURCES = st.fixed_dictionaries({}, optional={"requests": AMOUNTS, "limits": AMOUNTS})


def made(spec: dict[str, Any], *, allow_privileged: bool) -> children.Children:
    """All that a reconcile makes of a resource before it asks the API server."""
    head = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "demo"}}
    parsed = loading.from_resource({**head, "spec": spec}).spec
    plan = planning.plan(parsed, name="demo")
    facts = PodFacts(owner=OWNER, image="stage:1", control_secret="s", allow_privileged=allow_privileged)
    return children.children(parsed, plan, facts)


def carried_out_or_refused(spec: dict[str, Any], *, allow_privileged: bool) -> bool:
    """Whether it is carried out. Raises: whatever is not a refusal with its place."""
    try:
        desired = made(spec, allow_privileged=allow_privileged)
    except (SpecError, NotAllowed) as refused:
        assert str(refused)
        return False
    templates = [each.deployment["spec"]["template"] for each in desired.workloads]
    templates += [each["spec"]["template"] for each in desired.created if each["kind"] == "Job"]
    for template in templates:
        references.required(template)
        references.pull_secrets(template)
    return True


def pipeline(template: Any, **more: Any) -> dict[str, Any]:
    """Two stages that share a GPU with a budget in bytes, and a coordinator, with pod templates, and a prefetch Job."""
    gpu = {"gpu": [0], "gpuMemory": {"bytes": more.pop("gpu_bytes", "1Gi")}}
    cache = {"type": "PersistentVolumeClaim", "size": more.pop("size", "1Gi"), "prefetch": {"enabled": True}}
    resources = more.pop("resources", {})
    group = {"podTemplate": template, "resources": resources, **more}
    return {
        "modelPath": "some/model",
        "modelCache": cache,
        "stages": [
            {"name": "a", "process": "a", "factory": "m:a", "next": ["b"], **gpu},
            {"name": "b", "process": "b", "factory": "m:b", "terminal": True, **gpu},
        ],
        "processGroups": [{"name": "a", **group}, {"name": "b", "resources": resources}],
        "coordinator": {"podTemplate": template, "resources": resources},
    }


#: A sound template that has every field which the operator reads.
SOUND: dict[str, Any] = {
    "metadata": {
        "labels": {"team": "a"},
        "annotations": {"container.apparmor.security.beta.kubernetes.io/x": "runtime/default"},
    },
    "spec": {
        "imagePullSecrets": [{"name": "pull"}],
        "securityContext": {
            "sysctls": [{"name": "net.ipv4.tcp_wmem", "value": "1"}],
            "seLinuxOptions": {"type": "container_t"},
            "seccompProfile": {"type": "RuntimeDefault"},
            "appArmorProfile": {"type": "RuntimeDefault"},
            "windowsOptions": {"hostProcess": False},
            "runAsUser": 5,
        },
        "volumes": [
            {"name": "a", "configMap": {"name": "c", "optional": True}},
            {"name": "b", "secret": {"secretName": "s"}},
            {"name": "c", "projected": {"sources": [{"secret": {"name": "s"}}, {"configMap": {"name": "c"}}]}},
        ],
        "tolerations": [{"key": "k"}],
        "initContainers": [{"name": "first", "image": "x:1", "securityContext": {"capabilities": {"drop": ["ALL"]}}}],
        "containers": [
            {
                "name": name,
                "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
                "envFrom": [{"configMapRef": {"name": "c"}}, {"secretRef": {"name": "s", "optional": True}}],
                "ports": [{"name": "more", "containerPort": 9, "hostPort": 0}],
                "volumeMounts": [{"name": "a", "mountPath": "/a"}],
                "resources": {"requests": {"cpu": "1"}, "limits": {"nvidia.com/gpu": "1"}},
                "securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}, "procMount": "Default"},
                "livenessProbe": {"httpGet": {"path": "/", "port": 1}},
                "lifecycle": {"postStart": {"tcpSocket": {"port": 1}}},
            }
            for name in ("stage", "coordinator")
        ],
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside one."""
    inside = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [path, *(each for key, one in inside for each in places(one, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with another one at a path; the same one where an earlier change has removed the path."""
    if not path:
        return new
    if isinstance(value, dict) and path[0] in value:
        return {**value, path[0]: replaced(value[path[0]], path[1:], new)}
    if isinstance(value, list) and isinstance(path[0], int) and path[0] < len(value):
        return [*value[: path[0]], replaced(value[path[0]], path[1:], new), *value[path[0] + 1 :]]
    return value


CHANGES = st.lists(st.tuples(st.sampled_from(places(SOUND)[1:]), ODD), min_size=1, max_size=3)


def test_the_sound_template_is_carried_out() -> None:
    assert carried_out_or_refused(pipeline(SOUND), allow_privileged=False)


@pytest.mark.proves("odd-values")
@settings(max_examples=examples(150), deadline=None)
@given(CHANGES, st.booleans())
def test_a_sound_pod_template_with_odd_values_is_carried_out_or_refused(
    changes: list[tuple[tuple[Any, ...], Any]], allow_privileged: bool
) -> None:
    template = SOUND
    for path, odd in changes:
        template = replaced(template, path, odd)
    carried_out_or_refused(pipeline(template), allow_privileged=allow_privileged)


@settings(max_examples=examples(100), deadline=None)
@given(TEMPLATES, st.booleans())
def test_any_pod_template_is_carried_out_or_refused(template: Any, allow_privileged: bool) -> None:
    carried_out_or_refused(pipeline(template), allow_privileged=allow_privileged)


@pytest.mark.proves("odd-values")
@settings(max_examples=examples(100), deadline=None)
@given(QUANTITIES, QUANTITIES, QUANTITIES, RESOURCES)
def test_any_quantity_is_carried_out_or_refused(shared: Any, gpu: Any, size: Any, resources: Any) -> None:
    spec = pipeline({}, sharedMemory=shared, gpu_bytes=gpu, size=size, resources=resources)
    carried_out_or_refused(spec, allow_privileged=False)


def in_stage(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "stage", **fields}]}}


def in_context(**fields: Any) -> dict[str, Any]:
    return in_stage(securityContext=fields)


STAGE = "processGroups[0].podTemplate.spec.containers[0]"
CONTEXT = "processGroups[a].podTemplate.spec.containers[stage].securityContext"


@pytest.mark.parametrize(
    "template, problem",
    [
        (
            {"spec": {"volumes": [{"name": {"a": 1}}]}},
            "processGroups[0].podTemplate.spec.volumes[0].name: must be a string",
        ),
        (
            {"spec": {"imagePullSecrets": [{"name": "x"}, {"name": []}]}},
            "processGroups[0].podTemplate.spec.imagePullSecrets[1].name: must be a string",
        ),
        (in_stage(ports=[{"containerPort": {}}]), f"{STAGE}.ports[0].containerPort: must be a whole number"),
        (in_stage(ports=[{"containerPort": "80"}]), f"{STAGE}.ports[0].containerPort: must be a whole number"),
        (
            in_stage(volumeMounts=[{"name": "tmp", "mountPath": []}]),
            f"{STAGE}.volumeMounts[0].mountPath: must be a string",
        ),
        (in_stage(env=[{"name": {"a": 1}}]), f"{STAGE}.env[0].name: must be a string"),
        ({"spec": {"containers": [{"name": 5}]}}, f"{STAGE}.name: must be a string"),
        (in_context(capabilities={"drop": 5}), f"{CONTEXT}.capabilities.drop: must hold ALL"),
        (in_context(capabilities={"drop": "ALL"}), f"{CONTEXT}.capabilities.drop: must hold ALL"),
        (in_context(capabilities={"add": 5}), f"{CONTEXT}.capabilities.add: must be a list"),
        (in_context(capabilities={"add": [{}]}), f"{CONTEXT}.capabilities.add: adds {{}}"),
        (in_context(seLinuxOptions={"type": {}, "user": 1}), f"{CONTEXT}.seLinuxOptions: may set"),
        (in_context(seLinuxOptions={"type": {"a": 1}}), f"{CONTEXT}.seLinuxOptions: may set"),
        (
            {"spec": {"securityContext": {"sysctls": [{"name": {}}]}}},
            "processGroups[a].podTemplate.spec.securityContext.sysctls[0]: sets {}",
        ),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place(template: Any, problem: str) -> None:
    with pytest.raises((SpecError, NotAllowed)) as refused:
        made({**pipeline({}), "processGroups": [{"name": "a", "podTemplate": template}]}, allow_privileged=False)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    "field, spec, problem",
    [
        ("sharedMemory", {"sharedMemory": 0}, "processGroups[0].sharedMemory: '0' must be more than 0 bytes"),
        ("sharedMemory", {"sharedMemory": "0Mi"}, "processGroups[0].sharedMemory: '0Mi' must be more than 0 bytes"),
        ("gpuMemory", {"gpu_bytes": "8Ei"}, "stages[0].gpuMemory.bytes: '8Ei' is beyond 64 bits"),
        ("gpuMemory", {"gpu_bytes": 0}, "stages[0].gpuMemory.bytes: '0' must be more than 0"),
        (
            "resources",
            {"resources": {"requests": {"cpu": "1e99"}, "limits": {"cpu": "1e99"}}},
            "'1e99' is out of range",
        ),
    ],
)
def test_an_amount_that_pods_cannot_have_is_refused_with_its_place(
    field: str, spec: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SpecError) as refused:
        made(pipeline({}, **spec), allow_privileged=False)
    assert field in str(refused.value) and problem in str(refused.value)


DEEP = """
import json, sys
from omnipipeline_operator import cli
from omnipipeline_operator.cluster.store import Store
from omnipipeline_operator.controller.revisions.plan_cache import PlanCache
from omnipipeline_operator.controller.work_queue import WorkQueue
from omnipipeline_operator.handlers.watching import Watcher
from omnipipeline_operator.kinds import PIPELINE
from omnipipeline_spec.types.errors import SpecError
from omnipipeline_spec.types.resource import API_VERSION, KIND

try:
    cli.main([])
except Exception as error:
    print(type(error).__name__)
text = {text!r}
resource = {{
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {{"name": "demo", "namespace": "space", "uid": "u", "generation": 1, "resourceVersion": "5"}},
    "spec": json.loads(text.replace('"deep"', '{{"a":' * 9900 + "1" + "}}" * 9900)),  # as kopf's watches read it
}}
store = Store()
Watcher(store, WorkQueue()).on_event(PIPELINE, "ADDED", resource)
try:
    PlanCache().of(store.pipeline(("space", "demo")), None)
except SpecError as error:
    print("refused", "nested" in str(error))
"""


@pytest.mark.parametrize("where", ["factoryArgs", "podTemplate"])
def test_an_object_as_deep_as_the_api_server_takes_it_is_refused_alone(where: str, tmp_path: Path) -> None:
    """One that no watch could read would end the operator, and end the next one, for all pipelines."""
    spec: dict[str, Any] = {"stages": [{"name": "a", "factory": "m.f", "process": "p", "terminal": True}]}
    if where == "factoryArgs":
        spec["stages"][0]["factoryArgs"] = {"x": "deep"}
    else:
        spec["processGroups"] = [{"name": "p", "podTemplate": {"spec": {"x": "deep"}}}]
    ended = subprocess.run(
        [sys.executable, "-c", DEEP.format(text=json.dumps(spec))],
        env={
            **os.environ,
            "OMNI_OPERATOR_STAGE_IMAGE": "x:1",
            "KUBECONFIG": str(tmp_path / "none"),
        },  # it starts, and ends at once
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert (ended.returncode, ended.stdout) == (0, "ConfigException\nrefused True\n"), ended.stderr[-2000:]
