"""The kinds of objects that the operator reads and writes, and their URL paths.

Here: one table. Not here: requests (`client`). Called by every room of the operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omnipipeline_spec.types.resource import GROUP, KIND, PLURAL, VERSION

Manifest = dict[str, Any]  # an object as the API server reads and writes it


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of object."""

    name: str
    group: str  #: Empty for the core group.
    version: str
    plural: str
    alias: str = ""  #: Its key, where another kind has its name.

    @property
    def key(self) -> str:
        """Its name in the operator's tables."""
        return self.alias or self.name

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL path of an object, or of its collection."""
        root = f"/apis/{self.group}" if self.group else "/api"
        parts = [f"{root}/{self.version}", *(["namespaces", namespace] if namespace else []), self.plural]
        return "/".join([*parts, *(each for each in (name, subresource) if each)])


PIPELINE: Final = Kind(name=KIND, group=GROUP, version=VERSION, plural=PLURAL)
DEPLOYMENT: Final = Kind(name="Deployment", group="apps", version="v1", plural="deployments")
CONTROLLER_REVISION: Final = Kind(name="ControllerRevision", group="apps", version="v1", plural="controllerrevisions")
POD: Final = Kind(name="Pod", group="", version="v1", plural="pods")
CONFIG_MAP: Final = Kind(name="ConfigMap", group="", version="v1", plural="configmaps")
SECRET: Final = Kind(name="Secret", group="", version="v1", plural="secrets")
SERVICE: Final = Kind(name="Service", group="", version="v1", plural="services")
CLAIM: Final = Kind(name="PersistentVolumeClaim", group="", version="v1", plural="persistentvolumeclaims")
EVENT: Final = Kind(name="Event", group="events.k8s.io", version="v1", plural="events")
CORE_EVENT: Final = Kind(
    name="Event", group="", version="v1", plural="events"
)  # can be selected by the object it is about
BUDGET: Final = Kind(name="PodDisruptionBudget", group="policy", version="v1", plural="poddisruptionbudgets")
POLICY: Final = Kind(name="NetworkPolicy", group="networking.k8s.io", version="v1", plural="networkpolicies")
INGRESS: Final = Kind(name="Ingress", group="networking.k8s.io", version="v1", plural="ingresses")
ROUTE: Final = Kind(name="HTTPRoute", group="gateway.networking.k8s.io", version="v1", plural="httproutes")
DEVICES: Final = Kind(
    name="ResourceClaimTemplate", group="resource.k8s.io", version="v1", plural="resourceclaimtemplates"
)
#: That of scheduler-plugins (Coscheduling).
POD_GROUP: Final = Kind(name="PodGroup", group="scheduling.x-k8s.io", version="v1alpha1", plural="podgroups")
#: Kubernetes' own (GangScheduling).
OWN_POD_GROUP: Final = Kind(
    name="PodGroup",
    group="scheduling.k8s.io",
    version="v1alpha2",
    plural="podgroups",
    alias="PodGroup.scheduling.k8s.io",
)
JOB: Final = Kind(name="Job", group="batch", version="v1", plural="jobs")
#: It belongs to no namespace.
DEFINITION: Final = Kind(
    name="CustomResourceDefinition", group="apiextensions.k8s.io", version="v1", plural="customresourcedefinitions"
)
CRD: Final = f"{PIPELINE.plural}.{PIPELINE.group}"  #: The name of the DEFINITION of PIPELINE.
LEASE: Final = Kind(name="Lease", group="coordination.k8s.io", version="v1", plural="leases")

#: Children that are watched by label. Secrets are not: the operator may create them and may not read them.
WATCHED: Final = (
    *(DEPLOYMENT, POD, CONFIG_MAP, SERVICE, CLAIM, BUDGET, POLICY, INGRESS, JOB, ROUTE, DEVICES),
    *(POD_GROUP, OWN_POD_GROUP),
)
#: A cluster may lack these of them; they are watched while it has them.
OPTIONAL: Final = (ROUTE, DEVICES, POD_GROUP, OWN_POD_GROUP)
#: Children that are kept as the plan has them, and deleted when it no longer has them.
APPLIED: Final = (SERVICE, INGRESS, ROUTE, POLICY, BUDGET, POD_GROUP, OWN_POD_GROUP)

_BY_KEY: Final = {each.key: each for each in (PIPELINE, SECRET, EVENT, LEASE, CONTROLLER_REVISION, *WATCHED)}
_ALIASES: Final = {(each.api_version, each.name): each.alias for each in _BY_KEY.values() if each.alias}


def plural_in(path: str) -> str:
    """The resource in a path of `Kind.path`."""
    _, root, *parts = path.split("/")
    parts = parts[1:] if root == "api" else parts[2:]
    return parts[2] if parts[0] == "namespaces" and len(parts) > 2 else parts[0]


def key_of(manifest: Mapping[str, Any]) -> str:
    """The key of an object's kind."""
    name: str = manifest["kind"]
    return _ALIASES.get((manifest.get("apiVersion", ""), name), name)


def of(manifest: Mapping[str, Any]) -> Kind:
    """The kind of an object."""
    return _BY_KEY[key_of(manifest)]
