"""The project's own images and chart in a cluster, for tests of the whole.

Here: building and loading the images, helm, the wait for a pipeline, a namespace of one's own. Not here: what is
tested, the load (`ledger`). Images: ``$OMNI_TEST_OPERATOR_IMAGE`` and ``$OMNI_TEST_STAGE_IMAGE`` where the cluster has
them already, else the Dockerfile is built by the kit.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cluster_kit import REPOSITORY, Cluster, kit

CHART = REPOSITORY / "charts" / "omnipipeline"
SYSTEM = "omni-e2e-system"  # the operator's namespace
RELEASE = "omnipipeline"
BUILD_S = 900.0
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


def build_images() -> Images:
    """Both images, built from the Dockerfile as it is, and loaded."""
    given = os.environ.get("OMNI_TEST_OPERATOR_IMAGE"), os.environ.get("OMNI_TEST_STAGE_IMAGE")
    if given[0] and given[1]:
        return Images(given[0], given[1])
    program = kit()
    assert program is not None, "no kit, and OMNI_TEST_OPERATOR_IMAGE and OMNI_TEST_STAGE_IMAGE are not set"
    return Images(_build(program, "operator"), _build(program, "stage"))


def _build(program: Path, target: str) -> str:
    name = f"localhost/omnipipeline-{target}:e2e"
    command = [program, "build", "-t", name, "-f", "Dockerfile", "--target", target, "."]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, f"{target}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return name


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


def read(cluster: Cluster, *arguments: str) -> Any:
    """``kubectl get … -o json``."""
    return json.loads(cluster.kubectl("get", *arguments, "-o", "json").stdout)


def wait_for(what: str, condition: Callable[[], T | None], *, timeout_s: float) -> T:
    """The first true value that ``condition`` gives."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.5)


def wait_ready(cluster: Cluster, namespace: str, name: str, *, timeout_s: int = 120) -> None:
    """As a person would; on a failure the test says what the pipeline's status says."""
    resource = f"omnipipeline/{name}"
    arguments = ["-n", namespace, "wait", "--for=condition=Ready", resource, f"--timeout={timeout_s}s"]
    done = subprocess.run(
        ["kubectl", *arguments], env=cluster.environment, capture_output=True, text=True, timeout=timeout_s + 10
    )
    if done.returncode:
        said = cluster.kubectl("-n", namespace, "get", resource, "-o", "jsonpath={.status}", check=False).stdout
        pods = cluster.kubectl("-n", namespace, "get", "pods", check=False).stdout
        raise AssertionError(f"{name} is not Ready: {done.stderr}\n{said}\n{pods}")


def url(cluster: Cluster, namespace: str, name: str) -> str:
    """The Service by its address: the test runs on the node, outside of the cluster's DNS."""
    spec = read(cluster, "-n", namespace, f"service/{name}")["spec"]
    return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"
