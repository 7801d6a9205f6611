"""Why a container ends, where the kubelet reads it: the termination message of a program that is PID 1.

Here: writing the file, and doing so for whatever ends a role. Not here: the message's form (the contract's `crashes`).
Called by `__main__` (supervisor and coordinator) and `pod`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from omnipipeline_spec import crashes
from stage_runtime.errors import ConfigurationError


def write(path: Path | None, cause: str, details: str = "") -> None:
    """Write the message; None: nothing is written. A file that cannot be written is logged, and is not an error."""
    if path is None:
        return
    try:
        path.write_bytes(crashes.message(cause, details))
    except OSError as error:
        print(f"{path}: {error.strerror}", file=sys.stderr, flush=True)


def explained(role: Callable[[], int], path: Path | None) -> int:
    """Run ``role``; what it raises is left as the termination message, and raised on."""
    try:
        return role()
    except ConfigurationError as error:
        write(path, f"cannot start: {error}")
        raise
    except Exception as error:
        write(path, crashes.raised(error), traceback.format_exc())
        raise
