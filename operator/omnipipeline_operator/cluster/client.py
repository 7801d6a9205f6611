"""Requests to the API server: plain dicts in and out, a timeout on every call, one error tree.

Here: verbs, and finding credentials as kubectl does. Not here: when a write is safe (`applying`), what is kept
(`store`). Called by the modules beside it and by `controller`. The transport is the kubernetes client's ``aio``
variant; its models are not used (83 KiB a pod instead of 34), nor anything in it that blocks.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

import aiohttp
import msgspec

from omnipipeline_operator import errors, kinds
from omnipipeline_operator.cluster import bodies, library
from omnipipeline_operator.kinds import Kind, Manifest

T = TypeVar("T")
Counted = Callable[[str, str, int], None]

TOKEN_FILE: Final = "/var/run/secrets/kubernetes.io/serviceaccount/token"
TIMEOUT_S: Final = 10.0
LIST_TIMEOUT_S: Final = 60.0
STATUS_TIMEOUT_S: Final = 30.0  # the API server evaluates all rules of the spec again: 4 s for the largest one
PAGE: Final = 100  # the text of 500 pods is 5 MiB, and reading them in one go takes as long as ten reconciles
#: The type with the charset, which the API server drops: the kubernetes client would encode a body of the bare type
#: itself, with escapes that no YAML reader takes.
APPLY: Final = "application/apply-patch+yaml; charset=utf-8"
MERGE: Final = "application/merge-patch+json"
JSON: Final = "application/json"


class WriteLimiter(Protocol):
    """Awaited before every write: a token bucket in production, a counter in tests."""

    async def take(self) -> None: ...


class Client:
    """One connection pool to one API server.

    counted: called for every request with method, resource, HTTP status (0: no answer).
    """

    def __init__(self, api: Any, writes: WriteLimiter, counted: Counted) -> None:
        self._api = api
        self._writes = writes
        self._counted = counted

    @classmethod
    async def connect(cls, writes: WriteLimiter, counted: Counted = lambda verb, resource, code: None) -> Client:
        """A client with the pod's service account, or with KUBECONFIG."""
        if "KUBECONFIG" not in os.environ and os.path.exists(TOKEN_FILE):
            library.config.load_incluster_config()
        else:
            await library.config.load_kube_config()
        configuration = library.client.Configuration.get_default_copy()
        # Or aiohttp reads ~/.netrc in a thread before every request; kopf's connections do not read it either.
        configuration.client_session_kwargs = {"trust_env": False}
        return cls(library.client.ApiClient(configuration), writes, counted)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._api.close()

    # --- reading ------------------------------------------------------------------------------------------------

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Manifest:
        """Raises: NotFound, and the others of `errors.ClusterError`."""
        return await self._ask("GET", kind.path(namespace, name))

    async def listed(self, kind: Kind, namespace: str | None, selector: str | None = None) -> AsyncIterator[Manifest]:
        """All objects, read in pages; each gets its kind, which the items of a list lack."""
        query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        path = kind.path(namespace)
        while True:
            text = await self._answer("GET", path, query=query, timeout_s=LIST_TIMEOUT_S)
            page = _decoded(text, _Page, f"GET {path}")
            for item in page.items or ():
                yield {**_decoded(item, Manifest, f"GET {path}"), "kind": kind.name, "apiVersion": kind.api_version}
            if not page.metadata.more:
                return
            query = {**query, "continue": page.metadata.more}

    async def pods_at(self, namespace: str, address: str) -> list[Manifest]:
        """The pods that have this IP address now."""
        query = {"fieldSelector": f"status.podIP={address}"}
        listed: list[Manifest] = (await self._ask("GET", kinds.POD.path(namespace), query=query)).get("items", [])
        return listed

    async def warnings(self, namespace: str, **about: str) -> list[Manifest]:
        """Events of type Warning. ``about``: fields of the objects that they are about."""
        fields = [f"involvedObject.{field}={value}" for field, value in about.items()]
        query = {"fieldSelector": ",".join(["type=Warning", *fields]), "limit": str(PAGE)}
        listed: list[Manifest] = (await self._ask("GET", kinds.CORE_EVENT.path(namespace), query=query)).get(
            "items", []
        )
        return listed

    # --- writing ------------------------------------------------------------------------------------------------

    async def create(self, manifest: Mapping[str, Any], *, manager: str = "", dry_run: bool = False) -> Manifest:
        """POST. Raises: Conflict: the name is taken; Invalid: also for a field that no schema has."""
        kind = kinds.of(manifest)
        query = {"fieldValidation": "Strict"}
        query |= {"fieldManager": manager} if manager else {}
        query |= {"dryRun": "All"} if dry_run else {}
        return await self._write("POST", kind.path(manifest["metadata"]["namespace"]), query=query, body=manifest)

    async def apply(self, manifest: Mapping[str, Any], *, manager: str, subresource: str | None = None) -> Manifest:
        """Server-side apply with force: takes fields over from other managers. `applying` makes it safe."""
        metadata = manifest["metadata"]
        path = kinds.of(manifest).path(metadata["namespace"], metadata["name"], subresource)
        query = {"fieldManager": manager, "force": "true"}
        timeout_s = STATUS_TIMEOUT_S if subresource == "status" else TIMEOUT_S
        body = bodies.encode(manifest)
        return await self._write("PATCH", path, query=query, body=body, content_type=APPLY, timeout_s=timeout_s)

    async def merge(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        patch: Mapping[str, Any],
        *,
        manager: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> Manifest:
        """A JSON merge patch: lists are replaced."""
        query = {"fieldManager": manager} if manager else {}
        path = kind.path(namespace, name)
        return await self._write("PATCH", path, query=query, body=patch, content_type=MERGE, timeout_s=timeout_s)

    async def replace(self, manifest: Mapping[str, Any], *, timeout_s: float) -> Manifest:
        """PUT with the manifest's resourceVersion: of two writers one gets a Conflict."""
        metadata = manifest["metadata"]
        path = kinds.of(manifest).path(metadata["namespace"], metadata["name"])
        return await self._ask("PUT", path, body=manifest, timeout_s=timeout_s)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Delete the object with this uid; one that does not exist is not an error.

        Raises: Conflict: another object has the name now.
        """
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            await self._write("DELETE", kind.path(namespace, name), body=body | {"preconditions": {"uid": uid}})
        except errors.NotFound:
            return

    async def _write(self, method: str, path: str, **more: Any) -> Manifest:
        await self._writes.take()
        return await self._ask(method, path, **more)

    async def _ask(self, method: str, path: str, **more: Any) -> Manifest:
        return _decoded(await self._answer(method, path, **more), Manifest, f"{method} {path}")

    async def _answer(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = {},
        body: Mapping[str, Any] | str | None = None,
        content_type: str = JSON,
        timeout_s: float = TIMEOUT_S,
    ) -> bytes:
        what, status = f"{method} {path}", 0
        headers = {"Accept": JSON, "Content-Type": content_type}
        try:
            async with asyncio.timeout(timeout_s):
                serialized = await self._api.param_serialize(
                    method,
                    path,
                    query_params=list(query.items()),
                    header_params=headers,
                    body=body,
                    auth_settings=["BearerToken"],
                )
                answer = await self._api.call_api(*serialized, _request_timeout=timeout_s)
                text: bytes = await answer.read()
                status = answer.status
        except TimeoutError as error:
            raise errors.Unavailable(what, 0, f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise errors.Unavailable(what, 0, str(error) or type(error).__name__) from error
        finally:
            self._counted(method, kinds.plural_in(path), status)
        if answer.status >= 400:
            raise _refusal(what, answer.status, text, answer.headers.get("Retry-After", ""))
        return text


class _PageHead(msgspec.Struct, frozen=True):
    more: str = msgspec.field(name="continue", default="")  #: Empty: this page is the last one.


class _Page(msgspec.Struct, frozen=True):
    """A page of a list. Its objects are decoded one by one: together they take ten times the memory of their text, and
    memory that lies among objects of the store is not given back.
    """

    metadata: _PageHead = _PageHead()
    items: list[msgspec.Raw] | None = None


def _decoded(text: bytes | msgspec.Raw, form: type[T], what: str) -> T:
    """Raises: errors.Unavailable: the answer has another form."""
    try:
        return msgspec.json.decode(text, type=form)
    except msgspec.MsgspecError as error:
        raise errors.Unavailable(what, 200, f"the answer is not what was asked for: {error}") from error


def _refusal(what: str, status: int, text: bytes, retry_after: str) -> errors.ClusterError:
    """The error of an answer. Its body is a Status, unless a proxy wrote it."""
    try:
        status_object = json.loads(text)
        message, reason = str(status_object.get("message", "")), str(status_object.get("reason", ""))
    except (ValueError, AttributeError):
        message, reason = text[:200].decode(errors="replace").strip(), ""
    wait = float(retry_after) if retry_after.isdecimal() else 0.0
    return errors.of_status(what, status, message, reason=reason, retry_after_s=wait)
