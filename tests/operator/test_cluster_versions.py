"""A second version of the resource with breaking differences, on a real API server: both ways, stored in either one.

The operator converts all along and reconciles; no pod is replaced.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omnipipeline_spec.generating import schema
from tests.chart.rendering import CHART
from tests.cluster_kit import Cluster
from tests.contract import next_version
from tests.contract.next_version import HUB, NAME
from tests.operator import running
from tests.operator.running import Audit, Kube, OperatorProcess, eventually, pipeline
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CRD = "omnipipelines.omnipipeline.dev"
WEBHOOK = f"{running.ACCOUNT}-conversion"
SERVED = f"omnipipeline.dev/{NAME}"


def define(cluster: Cluster, *, second: bool = True, storage: str = HUB) -> None:
    """Write the CRD with one version or two."""
    others = [next_version.served()] if second else []
    manifest = json.dumps(schema.crd(others, storage=storage))
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifest)

    def effective() -> bool:
        served = json.loads(cluster.kubectl("get", "--raw", "/apis/omnipipeline.dev").stdout)["versions"]
        if {each["version"] for each in served} != {HUB, *[each.name for each in others]}:
            return False
        resources = json.loads(cluster.kubectl("get", "--raw", f"/apis/omnipipeline.dev/{HUB}").stdout)["resources"]
        [hashed] = [each["storageVersionHash"] for each in resources if each["name"] == "omnipipelines"]
        stored = hashlib.sha256(f"omnipipeline.dev/{storage}/OmniPipeline".encode()).digest()
        return bool(hashed == base64.b64encode(stored[:8]).decode())

    eventually(effective, what="the CRD is served")


def only_stored(cluster: Cluster, version: str) -> None:
    """Write what an administrator writes after a migration: the API server then lets the other version go."""
    patch = json.dumps({"status": {"storedVersions": [version]}})
    cluster.kubectl("patch", "crd", CRD, "--subresource=status", "--type=merge", "-p", patch)


@pytest.fixture
def converting(prepared: tuple[Cluster, Path], kube: Kube, operator: OperatorProcess) -> Iterator[OperatorProcess]:
    """The operator of the next release, which serves the webhook; the CRD has its one version again afterwards."""
    cluster, _ = prepared
    values = ["--set", "conversion.enabled=true", "--show-only", "templates/conversion.yaml"]
    made = subprocess.run(
        ["helm", "template", "omni", str(CHART), "-n", running.SYSTEM, *values],
        env=cluster.environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    cluster.kubectl("apply", "-f", "-", stdin=made.stdout)
    port = free_port()
    operator.program = ("-m", "tests.operator.next_version_operator")
    operator.environment |= {
        "OMNI_OPERATOR_CONVERSION_PORT": str(port),
        "OMNI_OPERATOR_CONVERSION_NAME": WEBHOOK,
        "OMNI_OPERATOR_CONVERSION_URL": f"https://127.0.0.1:{port}/convert",
    }
    yield operator
    if operator.process is None:
        operator.start().managing()
    kube("delete", f"omnipipelines.{HUB}.omnipipeline.dev", "--all", "--timeout=50s")
    define(cluster)
    only_stored(cluster, HUB)
    define(cluster, second=False)
    operator.stop()
    cluster.kubectl(
        "patch", "crd", CRD, "--type=merge", "-p", '{"spec":{"conversion":{"strategy":"None","webhook":null}}}'
    )
    cluster.kubectl("delete", "-f", "-", stdin=made.stdout)
    # Reads anew what is served: kubectl would still prefer the version that has gone.
    cluster.kubectl("api-resources", "--api-group=omnipipeline.dev")


def read(kube: Kube, name: str, version: str) -> Any:
    return json.loads(kube("get", f"omnipipelines.{version}.omnipipeline.dev", name, "-o", "json"))


def pods(kube: Kube) -> set[tuple[str, str]]:
    """Each pod and its revision."""
    return {
        (each["metadata"]["uid"], each["metadata"]["labels"]["omnipipeline.dev/revision"])
        for each in kube.all("pods", "omnipipeline.dev/pipeline")
    }


def annotated(kube: Kube, name: str, key: str, text: str) -> None:
    """The operator has carried out an edit of `expose.service.annotations`."""
    eventually(
        lambda: kube.get("service", name)["metadata"].get("annotations", {}).get(key) == text,
        what=f"the Service of {name} has {key}={text}",
    )


def migrate(kube: Kube) -> None:
    """Write each object as it is: the API server stores it in the storage version."""
    for name in ("old", "new"):
        before = read(kube, name, NAME)

        def settled(name: str = name) -> bool:
            earlier = read(kube, name, NAME)["metadata"]["resourceVersion"]
            kube("patch", "omnipipeline", name, "--type=merge", "-p", "{}")
            return bool(read(kube, name, NAME)["metadata"]["resourceVersion"] == earlier)

        eventually(settled, what="another write of the object as it is changes nothing more")
        assert read(kube, name, NAME)["spec"] == before["spec"]


def test_two_versions_convert_both_ways_while_the_operator_reconciles(
    kube: Kube, converting: OperatorProcess, prepared: tuple[Cluster, Path], audit: Audit
) -> None:
    cluster, folder = prepared
    converting.start().managing()
    # One version: applied as ever, with a value that the second one will not have.
    kube.apply(pipeline("old", modelPath="/models/a", restartedAt="once", rollout={"strategy": "Recreate"}))
    kube.wait_ready("old")
    eventually(
        lambda: kube.get("crd", CRD)["spec"]["conversion"].get("webhook", {}).get("clientConfig", {}).get("caBundle"),
        what="the API server knows the webhook",
    )

    # The second version comes. Objects that were stored before are read in it, and its own objects in the first.
    define(cluster)
    there = read(kube, "old", NAME)
    assert (there["spec"]["model"], there["spec"]["rollout"]["strategy"]) == ("/models/a", "Coherent")
    assert not {"modelPath", "restartedAt"} & {*there["spec"]}
    beta = {**pipeline("new", model="/models/b", description="mine"), "apiVersion": SERVED}
    kube.apply(beta)
    kube.wait_ready("new")
    back = read(kube, "new", HUB)
    assert back["spec"]["modelPath"] == "/models/b"
    assert back["spec"]["stages"][0]["tpSize"] == 1
    assert not {"model", "description"} & {*back["spec"]}
    assert there["metadata"]["uid"] == read(kube, "old", HUB)["metadata"]["uid"]
    running_pods = pods(kube)

    # kubectl apply in either version, of the file that made it, changed.
    kube.apply({**beta, "spec": {**beta["spec"], "expose": {"service": {"annotations": {"by": "apply"}}}}})
    annotated(kube, "new", "by", "apply")
    assert read(kube, "new", NAME)["spec"]["description"] == "mine"
    assert (
        "warning"
        not in kube(
            "apply",
            "-f",
            "-",
            stdin=json.dumps(
                pipeline("old", modelPath="/models/a", restartedAt="once", rollout={"strategy": "Recreate"})
            ),
        ).lower()
    )

    # Server-side apply: each of two users owns fields in the version that he uses, and neither loses his.
    for version, name, key in (
        (NAME, "old", "beta"),
        (HUB, "old", "alpha"),
        (HUB, "new", "alpha"),
        (NAME, "new", "beta"),
    ):
        own = {
            "apiVersion": f"omnipipeline.dev/{version}",
            "kind": "OmniPipeline",
            "metadata": {"name": name},
            "spec": {"expose": {"service": {"annotations": {key: version}}}},
        }
        kube("apply", "--server-side", "--field-manager", key, "-f", "-", stdin=json.dumps(own))
        annotated(kube, name, key, version)
    for name in ("old", "new"):
        shown = read(kube, name, NAME)["spec"]["expose"]["service"]["annotations"]
        assert {"beta": NAME, "alpha": HUB}.items() <= shown.items()
    assert read(kube, "old", HUB)["spec"]["rollout"]["strategy"] == "Recreate"
    # An owner that leaves his field out removes it, whoever wrote in another version meanwhile.
    none = {"apiVersion": SERVED, "kind": "OmniPipeline", "metadata": {"name": "old"}, "spec": {}}
    kube("apply", "--server-side", "--field-manager", "beta", "-f", "-", stdin=json.dumps(none))
    shown = read(kube, "old", HUB)["spec"]
    assert (shown["expose"]["service"]["annotations"], shown["restartedAt"]) == ({"alpha": HUB}, "once")

    # kubectl edit, in either version.
    for version, name in ((NAME, "old"), (HUB, "new")):
        editor = folder / "editor.sh"
        editor.write_text(f"#!/bin/sh\nsed -i 's/alpha: {HUB}/alpha: edited/' \"$1\"\n")
        editor.chmod(0o755)
        subprocess.run(
            ["kubectl", "-n", kube.namespace, "edit", f"omnipipelines.{version}.omnipipeline.dev/{name}"],
            env={**cluster.environment, "KUBE_EDITOR": shlex.quote(str(editor))},
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        annotated(kube, name, "alpha", "edited")
    assert read(kube, "old", HUB)["spec"]["restartedAt"] == "once"
    assert read(kube, "new", NAME)["spec"]["description"] == "mine"

    # Stored in the second version: the operator itself reads through its own webhook now.
    whole = {name: {version: read(kube, name, version)["spec"] for version in (HUB, NAME)} for name in ("old", "new")}
    define(cluster, storage=NAME)
    migrate(kube)
    only_stored(cluster, NAME)
    for name, versions in whole.items():
        assert {version: read(kube, name, version)["spec"] for version in versions} == versions
    assert converting.stop() == 0

    # While it is down: what is stored is read and written as ever; only the other version is not.
    assert {name: read(kube, name, NAME)["spec"] for name in whole} == {name: whole[name][NAME] for name in whole}
    kube(
        "patch",
        f"omnipipelines.{NAME}.omnipipeline.dev",
        "old",
        "--type=merge",
        "-p",
        '{"spec":{"description":"down"}}',
    )
    with pytest.raises(AssertionError, match="conversion webhook for omnipipeline"):
        read(kube, "old", HUB)
    assert pods(kube) == running_pods
    audit.mark()
    converting.start().managing()
    assert read(kube, "old", HUB)["spec"] == whole["old"][HUB]
    patch = '{"spec":{"expose":{"service":{"annotations":{"after":"start"}}}}}'
    kube("patch", f"omnipipelines.{HUB}.omnipipeline.dev", "old", "--type=merge", "-p", patch)
    annotated(kube, "old", "after", "start")

    # And back: stored in the first version again, which then is the only one.
    define(cluster, storage=HUB)
    migrate(kube)
    only_stored(cluster, HUB)
    assert read(kube, "new", NAME)["spec"]["description"] == "mine"
    assert read(kube, "old", NAME)["spec"]["description"] == "down"
    define(cluster, second=False)
    assert converting.stop() == 0
    for name in whole:
        assert read(kube, name, HUB)["spec"]["stages"] == whole[name][HUB]["stages"], "without a conversion"
        kube("annotate", f"omnipipelines.{HUB}.omnipipeline.dev", name, "still=writable")
    assert read(kube, "old", HUB)["spec"]["restartedAt"] == "once"
    assert pods(kube) == running_pods
    assert audit.writes() and not [each for each in audit.writes() if each[1] in ("deployments", "pods")]
    assert "Traceback" not in converting.log.read_text()


def test_a_version_that_the_operator_does_not_convert_is_refused_with_a_reason(
    kube: Kube, converting: OperatorProcess, prepared: tuple[Cluster, Path]
) -> None:
    """The released operator beside a CRD of the next release."""
    cluster, _ = prepared
    converting.program = ("-m", "omnipipeline_operator")
    converting.start().managing()
    eventually(lambda: kube.get("crd", CRD)["spec"]["conversion"]["strategy"] == "Webhook", what="the webhook is known")
    kube.apply(pipeline("duo"))
    kube.wait_ready("duo")
    define(cluster)

    def refused() -> bool:
        shown = cluster.kubectl(
            "-n", kube.namespace, "get", f"omnipipelines.{NAME}.omnipipeline.dev", "duo", check=False
        )
        return f"request.objects[0]: version '{NAME}' is not among {HUB} (of {kube.namespace}/duo)" in shown.stderr

    eventually(refused, what="the refusal names the object")
    assert read(kube, "duo", HUB)["metadata"]["name"] == "duo"
    kube("delete", "omnipipeline.v1alpha1.omnipipeline.dev", "duo")
