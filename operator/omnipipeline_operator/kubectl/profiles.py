"""Takes a profile of a pipeline in a cluster, by the admin routes of its coordinator.

Here: the order of its routes. Not here: how they are reached (`admin_routes`), recording and reports: the
coordinator's. Called by the commands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from omnipipeline_operator.kubectl.access import KubectlError
from omnipipeline_operator.kubectl.admin_routes import AdminRoutes

#: File in the folder of --out -> where it comes from, below the run's route.
FILES: Final = {
    "report.html": "/report?format=html",
    "report.json": "/report?format=json",
    "perfetto.json": "/report?format=perfetto",
    "files.tar": "",
}


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
