"""Helm, and the combinations of values that are tested. Used by the chart's tests."""

from __future__ import annotations

import subprocess
from typing import Any

import yaml

from tests.cluster_kit import REPOSITORY, Cluster

CHART = REPOSITORY / "charts" / "omnipipeline"
NAMESPACE = "omni-chart"
MONITORED = [f"monitoring.{kind}.enabled=true" for kind in ("podMonitor", "prometheusRule", "dashboard")]
SCRAPER = "scrapers[0].namespaceSelector.matchLabels.name=monitoring"

#: Values that change which objects there are.
COMBINATIONS: dict[str, list[str]] = {
    "as it is": [],
    "namespaced": ["watchNamespaces={team-a,team-b}", "rbac.aggregate=false"],
    "highly available": ["replicas=2", "podDisruptionBudget.enabled=true", "priorityClassName=system-cluster-critical"],
    "monitored": [*MONITORED, SCRAPER],
    "monitored and namespaced": [*MONITORED, SCRAPER, "watchNamespaces={team-a,team-b}"],
    "converting and namespaced": ["conversion.enabled=true", "watchNamespaces={team-a,team-b}"],
    "own rights": ["rbac.create=false", "serviceAccount.create=false", "serviceAccount.name=given"],
    "without the definition": ["crds.install=false"],
    "open": ["networkPolicy.enabled=false", "allowPrivileged=true", "logFormat=text"],
    "users by admission": ["podSecurityContext=null", "pipelinePodSecurityContext=null"],
    "models on nodes": ["nodeModels.path=/var/lib/omnipipeline/models", "nodeModels.bound=200Gi"],
    "gangs": ["podGroupScheduler=scheduler-plugins-scheduler"],
    "without defaults": [
        *(f"pod{each}=null" for each in ("Annotations", "Labels", "GroupScheduler")),
        *(f"{each}=null" for each in ("scrapers", "watchNamespaces", "imagePullSecrets", "resources", "replicas")),
        *(f"{each}=null" for each in ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints")),
        *(f"{each}=null" for each in ("priorityClassName", "nameOverride", "fullnameOverride", "logFormat")),
        *(f"{each}=null" for each in ("gpuPatienceSeconds", "gpuPrioritySeconds", "defaultResources.stage")),
    ],
    "by digest": [f"image.digest=sha256:{'0' * 64}", f"stageImage.digest=sha256:{'1' * 64}"],
    "placed": ["nodeSelector.pool=system", "tolerations[0].operator=Exists", "imagePullSecrets[0].name=registry"],
}

_RENDERED: dict[tuple[str, ...], str] = {}


def helm(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], env=cluster.environment, capture_output=True, text=True, timeout=60)


def rendered(cluster: Cluster, values: list[str], *more: str) -> str:
    """The manifests, hooks included. Rendered once: several tests look at the same combinations."""
    key = (*sets(values), *more)
    if key not in _RENDERED:
        done = helm(cluster, "template", "release", str(CHART), "-n", NAMESPACE, *key)
        assert done.returncode == 0, done.stderr
        _RENDERED[key] = done.stdout
    return _RENDERED[key]


def objects(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]  # ten times as fast as in Python


def sets(values: list[str]) -> list[str]:
    return [argument for value in values for argument in ("--set", value)]
