"""The project's own images and chart in a cluster, for tests of the whole.

Here: helm, the plugin, reading objects and conditions, the wait for a pipeline. Not here: what is tested, the load
(`load`), how images are built (`cluster_images`). Images: ``$OMNI_TEST_OPERATOR_IMAGE`` and
``$OMNI_TEST_STAGE_IMAGE`` where the cluster has them already, else the Dockerfile is built by the kit.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx

from tests import cluster_images, cluster_objects
from tests.cluster_kit import REPOSITORY, Cluster

CHART = REPOSITORY / "charts" / "omnipipeline"
SYSTEM = "omni-e2e-system"  # the operator's namespace
RELEASE = "omnipipeline"
PIPELINE = "omnipipeline.dev/pipeline"
T = TypeVar("T")


@dataclass(frozen=True)
class Images:
    """Names that the cluster's nodes know."""

    operator: str
    stage: str


@dataclass(frozen=True)
class Installed:
    """A release that runs, and the namespace for the tests' pipelines."""

    cluster: Cluster
    namespace: str
    images: Images
    before: frozenset[str]  #: Objects outside of namespaces before helm install.

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl in the pipelines' namespace."""
        return self.cluster.kubectl("-n", self.namespace, *arguments, stdin=stdin).stdout

    def apply(self, pipeline: dict[str, Any]) -> None:
        self.kubectl("apply", "--validate=strict", "-f", "-", stdin=json.dumps(pipeline))

    def patch(self, name: str, spec: Mapping[str, object]) -> None:
        self.kubectl("patch", "omnipipeline", name, "--type=merge", f"--patch={json.dumps({'spec': spec})}")

    def status(self, name: str) -> dict[str, Any]:
        found = cluster_objects.of(self.cluster.kubeconfig).get("omnipipeline", name, self.namespace)
        assert found is not None, f"omnipipeline {name} does not exist"
        status: dict[str, Any] = found.get("status", {})
        return status

    def all(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """All objects of a kind in the pipelines' namespace."""
        return cluster_objects.of(self.cluster.kubeconfig).list(kind, self.namespace, selector)

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """Empty while it has none."""
        return next((each for each in self.status(name).get("conditions", ()) if each["type"] == kind), {})

    def pods(self, name: str, unit: str | None = None) -> list[dict[str, Any]]:
        selector = f"{PIPELINE}={name}" + (f",omnipipeline.dev/unit={unit}" if unit else "")
        return self.all("pods", selector)

    def uids(self, name: str) -> set[str]:
        """The uids of a pipeline's pods."""
        return {str(pod["metadata"]["uid"]) for pod in self.pods(name)}

    def plugin(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """``kubectl omni``."""
        command = [sys.executable, "-m", "omnipipeline_operator.kubectl.cli", "-n", self.namespace, *arguments]
        return subprocess.run(
            command,
            env=self.cluster.environment,
            input=stdin,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=300,
        )


@dataclass(frozen=True)
class Volume:
    """A volume that is a folder of the machine on which the tests run."""

    storage_class: str
    folder: Path


def node_address(installed: Installed) -> str:
    """The address of the node that runs pods, at which pods reach what listens there."""
    [node] = [each for each in installed.all("nodes") if "fake" not in each["metadata"]["labels"]]
    [address] = [each["address"] for each in node["status"]["addresses"] if each["type"] == "InternalIP"]
    return str(address)


def pipeline(name: str, stages: list[dict[str, object]], *, code: str, **spec: object) -> dict[str, Any]:
    """A chat pipeline whose factories are in the module ``made``, one coordinator unless told."""
    spec["coordinator"] = {"replicas": 1, **cast(dict[str, object], spec.get("coordinator", {}))}
    return {
        "apiVersion": "omnipipeline.dev/v1alpha1",
        "kind": "OmniPipeline",
        "metadata": {"name": name},
        "spec": {"serves": ["chat"], "code": {"inline": {"made.py": code}}, "stages": stages, **spec},
    }


def objects(cluster: Cluster, namespace: str | None = None) -> frozenset[str]:
    """Everything of every kind that can be listed in a namespace, or outside of all; Events aside."""
    where = [f"--namespace={namespace}"] if namespace else []
    scope = f"--namespaced={str(namespace is not None).lower()}"
    kinds = cluster.kubectl("api-resources", "--verbs=list", scope, "-o", "name").stdout.split()
    desired = [kind for kind in kinds if not kind.startswith(("events", "componentstatuses"))]
    return frozenset(cluster.kubectl(*where, "get", ",".join(desired), "-o", "name", check=False).stdout.split())


def ask(url: str, text: str = "hello") -> str:
    """One unstreamed answer."""
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def build_images() -> Images:
    """Both images, built from the Dockerfile as it is, and loaded."""
    given = cluster_images.given()
    return Images(*given) if given else Images(cluster_images.operator(), cluster_images.stage())


def image_values(images: Images) -> list[str]:
    """``--set`` arguments that make the chart use them."""
    chosen = {"image": images.operator, "stageImage": images.stage}
    return [
        argument
        for key, image in chosen.items()
        for part, value in zip(("repository", "tag"), image.rsplit(":", 1), strict=True)
        for argument in ("--set-string", f"{key}.{part}={value}")
    ]


def helm(cluster: Cluster, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run helm; with ``check`` a failure shows what it said."""
    done = subprocess.run(
        ["helm", *arguments], env=cluster.environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=600
    )
    assert not check or done.returncode == 0, f"helm {' '.join(arguments)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def wait_for(what: str | Callable[[], str], condition: Callable[[], T | None], *, timeout_s: float) -> T:
    """The first true value that ``condition`` gives. what: the error's text, or what makes it when it is needed."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.5)


def wait_ready(cluster: Cluster, namespace: str, name: str, *, timeout_s: int = 120) -> None:
    """Wait as a person would; on a failure the test says what the pipeline's status says."""
    resource = f"omnipipeline/{name}"
    arguments = ["-n", namespace, "wait", "--for=condition=Ready", resource, f"--timeout={timeout_s}s"]
    done = subprocess.run(
        ["kubectl", *arguments], env=cluster.environment, capture_output=True, text=True, timeout=timeout_s + 10
    )
    if done.returncode:
        status = cluster.kubectl("-n", namespace, "get", resource, "-o", "jsonpath={.status}", check=False).stdout
        pods = cluster.kubectl("-n", namespace, "get", "pods", check=False).stdout
        raise AssertionError(f"{name} is not Ready: {done.stderr}\n{status}\n{pods}")


def url(cluster: Cluster, namespace: str, name: str) -> str:
    """The Service of a pipeline that is ready, by its address: the test runs on the node, outside of the cluster's DNS.

    It takes connections: kube-proxy routes to a pod a moment after that is ready, and refuses them until then.
    """
    service = cluster_objects.of(cluster.kubeconfig).get("service", name, namespace)
    assert service is not None, f"service {name} does not exist"
    spec = service["spec"]
    address, port = spec["clusterIP"], spec["ports"][0]["port"]

    def connected() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5):
            return True
        return False

    wait_for(f"kube-proxy routes {address}:{port} to {name}", connected, timeout_s=30)
    return f"http://{address}:{port}"
