"""The configuration for kustomize in docs/install.md has each field of a pipeline that names another object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from tests.docs.blocks import ROOT, blocks

KINDS = {
    "configMapRef": "ConfigMap",
    "configMapKeyRef": "ConfigMap",
    "secretRef": "Secret",
    "secretKeyRef": "Secret",
    "apiKeySecretRef": "Secret",
    "imagePullSecrets": "Secret",
    "secretName": "Secret",
    "tlsSecretName": "Secret",
    "claimName": "PersistentVolumeClaim",
    "serviceAccountName": "ServiceAccount",
}
#: Fields that end as names do, and name no object of the pipeline's namespace that kustomize makes.
OTHERS = {"fieldRef", "resourceFieldRef", "className", "storageClassName", "priorityClassName", "runtimeClassName"}
OTHERS |= {"deviceClassName", "gpuResourceName", "resourceName", "containerName", "schedulerName", "sectionName"}


def named(schema: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """(kind, path) of each field that names an object."""
    if schema.get("type") == "array":
        schema = schema["items"]
    for name, field in schema.get("properties", {}).items():
        here = f"{path}/{name}"
        if name in KINDS:
            is_text = field["type"] == "string"
            yield KINDS[name], here if is_text else f"{here}/name"
        elif name.endswith(("Ref", "Name")):
            assert name in OTHERS, f"{here}: does it name an object? Then docs/install.md must have it"
        yield from named(field, here)


def test_the_configuration_for_kustomize_has_each_field_that_names_an_object() -> None:
    [shown] = [yaml.safe_load(block) for block in blocks("docs/install.md", "yaml") if "nameReference" in block]
    definition = yaml.safe_load((ROOT / "crds" / "omnipipelines.yaml").read_text())
    [version] = definition["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    fields = {(one["kind"], each["path"]) for one in shown["nameReference"] for each in one["fieldSpecs"]}
    assert fields == set(named(spec, "spec"))
    assert shown["images"] == [{"kind": "OmniPipeline", "path": "spec/image"}]
