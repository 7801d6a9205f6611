"""Takes a profile of a pipeline in a cluster, over a port-forward to the admin port of its coordinator.

Here: which coordinator, its key, and the order of its routes. Not here: kubectl (`access`), recording and reports: the
coordinator's. Called by the commands.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from omnipipeline_operator.kinds import Manifest
from omnipipeline_operator.kubectl.access import Kubectl, KubectlError

TIMEOUT_S: Final = 600.0  # a report of a long run takes minutes
#: File in the folder of --out -> where it comes from, below the run's route.
FILES: Final = {
    "report.html": "/report?format=html",
    "report.json": "/report?format=json",
    "perfetto.json": "/report?format=perfetto",
    "files.tar": "",
}


class AdminRoutes:
    """The admin routes of one coordinator."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._ask(path, json.dumps(body).encode()))
        return answer

    def get(self, path: str) -> bytes:
        return self._ask(path, None)

    def _ask(self, path: str, body: bytes | None) -> bytes:
        """Raises: KubectlError: the coordinator refuses, or the connection to it broke."""
        request = urllib.request.Request(f"{self._url}{path}", data=body, headers=self._headers)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request, timeout=TIMEOUT_S
            ) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            with error:
                reason = _reason(error)
            raise KubectlError(f"the coordinator refuses: {reason}") from None
        except OSError as error:
            raise KubectlError(f"the connection to the coordinator broke: {error}") from error


def coordinator(name: str, pods: Sequence[Manifest], wanted: str | None) -> str:
    """The coordinator pod that records. Each of several sees its own requests only.

    Raises: KubectlError: none is ready, several are and none was named, or the named one is not ready.
    """
    ready: list[str] = sorted(pod["metadata"]["name"] for pod in pods if _is_ready(pod))
    if wanted is not None:
        if wanted not in ready:
            raise KubectlError(f"{name} has no ready coordinator {wanted}; ready: {', '.join(ready) or 'none'}")
        return wanted
    if not ready:
        state = f"{len(pods)} not ready" if pods else "no pod"
        raise KubectlError(f"{name} has no ready coordinator ({state}): kubectl omni status {name}")
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


def record(
    admin: AdminRoutes,
    *,
    seconds: float,
    torch: bool,
    report: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Record for a while. Returns the run's id. ^C ends the run early; what was recorded until then is shown."""
    started = admin.post("/start_profile", {"enable_torch": torch})
    run = str(started["run_id"])
    try:
        for line in _problems(started):
            report(line)
        report(f"recording {run} for {seconds:g} s")
        sleep(seconds)
    except KeyboardInterrupt:
        report("stopped early")
    finally:
        stopped = admin.post("/stop_profile", {"run_id": run})
    for line in _problems(stopped):
        report(line)
    return run


def save(admin: AdminRoutes, run: str, folder: Path) -> Iterator[Path]:
    """Write each of `FILES` into the folder. Raises: KubectlError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in FILES.items():
            (folder / name).write_bytes(admin.get(f"/profiles/{run}{path}"))
            yield folder / name
    except OSError as error:
        raise KubectlError(f"{folder}: {error.strerror or error}") from error


def _problems(answer: dict[str, Any]) -> Iterator[str]:
    """The stages that do not do as they were asked."""
    for each in answer["stages"]:
        if each["error"] is not None:
            yield f"{each['stage']} ({each['instance']}): {each['state']}: {each['error']}"


def _is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    alive = "deletionTimestamp" not in pod["metadata"]
    return alive and any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _reason(error: urllib.error.HTTPError) -> str:
    if error.code == 404:
        return "it has no profiler (an older version?)"
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {error.code}"
