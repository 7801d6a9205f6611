"""The desired children of a spec: what pods request, what they may do, the names of children."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_operator.changes import workloads
from omnipipeline_operator.cluster import store
from omnipipeline_operator.desired import children, config, naming, services
from omnipipeline_operator.desired.naming import Owner
from omnipipeline_operator.desired.pod_templates import pods, podsecurity, templates
from omnipipeline_operator.desired.pod_templates.pods import PodFacts
from omnipipeline_operator.errors import NotAllowed
from omnipipeline_operator.settings import OWN_USER, NodeModels, PodUsers
from omnipipeline_spec import loading, planning
from omnipipeline_spec.pipeline import PipelineConfig
from omnipipeline_spec.types.resource import API_VERSION, KIND
from tests.operator import podsecurity_cases

OWNER = Owner(namespace="space", name="demo", uid="uid-1")
FACTS = PodFacts(owner=OWNER, image="stage:1", control_secret="demo-control-x")
SHARED_GPU = {"gpu": [7], "gpuMemory": {"fraction": 0.4}}
STAGES = [
    {"name": "ears", "process": "ears", "factory": "m:ears", "next": ["mind"], **SHARED_GPU},
    {"name": "mind", "process": "mind", "factory": "m:mind", "next": ["mouth"], **SHARED_GPU},
    {"name": "mouth", "process": "mouth", "factory": "m:mouth", "terminal": True},
]


def spec(**more: Any) -> PipelineConfig:
    resource = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "demo"}}
    return loading.from_resource({**resource, "spec": {"stages": STAGES, **more}}).spec


def desired(facts: PodFacts = FACTS, **more: Any) -> children.Children:
    given_spec = spec(**more)
    return children.children(given_spec, planning.plan(given_spec, name="demo"), facts)


def pod_of(made: children.Children, unit: str) -> dict[str, Any]:
    deployment = next(each.deployment for each in made.workloads if each.unit == unit)
    template: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return template


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}


def test_groups_on_one_gpu_share_a_pod_that_asks_for_it_once() -> None:
    made = desired()
    assert [each.unit for each in made.workloads] == ["ears", "mouth", "coordinator"]
    container = pod_of(made, "ears")["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"probes": 8081, "control-0": 5550, "control-1": 5551}
    assert "limits" not in pod_of(made, "mouth")["containers"][0]["resources"]
    assert pods.gpus(made.workloads[0].deployment) == 1
    assert pods.gpus(made.workloads[1].deployment) == 0


def test_a_workload_is_the_same_from_a_stored_object_and_from_a_whole_one() -> None:
    for made in desired().workloads:
        deployment = {**made.deployment, "metadata": {**made.deployment["metadata"], "uid": "d"}}
        template = deployment["spec"]["template"]
        status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
        cut_off = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
        lost = {"phase": "Running", "conditions": cut_off}
        spec_of_pod = {**template["spec"], "nodeName": "node-7"}
        observed_pods = [
            {"kind": "Pod", "metadata": {**template["metadata"], "name": "p"}, "spec": spec_of_pod, "status": each}
            for each in (status, lost)
        ]
        observed = workloads.read_workload(deployment, observed_pods)
        assert observed.image and observed.control_secret and observed.gpus == (made.unit == "ears")
        assert "node-7" in observed.pods[1].message
        assert workloads.read_workload(store.slimmed(deployment), map(store.slimmed, observed_pods)) == observed


def test_every_pod_satisfies_the_restricted_standard() -> None:
    made = desired()
    for each in made.workloads:
        pod = pod_of(made, each.unit)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize(
    "users, chosen",
    [
        (OWN_USER, {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}),
        (PodUsers(), {}),
        (PodUsers(run_as_user=7, fs_group=8), {"runAsUser": 7, "fsGroup": 8}),
    ],
)
def test_users_that_the_operator_leaves_to_admission_are_in_no_pod(users: PodUsers, chosen: dict[str, int]) -> None:
    facts = PodFacts(owner=OWNER, image="stage:1", control_secret="s", users=users)
    made = desired(facts, **FETCHED)
    found = [pod_of(made, each.unit) for each in made.workloads] + [job_of(made)]
    for pod in found:
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            **chosen,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }


def test_a_pod_has_time_to_drain_after_it_left_the_endpoints() -> None:
    made = desired(processGroups=[{"name": "mouth", "drain": {"timeoutSeconds": 30}}])
    pod = pod_of(made, "mouth")
    assert pod["terminationGracePeriodSeconds"] == 33
    assert pod["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 3}}}


def test_a_deployments_deadline_leaves_time_for_a_model_to_load_and_is_not_in_its_template() -> None:
    made = desired(processGroups=[{"name": "mouth", "startup": {"deadlineSeconds": 5000}}])
    specs = {each.unit: each.deployment["spec"] for each in made.workloads}
    deadlines = {unit: spec["progressDeadlineSeconds"] for unit, spec in specs.items()}
    assert deadlines == {"ears": 2400, "mouth": 5600, "coordinator": 720}
    assert not any("progressDeadlineSeconds" in str(spec["template"]) for spec in specs.values())


def test_a_stage_finds_its_coordinators_by_the_headless_service() -> None:
    environment = variables(pod_of(desired(), "mouth"))
    assert environment["OMNI_COORDINATOR"] == "tcp://demo-peers.space.svc:5550"
    assert environment["OMNI_CONTROL_KEY_FILE"] == "/etc/omnipipeline/control/key"


def test_as_many_coordinators_as_the_spec_says_and_more_of_them_restart_none() -> None:
    one, three = (desired(coordinator={"replicas": replicas}).workloads[-1] for replicas in (1, 3))
    assert (one.unit, one.replicas, three.replicas) == ("coordinator", 1, 3)
    assert desired().workloads[-1].replicas == 2
    assert (one.revision, one.deployment, one.plan) == (three.revision, three.deployment, three.plan)


def test_coordinators_prefer_nodes_and_zones_of_their_own_unless_the_author_says_otherwise() -> None:
    made = desired()
    own = {"pipeline": "demo", "unit": "coordinator", "revision": made.workloads[-1].revision}
    selector = {"matchLabels": {f"omnipipeline.dev/{label}": value for label, value in own.items()}}
    apart = {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": weight, "podAffinityTerm": {"labelSelector": selector, "topologyKey": key}}
            for weight, key in ((100, "kubernetes.io/hostname"), (50, "topology.kubernetes.io/zone"))
        ]
    }
    assert pod_of(made, "coordinator")["affinity"] == {"podAntiAffinity": apart}
    assert "affinity" not in pod_of(made, "mouth")

    def affinity(**placement: Any) -> Any:
        return pod_of(desired(coordinator={"placement": placement}), "coordinator").get("affinity")

    assert affinity(topologySpreadConstraints=[{"maxSkew": 1}]) is None
    assert set(affinity(affinity={"nodeAffinity": {"mine": 1}})) == {"nodeAffinity", "podAntiAffinity"}
    assert affinity(affinity={"podAntiAffinity": {"mine": 1}}) == {"podAntiAffinity": {"mine": 1}}


def test_a_place_near_a_stage_stands_beside_the_authors_own_affinity() -> None:
    own = {"nodeAffinity": {"mine": 1}}
    groups = [{"name": "mouth", "placement": {"near": ["mind"], "affinity": own}}]
    made = desired(processGroups=groups, coordinator={"placement": {"near": ["mind"]}})
    found = pod_of(made, "mouth")["affinity"]
    assert found["nodeAffinity"] == own["nodeAffinity"]
    [near] = found["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["podAffinityTerm"]["labelSelector"]["matchLabels"]["omnipipeline.dev/unit"] == "ears"
    assert set(pod_of(made, "coordinator")["affinity"]) == {"podAntiAffinity", "podAffinity"}
    assert not {"near", "nearTopologyKeys"} & pod_of(made, "mouth").keys()


def test_without_curve_no_key_is_mounted() -> None:
    pod = pod_of(desired(control={"security": {"mode": "None"}}), "mouth")
    assert "OMNI_CONTROL_KEY_FILE" not in variables(pod)
    assert "control" not in {each["name"] for each in pod["volumes"]}


def test_every_mount_has_its_volume() -> None:
    made = desired(
        code={"configMapRef": {"name": "mine"}},
        modelCache={"type": "PersistentVolumeClaim", "size": "10Gi"},
        coordinator={"http": {"apiKeySecretRef": {"name": "keys", "key": "main"}, "tls": {"secretName": "door"}}},
        profiling={"storage": {"claimName": "profiles"}},
    )
    for each in made.workloads:
        pod = pod_of(made, each.unit)
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    "fields, volumes",
    [
        ({}, "shm,tmp,profiles"),
        ({"profiling": {"storage": {"emptyDir": {"sizeLimit": "1Gi"}}}}, "shm,tmp,profiles"),
        ({"profiling": {"storage": {"claimName": "mine"}}}, "shm,tmp"),
        ({"modelCache": {"type": "EmptyDir", "size": "1Gi"}}, "shm,tmp,profiles"),
    ],
)
def test_the_cluster_autoscaler_may_remove_a_pods_node_unless_it_holds_a_fetched_model(
    fields: dict[str, Any], volumes: str
) -> None:
    for each in desired(**fields).workloads:
        template = each.deployment["spec"]["template"]
        assert template["metadata"]["annotations"][pods.LOSES_NOTHING] == volumes
        local = {one["name"] for one in template["spec"]["volumes"] if "emptyDir" in one} - {"models"}
        assert local == set(volumes.split(","))


def test_what_the_author_says_of_volumes_to_the_cluster_autoscaler_wins() -> None:
    patch = {"metadata": {"annotations": {pods.LOSES_NOTHING: "tmp,mine"}}}
    made = desired(processGroups=[{"name": "mouth", "podTemplate": patch}])
    template = next(each.deployment["spec"]["template"] for each in made.workloads if each.unit == "mouth")
    assert template["metadata"]["annotations"][pods.LOSES_NOTHING] == "tmp,mine"


CLAIM: dict[str, Any] = {"type": "PersistentVolumeClaim", "size": "10Gi"}
FETCHED: dict[str, Any] = {"modelPath": "some/model", "modelCache": {**CLAIM, "prefetch": {"enabled": True}}}


def job_of(made: children.Children) -> dict[str, Any]:
    """The pod of the Job that fetches the model."""
    [job] = [each for each in made.created if each["kind"] == "Job"]
    template: dict[str, Any] = job["spec"]["template"]["spec"]
    return template


def test_a_claim_has_no_owner_and_no_label_by_which_argo_cd_would_prune_it() -> None:
    [claim] = desired(modelCache=CLAIM).created
    assert claim["metadata"] == {
        "name": "demo-models",
        "namespace": "space",
        "labels": {
            "app.kubernetes.io/name": "omnipipeline",
            "app.kubernetes.io/managed-by": "omnipipeline-operator",
            "omnipipeline.dev/pipeline": "demo",
        },
    }


@pytest.mark.parametrize("policy", [{}, {"pullPolicy": "Never"}])
def test_weights_in_an_image_are_mounted_read_only_and_nothing_is_downloaded(policy: dict[str, Any]) -> None:
    cache = {"type": "Image", "image": "localhost/weights:1", **policy}
    made = desired(modelPath="/models/mine", modelCache=cache)
    assert made.created == ()
    pod = pod_of(made, "mouth")
    [volume] = [each for each in pod["volumes"] if each["name"] == "models"]
    assert volume == {"name": "models", "image": {"reference": "localhost/weights:1", **policy}}
    [container] = pod["containers"]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
    assert "HF_HOME" not in {each["name"] for each in container["env"]}


@pytest.mark.parametrize("cache", [CLAIM, {"type": "PersistentVolumeClaim", "claimName": "c"}, {"type": "EmptyDir"}])
def test_stages_mount_the_model_cache_and_the_coordinator_does_not(cache: Any) -> None:
    made = desired(modelCache=cache)
    has = {}
    for each in made.workloads:
        pod = pod_of(made, each.unit)
        [container] = pod["containers"]
        has[each.unit] = (
            "models" in {volume["name"] for volume in pod["volumes"]},
            "/models" in {mount["mountPath"] for mount in container["volumeMounts"]},
            "HF_HOME" in variables(pod),
        )
    assert has == {"ears": (True,) * 3, "mouth": (True,) * 3, "coordinator": (False,) * 3}


def test_no_pod_fills_its_nodes_disk_through_tmp_or_profiles_and_an_author_sets_other_limits() -> None:
    def limits(**fields: Any) -> set[tuple[str, str]]:
        made = [pod_of(desired(**fields), unit) for unit in ("ears", "mouth", "coordinator")]
        volumes = [one for pod in made for one in pod["volumes"] if one["name"] in ("tmp", "profiles")]
        return {(one["name"], one["emptyDir"]["sizeLimit"]) for one in volumes}

    assert limits() == {("tmp", "32Gi"), ("profiles", "8Gi")}
    larger = {"spec": {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "99Gi"}}]}}
    assert limits(coordinator={"podTemplate": larger}) == {("tmp", "32Gi"), ("tmp", "99Gi"), ("profiles", "8Gi")}
    given = {"storage": {"emptyDir": {"sizeLimit": "1Gi"}}}
    assert limits(profiling=given) == {("tmp", "32Gi"), ("profiles", "1Gi")}


def test_the_job_that_fetches_a_model_writes_it_where_stages_read_it_and_requests_little() -> None:
    made = desired(**FETCHED, coordinator={"resources": {"requests": {"memory": "9Gi"}}})
    job, stage = job_of(made), pod_of(made, "mouth")
    [container] = job["containers"]
    assert job["volumes"] == [
        {"name": "tmp", "emptyDir": {"sizeLimit": "32Gi"}},
        {"name": "models", "persistentVolumeClaim": {"claimName": "demo-models"}},
    ]
    assert container["volumeMounts"] == [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "models", "mountPath": "/models"},
    ]
    assert job["volumes"][1] in stage["volumes"]
    assert variables(job) == {
        "HF_HOME": variables(stage)["HF_HOME"],
        "OMNI_MODEL_PATH": "some/model",
        "OMNI_MODEL_REVISION": "",
        "OMNI_PROGRESS_PORT": "8081",
    }
    assert container["resources"] == {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "4Gi"}}


def test_the_job_that_fetches_a_model_has_the_coordinators_placement_and_the_labels_of_no_unit() -> None:
    labels = {"sidecar.istio.io/inject": "false", "omnipipeline.dev/unit": "mouth"}
    patch: dict[str, Any] = {
        "metadata": {"labels": labels, "annotations": {"team": "voice", "none": None}, "name": "mine"},
        "spec": {"dnsConfig": {"nameservers": ["10.0.0.1"]}, "hostAliases": [{"ip": "10.0.0.2"}], "hostname": "mine"},
    }
    placement = {"priorityClassName": "high", "runtimeClassName": "gvisor", "nodeSelector": {"net": "fast"}}
    made = desired(**FETCHED, coordinator={"podTemplate": patch, "placement": placement})
    [job] = [each for each in made.created if each["kind"] == "Job"]
    template = job["spec"]["template"]
    assert template["metadata"] == {
        "labels": {**naming.labels("demo"), "sidecar.istio.io/inject": "false"},
        "annotations": {"team": "voice"},
    }
    given = {**placement, **patch["spec"]}
    coordinator = pod_of(made, "coordinator")
    assert {field: coordinator.get(field) for field in given} == given
    del given["hostname"]
    assert {field: template["spec"].get(field) for field in given} == given
    assert "hostname" not in template["spec"]


def test_the_job_that_fetches_a_model_bears_a_hash_of_its_pod() -> None:
    def stamp(**more: Any) -> str:
        [job] = [each for each in desired(**FETCHED, **more).created if each["kind"] == "Job"]
        return str(job["metadata"]["annotations"][naming.TEMPLATE])

    edits: list[dict[str, Any]] = [
        {},
        {"image": "mine:2"},
        {"env": [{"name": "HF_ENDPOINT", "value": "https://hub"}]},
        {"coordinator": {"podTemplate": {"metadata": {"labels": {"sidecar.istio.io/inject": "false"}}}}},
        {"coordinator": {"placement": {"nodeSelector": {"net": "fast"}}}},
    ]
    assert len({stamp(**each) for each in edits}) == len(edits)
    assert stamp() == stamp(processGroups=[{"name": "mouth", "replicas": 3}])


@pytest.mark.parametrize(
    "pod",
    [
        {"volumes": None},
        {"volumes": 5},
        {"containers": [{"name": "coordinator", "volumeMounts": None}]},
        {"containers": [{"name": "coordinator", "env": None}]},
    ],
)
def test_a_coordinators_pod_template_without_volumes_or_variables_breaks_no_job(pod: Any) -> None:
    made = desired(**FETCHED, coordinator={"podTemplate": {"spec": pod}})
    assert job_of(made)["volumes"] == job_of(desired(**FETCHED))["volumes"]


def test_the_image_of_the_spec_wins_over_the_operators() -> None:
    assert pod_of(desired(), "mouth")["containers"][0]["image"] == "stage:1"
    assert pod_of(desired(image="mine:2"), "mouth")["containers"][0]["image"] == "mine:2"


def test_pods_are_evicted_from_a_lost_node_after_a_minute_and_the_authors_tolerations_stay() -> None:
    made = desired(processGroups=[{"name": "mouth", "placement": {"tolerations": [{"key": "gpu"}]}}])
    tolerations = pod_of(made, "mouth")["tolerations"]
    assert [each.get("tolerationSeconds") for each in tolerations] == [60, 60, None]


def test_the_plan_in_the_configmap_is_the_one_that_was_planned() -> None:
    given_spec = spec()
    plan = planning.plan(given_spec, name="demo")
    made = children.children(given_spec, plan, FACTS)
    for each in made.workloads:
        assert each.plan["immutable"] is True
        assert f'"revision":"{each.revision}"' in each.plan["data"][config.PLAN_FILE]
    listed = config.revisions([plan.current], OWNER, image="stage:1", control_secret="s")
    assert config.read_revisions(listed) == (plan.current,)


def test_a_comment_in_inline_code_changes_the_text_of_a_plan_and_no_template() -> None:
    def made(text: str) -> list[children.DesiredWorkload]:
        return [*desired(code={"inline": {"m.py": text}}).workloads]

    before, after = made("def mouth(): return 1\n"), made("# why\ndef mouth(): return 1\n")
    assert [each.deployment for each in before] == [each.deployment for each in after]
    changed = [one.unit for one, other in zip(before, after, strict=True) if one.plan != other.plan]
    assert changed == ["ears", "mouth"]
    assert ["immutable" in each.plan for each in after] == [False, False, True]


@pytest.mark.parametrize("unit, gpus", [("ears", 1), ("mouth", 0)])
@pytest.mark.parametrize(
    "said", [{pods.CLAIMED_GPUS: "64"}, {pods.GPU_RESOURCE: "cpu"}, {pods.GPU_RESOURCE: None}, None]
)
def test_a_pod_template_does_not_say_how_many_gpus_a_pod_has(unit: str, gpus: int, said: Any) -> None:
    """Other pipelines wait for GPUs, or let go of theirs, by what this one has."""
    made = desired(processGroups=[{"name": unit, "podTemplate": {"metadata": {"annotations": said}}}])
    deployment = next(each.deployment for each in made.workloads if each.unit == unit)
    assert pods.gpus(deployment) == gpus


@pytest.mark.parametrize("amount", ["1", 1, "1000m"])
def test_devices_that_the_author_writes_out_are_requested_once(amount: object) -> None:
    resources = {"requests": {"nvidia.com/gpu": amount, "rdma/hca": 2}, "limits": {"nvidia.com/gpu": amount}}
    made = desired(
        processGroups=[{"name": name, "resources": resources} for name in ("ears", "mind")],
        dataPlane={"rdma": {"resourceName": "rdma/hca", "count": 2}},
    )
    given = pod_of(made, "ears")["containers"][0]["resources"]
    assert given["limits"] == {"nvidia.com/gpu": "1", "rdma/hca": "2"}
    assert not {"nvidia.com/gpu", "rdma/hca"} & set(given["requests"])


def test_gpus_by_a_claim_are_claimed_by_each_pod_and_no_extended_resource_is_asked_for() -> None:
    claim = {"deviceClassName": "gpu.example.com", "selectors": ["device.driver == 'gpu.example.com'"]}
    made = desired(
        processGroups=[{"name": "ears", "gpuClaim": claim}], dataPlane={"rdma": {"resourceName": "rdma/hca"}}
    )
    first, *others = made.workloads
    assert first.devices is not None and not [each for each in others if each.devices is not None]
    labels = naming.labels("demo", "ears", first.revision)
    assert first.devices["metadata"]["name"] == f"{first.deployment['metadata']['name']}-gpus"
    assert first.devices["metadata"]["labels"] == labels and first.devices["metadata"]["ownerReferences"]
    exactly = {
        "deviceClassName": "gpu.example.com",
        "allocationMode": "ExactCount",
        "count": 1,
        "selectors": [{"cel": {"expression": "device.driver == 'gpu.example.com'"}}],
    }
    devices = {"requests": [{"name": "gpus", "exactly": exactly}]}
    assert first.devices["spec"] == {"metadata": {"labels": labels}, "spec": {"devices": devices}}
    pod = pod_of(made, "ears")
    named = {"name": "gpus", "resourceClaimTemplateName": first.devices["metadata"]["name"]}
    assert pod["resourceClaims"] == [named]
    [container] = pod["containers"]
    assert container["resources"]["claims"] == [{"name": "gpus"}]
    assert container["resources"]["limits"] == {"rdma/hca": "1"}
    stored = store.shared(store.slimmed(first.deployment))
    assert pods.gpus(stored) == pods.gpus(first.deployment) == 1


def test_an_author_adds_a_claim_of_his_own_beside_the_gpus() -> None:
    net = {"name": "net", "resourceClaimTemplateName": "nics"}
    container = {"name": "stage", "resources": {"claims": [{"name": "net"}]}}
    patch = {"spec": {"resourceClaims": [net], "containers": [container]}}
    claim = {"deviceClassName": "gpu.example.com"}
    pod = pod_of(desired(processGroups=[{"name": "ears", "gpuClaim": claim, "podTemplate": patch}]), "ears")
    assert [each["name"] for each in pod["resourceClaims"]] == ["gpus", "net"]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "gpus"}, {"name": "net"}]


def test_the_largest_pipelines_revisions_fit_a_config_map_in_mid_roll() -> None:
    names = [f"s{index:02d}{'x' * 60}" for index in range(64)]
    stages: list[dict[str, Any]] = [{"name": name, "process": name, "factory": "m:stage"} for name in names]
    for index, stage in enumerate(stages[:-1]):
        targets = names[index + 1 : index + 17]
        stage |= {"next": targets, "streamTo": targets, "routeFn": "m:route"}
    stages[-1]["terminal"] = True
    entry = planning.plan(spec(stages=stages), name="demo").current
    listed = config.revisions([entry] * 3, OWNER, image="stage:1", control_secret="s")  # old, given up, new
    assert len(listed["data"][config.REVISIONS_FILE]) < 2**20


def test_a_broken_list_of_revisions_reads_as_none() -> None:
    assert config.read_revisions({"data": {config.REVISIONS_FILE: "[{]"}}) == ()
    assert config.read_revisions({"data": {config.REVISIONS_FILE: '[{"revision": 1}]'}}) == ()
    assert config.read_revisions({"data": {config.REVISIONS_FILE: '[{"other":' + "[" * 5000 + "]" * 5000 + "}]"}}) == ()
    assert config.read_revisions(None) == ()


def test_only_services_policies_and_the_budget_of_several_coordinators_are_made_unasked() -> None:
    plain = ["Service", "Service", "NetworkPolicy", "NetworkPolicy"]
    assert [each["kind"] for each in desired(coordinator={"replicas": 1}).applied] == plain
    assert [each["kind"] for each in desired().applied] == [*plain, "PodDisruptionBudget"]
    assert desired().applied[-1]["spec"]["selector"]["matchLabels"]["omnipipeline.dev/unit"] == "coordinator"
    assert desired().applied == desired(networkPolicy={}).applied
    rich = desired(
        networkPolicy={}, disruption={"podDisruptionBudget": {}}, expose={"ingress": {"host": "example.org"}}
    )
    kinds = [each["kind"] for each in rich.applied]
    assert kinds == ["Service", "Service", "Ingress", *["NetworkPolicy"] * 2, *["PodDisruptionBudget"] * 3]
    budgets = {each["metadata"]["name"]: each["spec"]["selector"]["matchLabels"] for each in rich.applied[-3:]}
    assert {labels["omnipipeline.dev/unit"] for labels in budgets.values()} == {"ears", "mouth", "coordinator"}
    assert len(budgets) == 3, "a node drain evicts one coordinator at a time, as it does pods of units"
    off = desired(networkPolicy={"enabled": False}, disruption={"podDisruptionBudget": {"enabled": False}})
    assert len(off.applied) == 2


@pytest.mark.parametrize("extra", [[], [{"ports": [{"port": 443}]}]])
def test_egress_that_is_listed_opens_the_pipelines_own_pods_and_dns_too_and_an_empty_list_restricts_nothing(
    extra: Any,
) -> None:
    policies = {
        each["metadata"]["name"]: each["spec"] for each in desired(networkPolicy={"extraEgress": extra}).applied
    }
    own = {"podSelector": {"matchLabels": naming.selector("demo")}}
    dns = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    expected = (["Ingress", "Egress"], [{"to": [own]}, dns, *extra]) if extra else (["Ingress"], None)
    assert (policies["demo-pods"]["policyTypes"], policies["demo-pods"].get("egress")) == expected


def test_the_policy_of_http_admits_coordinators_of_any_port_so_that_a_change_cuts_off_none() -> None:
    def policy(port: int) -> Any:
        made = desired(networkPolicy={"ingressFrom": [{"podSelector": {}}]}, coordinator={"http": {"port": port}})
        [found] = [each for each in made.applied if each["metadata"]["name"] == naming.http_policy("demo")]
        return found["spec"]

    assert policy(8000) == policy(9000)
    assert policy(8000)["ingress"] == [
        {"ports": [{"port": "http", "protocol": "TCP"}], "from": [{"podSelector": {}}]},
    ]
    named = {each["name"]: each["containerPort"] for each in pod_of(desired(), "coordinator")["containers"][0]["ports"]}
    assert named["http"] == 8000


@pytest.mark.parametrize("patch, place", podsecurity_cases.REFUSED)
def test_a_privilege_is_refused_unless_the_operator_allows_it(patch: Any, place: str) -> None:
    refined = [{"name": "mouth", "podTemplate": patch}]
    with pytest.raises(NotAllowed) as refused:
        desired(processGroups=refined)
    assert refused.value.path == f"processGroups[mouth].podTemplate.{place}"
    allowing = PodFacts(owner=OWNER, image="stage:1", control_secret="s", allow_privileged=True)
    assert desired(allowing, processGroups=refined).workloads


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("rdma", [False, True])
def test_no_pod_asks_for_a_capability_that_a_process_without_root_would_not_get(rdma: bool, allowed: bool) -> None:
    facts = PodFacts(owner=OWNER, image="stage:1", control_secret="s", allow_privileged=allowed)
    fields = {"dataPlane": {"rdma": {"resourceName": "rdma/hca"}}} if rdma else {}
    *units, coordinator = desired(facts, **fields).workloads
    for unit in units:
        [container] = unit.deployment["spec"]["template"]["spec"]["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert ("rdma/hca" in container["resources"].get("limits", {})) == rdma
        names = {variable["name"] for variable in container["env"]}
        assert {"OMNI_POD_IP", "OMNI_POD_UID"} <= names
    [container] = coordinator.deployment["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("patch", podsecurity_cases.ACCEPTED)
def test_what_the_restricted_standard_accepts_is_accepted(patch: Any) -> None:
    assert desired(processGroups=[{"name": "mouth", "podTemplate": patch}]).workloads


@pytest.mark.parametrize(
    "patch, place",
    [
        ({"metadata": "m"}, "metadata"),
        ({"metadata": {"labels": ["a"]}}, "metadata.labels"),
        ({"spec": 5}, "spec"),
        ({"spec": {"containers": [{"image": "unnamed"}]}}, "spec.containers[0]"),
        ({"spec": {"containers": {"stage": {}}}}, "spec.containers"),
        ({"spec": {"containers": [{"name": "stage", "resources": [1]}]}}, "spec.containers[stage].resources"),
        (
            {"spec": {"containers": [{"name": "stage", "securityContext": "no"}]}},
            "spec.containers[stage].securityContext",
        ),
    ],
)
def test_an_invalid_pod_template_is_refused_with_its_place(patch: Any, place: str) -> None:
    with pytest.raises(NotAllowed) as refused:
        desired(processGroups=[{"name": "mouth", "podTemplate": patch}])
    assert refused.value.path == f"processGroups[mouth].podTemplate.{place}"


def test_a_pod_without_a_security_context_is_refused_at_each_place() -> None:
    bare = {"spec": {"containers": [{"name": "stage"}]}}
    context = "spec.containers[stage].securityContext"
    assert [place for place, _ in podsecurity.violations(bare, generated="stage")] == [
        f"{context}.allowPrivilegeEscalation",
        f"{context}.capabilities.drop",
        f"{context}.runAsNonRoot",
        f"{context}.seccompProfile",
        f"{context}.readOnlyRootFilesystem",
    ]


def test_a_fault_of_the_coordinators_template_names_the_coordinator() -> None:
    with pytest.raises(NotAllowed) as refused:
        desired(coordinator={"podTemplate": {"spec": {"hostIPC": True}}})
    assert refused.value.path == "coordinator.podTemplate.spec.hostIPC"


def test_a_container_of_the_authors_gets_what_the_restricted_standard_asks_for() -> None:
    added = {"name": "more", "image": "x:1", "securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}}}
    pod = pod_of(desired(processGroups=[{"name": "mouth", "podTemplate": {"spec": {"containers": [added]}}}]), "mouth")
    assert pod["containers"][1]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
    }


def test_no_pod_is_best_effort_and_what_the_author_says_of_a_resource_wins() -> None:
    made = desired(processGroups=[{"name": "mouth", "resources": {"limits": {"memory": "128Mi"}}}])
    assert pod_of(made, "ears")["containers"][0]["resources"] == {
        "requests": {"cpu": "100m", "memory": "512Mi"},  # of two process groups
        "limits": {"nvidia.com/gpu": "1"},
    }
    assert pod_of(made, "mouth")["containers"][0]["resources"] == {
        "requests": {"cpu": "50m"},
        "limits": {"memory": "128Mi"},
    }
    assert pod_of(made, "coordinator")["containers"][0]["resources"] == {
        "requests": {"cpu": "50m", "memory": "256Mi"},
        "limits": {"memory": "4Gi"},
    }


def test_an_authors_python_path_is_joined_with_the_folder_of_the_code() -> None:
    env = [{"name": "PYTHONPATH", "value": "/app"}]
    own = variables(pod_of(desired(env=env), "mouth"))
    assert own["PYTHONPATH"] == "/app"
    joined = variables(pod_of(desired(env=env, code={"configMapRef": {"name": "mine"}}), "mouth"))
    assert joined["PYTHONPATH"] == "/etc/omnipipeline/code:/app"


@pytest.mark.parametrize(
    ("http", "annotations", "bounds"),
    [
        pytest.param({}, {}, ("605", "605", "67108864"), id="its own"),
        pytest.param(
            {"requestTimeoutSeconds": 1799.5, "maxBodyBytes": 2048}, {}, ("1805", "1805", "2048"), id="the spec's"
        ),
        pytest.param({}, {"proxy-body-size": "64m"}, ("605", "605", "64m"), id="the author's come first"),
    ],
)
def test_the_ingress_waits_for_answers_as_long_as_the_coordinator_does(
    http: dict[str, float], annotations: dict[str, str], bounds: tuple[str, ...]
) -> None:
    nginx = "nginx.ingress.kubernetes.io"
    given = {f"{nginx}/{name}": value for name, value in annotations.items()}
    made = desired(coordinator={"http": http}, expose={"ingress": {"annotations": {"mine": "1", **given}}})
    [ingress] = [each for each in made.applied if each["kind"] == "Ingress"]
    named = ("proxy-read-timeout", "proxy-send-timeout", "proxy-body-size")
    desired_ones = {"mine": "1"} | {f"{nginx}/{name}": value for name, value in zip(named, bounds, strict=True)}
    assert desired_ones.items() <= ingress["metadata"]["annotations"].items()


def test_a_route_cuts_no_stream_and_names_the_services_port() -> None:
    parents = [{"name": "shared", "namespace": "doors", "sectionName": "tls"}, {"name": "own", "port": 8080}]
    route = {"parentRefs": parents, "hostnames": ["voice.example.org"], "annotations": {"mine": "1"}}
    made = desired(expose={"route": route, "service": {"port": 80}}).applied
    [found] = [each for each in made if each["kind"] == "HTTPRoute"]
    assert found["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert (found["metadata"]["name"], found["metadata"]["annotations"]) == ("demo", {"mine": "1"})
    assert found["spec"] == {
        "parentRefs": parents,
        "hostnames": ["voice.example.org"],
        "rules": [
            {
                "backendRefs": [{"name": "demo", "port": 80}],
                "timeouts": {"request": "0s", "backendRequest": "0s"},
            }
        ],
    }
    made = desired(expose={"route": {"parentRefs": [{"name": "g"}]}}).applied
    [bare] = [each for each in made if each["kind"] == "HTTPRoute"]
    assert bare["spec"]["parentRefs"] == [{"name": "g"}] and "hostnames" not in bare["spec"]


def test_clients_get_both_ip_families_and_stages_one_address_for_each_coordinator() -> None:
    http, peers = desired().applied[:2]
    assert (http["spec"]["ipFamilyPolicy"], "ipFamilyPolicy" in peers["spec"]) == ("PreferDualStack", False)
    given = desired(expose={"service": {"ipFamilyPolicy": "SingleStack"}}).applied[0]
    assert given["spec"]["ipFamilyPolicy"] == "SingleStack"
    listens = {name: value for name, value in variables(pod_of(desired(), "coordinator")).items() if "*" in value}
    assert listens == {"OMNI_LISTEN": "tcp://*:5550", "OMNI_PUBLISH": "tcp://*:5549", "OMNI_HTTP_HOST": "*"}


def test_a_certificate_is_mounted_and_all_doors_are_https() -> None:
    https, http = (
        desired(
            coordinator={"http": {"tls": {"secretName": "door"} if secured else None}},
            expose={"ingress": {"annotations": {"mine": "1"}}},
        )
        for secured in (True, False)
    )
    pod = pod_of(https, "coordinator")
    items = [{"key": name, "path": name} for name in ("tls.crt", "tls.key")]
    volume = {"name": "tls", "secret": {"secretName": "door", "items": items, "defaultMode": 0o440}}
    assert volume in pod["volumes"]
    given = {name: value for name, value in variables(pod).items() if "TLS" in name}
    assert given == {
        "OMNI_TLS_CERT_FILE": "/etc/omnipipeline/tls/tls.crt",
        "OMNI_TLS_KEY_FILE": "/etc/omnipipeline/tls/tls.key",
    }
    protocols = [made.applied[0]["spec"]["ports"][0]["appProtocol"] for made in (https, http)]
    assert protocols == ["https", "http"]
    backend = "nginx.ingress.kubernetes.io/backend-protocol"
    annotated = [
        each["metadata"]["annotations"] for made in (https, http) for each in made.applied if each["kind"] == "Ingress"
    ]
    assert [(each["mine"], each.get(backend)) for each in annotated] == [("1", "HTTPS"), ("1", None)]
    assert services.url(spec(coordinator={"http": {"tls": {"secretName": "door"}}}), OWNER).startswith("https://")
    assert https.workloads[-1].revision != http.workloads[-1].revision
    assert pod["containers"][0]["livenessProbe"]["httpGet"] == {"path": "/livez", "port": 8081}, "probes stay plain"


@pytest.mark.parametrize(
    "template, patch, merged",
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}, {"a": 1, "b": {"c": 2, "d": 3}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"list": [1, 2]}, {"list": [3]}, {"list": [3]}),
        (
            {"containers": [{"name": "stage", "env": [{"name": "A", "value": "1"}]}]},
            {"containers": [{"name": "stage", "env": [{"name": "A", "value": "2"}, {"name": "B"}]}, {"name": "more"}]},
            {"containers": [{"name": "stage", "env": [{"name": "A", "value": "2"}, {"name": "B"}]}, {"name": "more"}]},
        ),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"value": "no name"}]}, {"env": [{"value": "no name"}]}),
    ],
)
def test_a_pod_template_is_merged_by_name(template: Any, patch: Any, merged: Any) -> None:
    assert templates.merge(template, patch) == merged


def test_our_labels_survive_the_authors_template() -> None:
    patch = {"metadata": {"labels": {"omnipipeline.dev/unit": "other", "team": "voice"}}}
    made = desired(processGroups=[{"name": "mouth", "podTemplate": patch}])
    deployment = next(each.deployment for each in made.workloads if each.unit == "mouth")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels["team"] == "voice"
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


names = st.from_regex(r"[a-z]([-a-z0-9]{0,36}[a-z0-9])?", fullmatch=True).filter(
    lambda name: not name.endswith("-peers")
)
units = st.from_regex(r"[a-z]([-_a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
hashes = st.from_regex(r"[0-9a-f]{8}", fullmatch=True)


@given(names, names, units, units, hashes)
def test_children_of_two_pipelines_never_bear_one_name(
    one: str, other: str, unit: str, second: str, revision: str
) -> None:
    assert len(naming.unit(one, unit, revision)) <= naming.MAX_NAME
    if one != other:
        assert naming.budget(one, unit) != naming.budget(other, second)
        for named in (naming.pods_policy, naming.http_policy, naming.revisions, naming.claim, naming.peers):
            assert named(one) != named(other)
        assert {naming.pods_policy(one), naming.http_policy(one)}.isdisjoint(
            {naming.pods_policy(other), naming.http_policy(other)}
        )
        assert naming.service(one) != naming.peers(other)


def test_the_prefetch_job_runs_python_that_compiles() -> None:
    cache = {"type": "PersistentVolumeClaim", "size": "1Gi", "prefetch": {"enabled": True}}
    made = desired(modelPath="some/model", modelCache=cache)
    [job] = [each for each in made.created if each["kind"] == "Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    script = max([*container.get("command", ()), *container.get("args", ())], key=len)
    compile(script, "prefetch", "exec")


def test_a_model_of_a_store_is_fetched_with_the_keys_of_a_secret_that_no_stage_sees() -> None:
    cache = {**CLAIM, "prefetch": {"enabled": True, "secretName": "store"}}
    made = desired(modelPath="s3://models/mine", modelCache=cache, envFrom=[{"configMapRef": {"name": "all"}}])
    [fetch] = job_of(made)["containers"]
    assert fetch["command"] == ["python3", "-m", "stage_runtime", "prefetch"]
    assert fetch["envFrom"] == [{"configMapRef": {"name": "all"}}, {"secretRef": {"name": "store"}}]
    environment = {each["name"]: each.get("value") for each in fetch["env"]}
    assert environment["OMNI_MODEL_PATH"] == "s3://models/mine"
    assert environment["OMNI_MODELS_DIR"] == "/models"
    stage = pod_of(made, "mouth")
    assert variables(stage)["OMNI_MODELS_DIR"] == "/models"
    assert "store" not in str(stage)
    assert "OMNI_MODELS_DIR" not in variables(pod_of(desired(**FETCHED), "mouth"))


NODE: dict[str, Any] = {"type": "Node", "prefetch": {"enabled": True, "secretName": "store"}}
HELD = msgspec.structs.replace(FACTS, node_models=NodeModels(path="/var/lib/models", bound="200Gi"))


def test_a_pod_fetches_the_model_to_its_node_before_its_stages_which_only_read_it() -> None:
    made = desired(HELD, modelPath="s3://models/mine", modelCache=NODE, envFrom=[{"configMapRef": {"name": "all"}}])
    assert made.created == (), "neither a claim nor a Job"
    pod = pod_of(made, "mouth")
    [volume] = [each for each in pod["volumes"] if each["name"] == "models"]
    assert volume == {"name": "models", "hostPath": {"path": "/var/lib/models", "type": "DirectoryOrCreate"}}
    [fetch], [stage] = pod["initContainers"], pod["containers"]
    assert fetch["command"] == ["python3", "-m", "stage_runtime", "prefetch", "--quick", "--bound", "200Gi"]
    assert fetch["envFrom"] == [{"configMapRef": {"name": "all"}}, {"secretRef": {"name": "store"}}]
    assert fetch["volumeMounts"] == [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "models", "mountPath": "/models"},
    ]
    assert fetch["image"] == stage["image"] and fetch["securityContext"] == stage["securityContext"]
    variables_of_fetch = {each["name"]: each.get("value") for each in fetch["env"]}
    assert variables_of_fetch["OMNI_MODEL_PATH"] == "s3://models/mine"
    assert variables_of_fetch["OMNI_MODELS_DIR"] == "/models"
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in stage["volumeMounts"]
    assert stage["envFrom"] == [{"configMapRef": {"name": "all"}}]
    assert variables(pod)["OMNI_MODELS_DIR"] == "/models" and "HF_HUB_CACHE" not in variables(pod)
    assert "initContainers" not in pod_of(made, "coordinator")
    assert "models" not in {each["name"] for each in pod_of(made, "coordinator")["volumes"]}


def test_a_hubs_model_on_a_node_is_read_where_it_was_fetched_and_the_hub_is_not_asked() -> None:
    cache = {"type": "Node", "prefetch": {"enabled": True}}
    pod = pod_of(desired(HELD, modelPath="some/model", modelRevision="abc", modelCache=cache), "mouth")
    read = variables(pod)
    assert (read["HF_HUB_CACHE"], read["HF_HUB_OFFLINE"]) == ("/models/huggingface/hub", "1")
    assert "HF_HOME" not in read
    [fetch] = pod["initContainers"]
    fetched = {each["name"]: each.get("value") for each in fetch["env"]}
    assert (fetched["HF_HOME"], fetched["OMNI_MODEL_REVISION"]) == ("/models/huggingface", "abc")
    assert fetch["command"][:2] == ["python3", "-c"]


@pytest.mark.parametrize("home", [{"name": "HF_HOME", "value": "/elsewhere"}, {"name": "OTHER", "value": "1"}])
def test_a_variable_of_the_container_that_fetches_a_model_is_given_once(home: dict[str, str]) -> None:
    node = {"type": "Node", "prefetch": {"enabled": True}}
    facts = msgspec.structs.replace(FACTS, node_models=NodeModels(path="/var/models"))
    made = desired(facts, modelPath="some/model", modelCache=node, env=[home])
    [fetches] = [one for one in pod_of(made, "mouth")["initContainers"] if one["name"] == "prefetch"]
    claim = {"type": "PersistentVolumeClaim", "size": "1Gi", "prefetch": {"enabled": True}}
    job = job_of(desired(modelPath="some/model", modelCache=claim))["containers"][0]
    for container in (fetches, job):
        names = [each["name"] for each in container["env"]]
        assert len(names) == len(set(names)), names
        assert {each["name"]: each.get("value") for each in container["env"]}["HF_HOME"] == "/models/huggingface"


def test_models_on_nodes_need_the_operators_leave() -> None:
    with pytest.raises(NotAllowed, match=r"modelCache\.type: Node: this operator has no directory on nodes"):
        desired(modelPath="some/model", modelCache=NODE)


@pytest.mark.parametrize(
    "volume",
    [
        {"name": "models", "hostPath": {"path": "/var/lib/models/..", "type": "DirectoryOrCreate"}},
        {"name": "models", "hostPath": {"path": "/"}},
        {"name": "more", "hostPath": {"path": "/var/lib/models", "type": "DirectoryOrCreate"}},
    ],
)
def test_the_directory_of_models_gives_an_author_no_other_one_of_the_node(volume: dict[str, Any]) -> None:
    patch = {"spec": {"volumes": [volume]}}
    groups = [{"name": "mouth", "podTemplate": patch}]
    with pytest.raises(NotAllowed, match=r"hostPath: is a kind of volume that the standard forbids"):
        desired(HELD, modelPath="s3://models/mine", modelCache=NODE, processGroups=groups)


def test_an_authors_init_containers_run_after_the_model_is_there() -> None:
    patch = {"spec": {"initContainers": [{"name": "converts", "image": "x:1"}]}}
    groups = [{"name": "mouth", "podTemplate": patch}]
    pod = pod_of(desired(HELD, modelPath="s3://models/mine", modelCache=NODE, processGroups=groups), "mouth")
    assert [each["name"] for each in pod["initContainers"]] == ["prefetch", "converts"]
