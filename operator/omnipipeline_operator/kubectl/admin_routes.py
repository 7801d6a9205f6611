"""The admin routes of a pipeline's coordinator, over a port-forward.

Here: which coordinator, its key, asking. Not here: kubectl (`access`), what is asked (`profiles`, the commands).
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from omnipipeline_operator.desired import naming
from omnipipeline_operator.kinds import Manifest
from omnipipeline_operator.kubectl.access import Kubectl, KubectlError
from omnipipeline_spec.types.pods import ADMIN_PORT, COORDINATOR

TIMEOUT_S: Final = 600.0  # a report of a long run takes minutes


class AdminRoutes:
    """The admin routes of one coordinator."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self.api_key = api_key
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Raises: KubectlError: as `get`, and when the answer is not a JSON object."""
        text = self._ask(path, json.dumps(body).encode(), timeout_s)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise KubectlError(f"the coordinator answers {text[:40]!r}: is it of another version?")
        return answer

    def get(self, path: str) -> bytes:
        return self._ask(path, None, TIMEOUT_S)

    def _ask(self, path: str, body: bytes | None, timeout_s: float) -> bytes:
        """Raises: KubectlError: the coordinator refuses, or the connection to it broke."""
        request = urllib.request.Request(f"{self.url}{path}", data=body, headers=self._headers)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request, timeout=timeout_s
            ) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            with error:
                reason = _reason(error)
            raise KubectlError(f"the coordinator refuses: {reason}") from None
        except (OSError, http.client.HTTPException) as error:
            raise KubectlError(f"the connection to the coordinator broke: {str(error).strip()}") from error


@contextmanager
def forwarded(kubectl: Kubectl, name: str, key: str | None, *, pod: str | None, any_one: bool) -> Iterator[AdminRoutes]:
    """Those of a pipeline's coordinator. any_one: of several, whichever is ready; else one must be named.

    Raises: KubectlError.
    """
    pipeline = kubectl.pipeline(name)
    pods = kubectl.listed("pods", naming.selector(name, COORDINATOR))
    chosen = ready_coordinators(name, pods)[0] if any_one else coordinator(name, pods, pod)
    key = key or api_key(kubectl, pipeline)
    with kubectl.forwarded(chosen, ADMIN_PORT) as port:
        yield AdminRoutes(f"http://127.0.0.1:{port}", key)


def ready_coordinators(name: str, pods: Sequence[Manifest]) -> list[str]:
    """The names of those that are ready: at least one. Raises: KubectlError: none is."""
    ready: list[str] = sorted(pod["metadata"]["name"] for pod in pods if _is_ready(pod))
    if not ready:
        state = f"{len(pods)} not ready" if pods else "no pod"
        raise KubectlError(f"{name} has no ready coordinator ({state}): kubectl omni status {name}")
    return ready


def coordinator(name: str, pods: Sequence[Manifest], wanted: str | None) -> str:
    """The one coordinator pod, or the one of several that is wanted: each sees its own requests only.

    Raises: KubectlError: none is ready, several are and none was named, or the named one is not ready.
    """
    ready = ready_coordinators(name, pods)
    if wanted is not None:
        if wanted not in ready:
            raise KubectlError(f"{name} has no ready coordinator {wanted}; ready: {', '.join(ready)}")
        return wanted
    if len(ready) > 1:
        raise KubectlError(f"{name} has several coordinators: name one with --pod: {', '.join(ready)}")
    return ready[0]


def api_key(kubectl: Kubectl, pipeline: Manifest) -> str | None:
    """The first key of the Secret that the pipeline names. Raises: KubectlError: it cannot be read."""
    http = pipeline.get("spec", {}).get("coordinator", {}).get("http", {})
    reference = http.get("apiKeySecretRef")
    if not reference:
        return None
    keys = kubectl.secret_value(reference["name"], reference["key"]).split()
    if not keys:
        raise KubectlError(f"the Secret {reference['name']} holds no key")
    return keys[0]


def _is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    alive = "deletionTimestamp" not in pod["metadata"]
    return alive and any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError, OSError, http.client.HTTPException):
        return "it has no such route (an older version?)" if error.code == 404 else f"status {error.code}"
