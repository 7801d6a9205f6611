"""The PodGroup of Kubernetes' scheduler-plugins as far as these tests need it, written from its public schema.

Here: its CRD with the fields that we write. Not here: a scheduler that reads it: the kit's own ignores the label.
"""

from __future__ import annotations

from typing import Any, Final

GROUP: Final = "scheduling.x-k8s.io"
NAME: Final = f"podgroups.{GROUP}"

_NUMBER: Final[dict[str, Any]] = {"type": "integer", "format": "int32", "minimum": 1}
_SPEC: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "minMember": _NUMBER,
        "minResources": {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}},
        "scheduleTimeoutSeconds": _NUMBER,
    },
}
CRD: Final[dict[str, Any]] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": NAME,
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins/pull/50"},
    },
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"kind": "PodGroup", "listKind": "PodGroupList", "plural": "podgroups", "singular": "podgroup"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": _SPEC}}},
            }
        ],
    },
}
