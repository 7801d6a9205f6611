"""The chart, rendered by helm and validated by a real API server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from omnipipeline_operator import cli, settings
from omnipipeline_operator.conversion import certificates, publishing
from omnipipeline_operator.settings import ConversionSettings
from omnipipeline_spec.generating import schema
from omnipipeline_spec.types import quantities
from tests.chart.rendering import CHART, COMBINATIONS, MONITORED, NAMESPACE, helm, objects, rendered, sets
from tests.cluster_kit import Cluster
from tests.contract import next_version

pytestmark = [pytest.mark.cluster]

#: The Prometheus operator's CRDs; for a dry run they only have to exist.
MONITORING = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {{name: {plural}.monitoring.coreos.com}}
spec:
  group: monitoring.coreos.com
  scope: Namespaced
  names: {{kind: {kind}, plural: {plural}, singular: {singular}, listKind: {kind}List}}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {{openAPIV3Schema: {{type: object, x-kubernetes-preserve-unknown-fields: true}}}}
"""


@pytest.fixture(scope="module")
def server(api_server: Cluster) -> Iterator[Cluster]:
    """The API server with the namespaces and the foreign kinds that the combinations name."""
    namespaces = (NAMESPACE, "team-a", "team-b")
    for namespace in namespaces:
        _end_of_deletion(api_server, namespace)
        api_server.kubectl("create", "namespace", namespace, check=False)
    # A dry run makes nothing, and a pod is admitted only where its service account is there.
    api_server.kubectl("-n", NAMESPACE, "create", "serviceaccount", "release-omnipipeline-test", check=False)
    kinds = {"podmonitors": "PodMonitor", "prometheusrules": "PrometheusRule"}
    for plural, kind in kinds.items():
        crd = MONITORING.format(plural=plural, kind=kind, singular=kind.lower())
        api_server.kubectl("apply", "-f", "-", stdin=crd)
        api_server.kubectl("wait", "--for=condition=Established", f"crd/{plural}.monitoring.coreos.com")
    yield api_server
    api_server.kubectl("delete", "crd", *(f"{plural}.monitoring.coreos.com" for plural in kinds))
    api_server.kubectl("delete", "namespace", *namespaces, "--wait=false")


def _end_of_deletion(server: Cluster, namespace: str) -> None:
    """An API server alone has no controller that ends the deletion of an earlier run's namespace."""
    show = ("get", "namespace", namespace, "--ignore-not-found", "-o", "jsonpath={.status.phase}")
    if server.kubectl(*show).stdout != "Terminating":
        return
    server.kubectl("wait", "--for=delete", f"namespace/{namespace}", "--timeout=5s", check=False)
    if server.kubectl(*show).stdout == "Terminating":
        empty = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}, "spec": {"finalizers": []}}
        path = f"/api/v1/namespaces/{namespace}/finalize"
        server.kubectl("replace", "--raw", path, "-f", "-", stdin=json.dumps(empty))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_real_api_server_takes_what_these_values_render(server: Cluster, name: str) -> None:
    text = rendered(server, COMBINATIONS[name])
    server.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)


@pytest.mark.parametrize(  # the combinations differ in their values, which an API server takes, above
    "name",
    ["as it is", *(pytest.param(each, marks=pytest.mark.nightly) for each in COMBINATIONS if each != "as it is")],
)
def test_helm_lint_accepts_these_values(api_server: Cluster, name: str) -> None:
    done = helm(api_server, "lint", str(CHART), "--strict", *sets(COMBINATIONS[name]))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "value",
    [
        *("replica=2", "image.tagg=x", "logFormat=xml", "replicas=-1", "monitoring.podMonitor.intervall=1s"),
        *("podSecurityContext.runAsUser=0", "pipelinePodSecurityContext.privileged=true"),
        *("podGroupScheduler=my scheduler", "networkPolicy=null", "limits.workers=null", "defaultResources.stage=x"),
    ],
)
def test_a_value_that_is_not_in_the_schema_is_refused(api_server: Cluster, value: str) -> None:
    done = helm(api_server, "template", "release", str(CHART), *sets([value]))
    assert done.returncode != 0 and value.split("=")[0].split(".")[-1] in done.stderr


