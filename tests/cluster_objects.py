"""Reads objects of a cluster as ``kubectl get -o json`` prints them, without a process for each look.

Here: GET of one object and of lists. Not here: writing, and what kubectl itself is tested for (`cluster_kit.Cluster`).
Tests look five times a second while they wait; a kubectl takes a fifth of a second of a processor to start.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode

from kubernetes import config

READ_S = 60.0
Object: TypeAlias = dict[str, Any]


class Objects:
    """The objects of one cluster."""

    def __init__(self, kubeconfig: Path) -> None:
        self._api: Any = config.new_client_from_config(str(kubeconfig))
        self._paths: dict[
            str, tuple[str, bool, str, str]
        ] = {}  #: Entries by name of a kind: path, namespaced, version, kind.

    def get(self, kind: str, name: str, namespace: str = "") -> Object | None:
        """One object; None where it does not exist."""
        path, _, _ = self._path(kind, namespace)
        found = self._read(f"{path}/{quote(name)}")
        return None if found is None else _as_printed(found)

    def list(self, kinds: str, namespace: str = "", selector: str = "") -> list[Object]:
        """All objects of these kinds, which commas divide, with these labels."""
        found = []
        for kind in kinds.split(","):
            path, version, named = self._path(kind, namespace)
            query = f"?{urlencode({'labelSelector': selector})}" if selector else ""
            for each in self._read(path + query)["items"]:
                found.append(_as_printed({"apiVersion": version, "kind": named, **each}))
        return found

    def _read(self, path: str) -> Any:
        """None where nothing is. Raises: AssertionError: another answer than 200 and 404."""
        request = self._api.param_serialize("GET", path, auth_settings=["BearerToken"])
        answer = self._api.call_api(*request, _request_timeout=READ_S)
        text = answer.read()
        if answer.status == 404:
            return None
        assert answer.status == 200, f"GET {path}: {answer.status} {text[:1000]!r}"
        return json.loads(text)

    def _path(self, kind: str, namespace: str) -> tuple[str, str, str]:
        if kind not in self._paths:
            self._discover()  # again: definitions of kinds come and go
        base, namespaced, version, named = self._paths[kind]
        group, _, plural = base.rpartition("/")
        return (f"{group}/namespaces/{namespace}/{plural}" if namespaced else base), version, named

    def _discover(self) -> None:
        """Each kind by its plural, singular and short names; the core group's before the others'."""
        groups = [group["preferredVersion"]["groupVersion"] for group in self._read("/apis")["groups"]]
        for path, version in [*((f"/apis/{each}", each) for each in reversed(groups)), ("/api/v1", "v1")]:
            for each in self._read(path)["resources"]:
                if "/" in each["name"] or "list" not in each["verbs"]:
                    continue
                for name in (each["name"], each["singularName"], *each.get("shortNames", ())):
                    self._paths[name] = (f"{path}/{each['name']}", each["namespaced"], version, each["kind"])


def _as_printed(found: Object) -> Object:
    """The object without the fields that kubectl does not print, either."""
    found["metadata"].pop("managedFields", None)
    return found


@functools.cache
def of(kubeconfig: Path) -> Objects:
    """One connection to each cluster, for the whole session."""
    return Objects(kubeconfig)