def test_the_crd_is_kept_when_the_release_is_uninstalled(api_server: Cluster) -> None:
    [crd] = [each for each in objects(rendered(api_server, [])) if each["kind"] == "CustomResourceDefinition"]
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_release_contains_the_lease_that_the_operator_is_configured_with(api_server: Cluster) -> None:
    made = objects(rendered(api_server, []))
    [lease] = [each["metadata"]["name"] for each in made if each["kind"] == "Lease"]
    [deployment] = [each for each in made if each["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["OMNI_OPERATOR_LEASE_NAME"] == lease


@pytest.mark.parametrize(
    ("switch", "resource"), [("gatewayAPI", "httproutes"), ("deviceClaims", "resourceclaimtemplates")]
)
@pytest.mark.parametrize(
    ("values", "given"),
    [
        ([], True),
        (["rbac.{}=false"], False),
        (["watchNamespaces={{team-a}}"], False),
        (["watchNamespaces={{team-a}}", "rbac.{}=true"], True),
    ],
)
def test_a_namespaces_operator_has_no_right_to_routes_and_claims_unless_asked(
    api_server: Cluster, values: list[str], given: bool, switch: str, resource: str
) -> None:
    made = rendered(api_server, [each.format(switch) for each in values])
    rules = [rule for role in _roles(made) for rule in role["rules"]]
    assert any(resource in rule["resources"] for rule in rules) is given


@pytest.mark.parametrize("name", ["as it is", "namespaced"])
def test_the_operator_can_read_no_secret_and_has_no_wildcard(api_server: Cluster, name: str) -> None:
    rules = [rule for role in _roles(rendered(api_server, COMBINATIONS[name])) for rule in role["rules"]]
    assert not any("*" in rule[part] for rule in rules for part in ("apiGroups", "resources", "verbs"))
    [secrets] = {tuple(rule["verbs"]) for rule in rules if "secrets" in rule["resources"]}
    assert secrets == ("create",)


def test_the_webhook_adds_the_right_to_one_secret_and_to_one_definition_alone(api_server: Cluster) -> None:
    plain, more = (
        [(role["metadata"]["name"], rule) for role in _roles(rendered(api_server, values)) for rule in role["rules"]]
        for values in ([], ["conversion.enabled=true"])
    )
    name = "release-omnipipeline-conversion"
    assert [each for each in more if each not in plain] == [
        (
            name,
            {
                "apiGroups": ["apiextensions.k8s.io"],
                "resources": ["customresourcedefinitions"],
                "resourceNames": ["omnipipelines.omnipipeline.dev"],
                "verbs": ["get", "patch"],
            },
        ),
        (
            name,
            {
                "apiGroups": [""],
                "resources": ["secrets"],
                "resourceNames": [name],
                "verbs": ["get", "update", "delete"],
            },
        ),
    ]


def test_the_webhooks_service_leads_to_the_port_that_the_operator_is_told(api_server: Cluster) -> None:
    made = objects(rendered(api_server, COMBINATIONS["converting and namespaced"]))
    [deployment] = [each for each in made if each["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    [container] = template["spec"]["containers"]
    variables = {each["name"]: each.get("value", NAMESPACE) for each in container["env"]}
    read = settings.read(variables, hostname="h").conversion
    assert read is not None
    named = [each for each in made if each["metadata"]["name"] == read.name and each["kind"] in ("Service", "Secret")]
    [service] = [each for each in named if each["kind"] == "Service"]
    assert (len(named), service["metadata"]["namespace"], read.namespace) == (2, NAMESPACE, NAMESPACE)
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    [port] = service["spec"]["ports"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert (port["port"], ports[port["targetPort"]]) == (443, read.port)
    [policy] = [each for each in made if each["kind"] == "NetworkPolicy"]
    assert {"ports": [{"port": read.port, "protocol": "TCP"}]} in policy["spec"]["ingress"]


def test_a_chart_with_two_versions_points_at_the_webhook_from_the_first_moment_or_is_refused(
    api_server: Cluster, tmp_path: Path
) -> None:
    chart = tmp_path / "omnipipeline"
    shutil.copytree(CHART, chart)
    (chart / "crds.yaml").write_text(json.dumps(schema.crd([next_version.served()])))
    render = ("template", "release", str(chart), "-n", NAMESPACE)
    refused = helm(api_server, *render)
    assert refused.returncode != 0 and "conversion.enabled must be true" in refused.stderr
    done = helm(api_server, *render, "--set", "conversion.enabled=true")
    [crd] = [each for each in objects(done.stdout) if each["kind"] == "CustomResourceDefinition"]
    assert [each["name"] for each in crd["spec"]["versions"]] == ["v1alpha1", "v1beta1"]
    configured = ConversionSettings(port=8443, namespace=NAMESPACE, name="release-omnipipeline-conversion")
    held = certificates.renewed(None, configured.host, datetime.now(UTC))
    written = publishing.conversion(configured, held)
    del written["webhook"]["clientConfig"]["caBundle"]
    assert crd["spec"]["conversion"] == written, "what the operator writes, without the authority"


def test_the_webhook_is_taken_out_of_the_definition_before_the_release_goes(api_server: Cluster) -> None:
    assert not [each for each in objects(rendered(api_server, [])) if each["kind"] == "Job"]
    made = objects(rendered(api_server, ["conversion.enabled=true", f"nameOverride={'n' * 53}", "logFormat=text"]))
    [job] = [each for each in made if each["kind"] == "Job"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    [deployment] = [each for each in made if each["kind"] == "Deployment"]
    pod, own = job["spec"]["template"], deployment["spec"]["template"]
    [service] = [each for each in made if each["kind"] == "Service"]
    assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items(), "it answers no review"
    assert all(len(each) <= 63 for each in pod["metadata"]["labels"].values())
    for field in ("serviceAccountName", "securityContext"):
        assert pod["spec"][field] == own["spec"][field]
    [container], [operators] = (each["spec"]["containers"] for each in (pod, own))
    assert (container["image"], container["command"][2:]) == (
        operators["image"],
        ["omnipipeline_operator", cli.WITHDRAW],
    )
    variables = ({each["name"]: each.get("value", "x") for each in found["env"]} for found in (container, operators))
    ours, theirs = (settings.read(each, hostname="h").conversion for each in variables)
    assert ours == theirs is not None


@pytest.mark.parametrize("name", ["123", "true", "null", "1e3", "on"])
def test_a_name_that_yaml_would_take_for_something_else_stays_a_text(api_server: Cluster, name: str) -> None:
    values = ["conversion.enabled=true", "nodeModels.path=/models", "podDisruptionBudget.enabled=true", *MONITORED]
    texts = (f"watchNamespaces={{{name}}}", f"priorityClassName={name}", f"serviceAccount.name={name}")
    more = [argument for each in (*texts, f"tests.namespace={name}") for argument in ("--set-string", each)]
    if name[0].isalpha():
        more += ["--set-string", f"fullnameOverride={name}"]
    done = helm(api_server, "template", name, str(CHART), "-n", name, *sets(values), *more)
    assert done.returncode == 0, done.stderr

    def texts_of(value: Any, at: str) -> None:
        if at in (
            "name",
            "namespace",
            "app.kubernetes.io/instance",
            "serviceAccountName",
            "priorityClassName",
            "value",
        ):
            assert isinstance(value, (str, dict)), (at, value)
        for key, each in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            texts_of(each, str(key))

    for made in objects(done.stdout):
        if made["kind"] != "CustomResourceDefinition":
            texts_of(made, "")


@pytest.mark.parametrize("release", ["release", "9lives", "a.b.c", f"1.{'a' * 30}-peers", f"{'a' * 31}.b"])
def test_the_pipeline_of_the_test_and_the_webhooks_service_have_names_that_they_can_have(
    api_server: Cluster, release: str
) -> None:
    """helm takes releases with dots, and such that begin with a digit."""
    done = helm(api_server, "template", release, str(CHART), "-n", NAMESPACE, "--set", "conversion.enabled=true")
    made = objects(done.stdout)
    [smoke] = [each for each in made if each["kind"] == "Pod"]
    variables = {each["name"]: each["value"] for each in smoke["spec"]["containers"][0]["env"]}
    assert quantities.is_pipeline_name(variables["SMOKE_NAME"])
    for service in [each["metadata"]["name"] for each in made if each["kind"] == "Service"]:
        assert re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", service)


def test_the_namespaced_operator_has_no_right_on_the_cluster(api_server: Cluster) -> None:
    made = objects(rendered(api_server, COMBINATIONS["namespaced"]))
    assert not [each for each in made if each["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    lease = {each["metadata"]["namespace"] for each in made if each["kind"] == "Role"}
    assert lease == {"team-a", "team-b", NAMESPACE}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_operator_reads_the_settings_that_the_chart_renders(api_server: Cluster, name: str) -> None:
    made = objects(rendered(api_server, COMBINATIONS[name]))
    [deployment] = [each for each in made if each["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "x") for each in container["env"]}
    read = settings.read(variables, hostname="h")
    assert read.namespaces == (("team-a", "team-b") if "namespaced" in name else ())
    own = {"app.kubernetes.io/name": "omnipipeline-operator", "app.kubernetes.io/instance": "release"}
    assert read.scrapers[0]["podSelector"]["matchLabels"] == own  # it reads the coordinators' status itself
    assert len(read.scrapers) == (2 if "monitored" in name else 1)


def test_the_autoscaler_may_remove_the_operators_node_unless_a_value_says_otherwise(api_server: Cluster) -> None:
    volumes, kept = (f"cluster-autoscaler.kubernetes.io/safe-to-evict{more}" for more in ("-local-volumes", ""))
    given = kept.replace(".", "\\.")
    for values, expected in (
        ([], {volumes: "tmp"}),
        ([f"podAnnotations.{given}=no"], {volumes: "tmp", kept: "no"}),
        ([f"podAnnotations.{given}-local-volumes=none"], {volumes: "none"}),
    ):
        [deployment] = [each for each in objects(rendered(api_server, values)) if each["kind"] == "Deployment"]
        template = deployment["spec"]["template"]
        assert template["metadata"]["annotations"] == expected
        assert {each["name"] for each in template["spec"]["volumes"] if "emptyDir" in each} == {"tmp"}


def test_what_a_failed_test_leaves_is_found_by_its_labels_and_is_over_before_helm_gives_up(api_server: Cluster) -> None:
    made = objects(rendered(api_server, ["watchNamespaces={team-a}"]))
    hooks = [each for each in made if "helm.sh/hook" in each["metadata"].get("annotations", {})]
    assert {each["kind"] for each in hooks} == {"ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Pod"}
    own = {"app.kubernetes.io/name": "omnipipeline-test", "app.kubernetes.io/instance": "release"}
    assert [each["metadata"]["labels"] for each in hooks] == [own] * len(hooks)
    assert not [each for each in made if each not in hooks and each["metadata"]["labels"].items() >= own.items()]
    [pod] = [each for each in hooks if each["kind"] == "Pod"]
    [timeout] = [each["value"] for each in pod["spec"]["containers"][0]["env"] if each["name"] == "SMOKE_TIMEOUT"]
    helms_own_s, deletes_s = 300, 30
    assert int(timeout) + deletes_s < helms_own_s


@pytest.mark.parametrize(
    "values, own, pipelines",
    [
        ([], {"runAsUser": 65532, "runAsGroup": 65532}, settings.OWN_USER),
        (["podSecurityContext=null", "pipelinePodSecurityContext=null"], {}, settings.PodUsers()),
        (
            ["podSecurityContext.runAsUser=1000680000", "podSecurityContext.runAsGroup=null"],
            {"runAsUser": 1000680000},
            settings.OWN_USER,
        ),
        (
            ["pipelinePodSecurityContext.runAsUser=1000680000", "pipelinePodSecurityContext.fsGroup=null"],
            {"runAsUser": 65532, "runAsGroup": 65532},
            settings.PodUsers(run_as_user=1000680000, run_as_group=65532),
        ),
    ],
)
def test_users_and_groups_are_those_of_the_values_and_null_leaves_them_to_admission(
    api_server: Cluster, values: list[str], own: dict[str, int], pipelines: settings.PodUsers
) -> None:
    made = objects(rendered(api_server, values))
    [deployment] = [each for each in made if each["kind"] == "Deployment"]
    [test] = [each for each in made if each["kind"] == "Pod"]
    for pod in (deployment["spec"]["template"]["spec"], test["spec"]):
        fixed = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert pod["securityContext"] == fixed | own
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "x") for each in container["env"]}
    assert settings.read(variables, hostname="h").pod_users == pipelines


def _roles(text: str) -> list[dict[str, Any]]:
    """Roles of the operator: not of people, not of the test."""
    roles = [each for each in objects(text) if each["kind"] in ("ClusterRole", "Role")]
    return [each for each in roles if not each["metadata"]["name"].endswith(("-edit", "-view", "-test"))]
