"""A torch profiler trace of one process, written as a Chrome trace.

Called by `session` on its own thread: starting and exporting take long, and torch wants both on one thread. All
threads of the process are recorded, for the whole time between start and stop.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stage_runtime.errors import ConfigurationError
from stage_runtime.profiler.paths import TRACE_SUFFIX

#: Switch -> what it records. All are off by default: with them a trace is many times larger.
SWITCHES: Final = {
    "record_shapes": "input shapes of each operation",
    "profile_memory": "each allocation",
    "with_stack": "the Python stack of each operation",
    "with_flops": "an estimate of each operation's FLOPs",
}
#: Our own variables, and those that the profiler's users know from SGLang.
_PREFIXES: Final = ("OMNI_TORCH_PROFILER_", "SGLANG_TORCH_PROFILER_")


def switches(options: Mapping[str, bool], environ: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """The switches of a run: as requested, else as in the environment (``OMNI_TORCH_PROFILER_WITH_STACK=1``)."""
    return {
        name: options.get(name, any(environ.get(prefix + name.upper()) == "1" for prefix in _PREFIXES))
        for name in SWITCHES
    }


class TorchTrace:
    """One trace: `start`, then `stop`, on the same thread."""

    def __init__(self, path: Path, chosen: Mapping[str, bool]) -> None:
        self.path = path
        self._chosen = dict(chosen)
        self._profile: Any = None

    def start(self) -> None:
        """Raises: ConfigurationError: torch is not there, or cannot record now."""
        try:
            import torch
            from torch.profiler import ProfilerActivity, profile
        except ImportError as error:
            raise ConfigurationError(f"no torch trace: {error}") from error
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            options: dict[str, Any] = {**self._chosen, "experimental_config": _all_threads()}
            self._profile = profile(activities=activities, **options)
            self._profile.start()
        except Exception as error:
            self._profile = None
            raise ConfigurationError(f"no torch trace: {type(error).__name__}: {error}") from error

    def stop(self) -> None:
        """Stop and write the file, under a name that is free once it is whole. Raises: ConfigurationError."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        partial = self.path.with_name(f".{secrets.token_hex(8)}.partial.gz")
        try:
            profile.stop()
            profile.export_chrome_trace(str(partial))
            self.path = _taken(self.path)
            partial.replace(self.path)
        except Exception as error:
            raise ConfigurationError(f"{self.path}: {type(error).__name__}: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def _taken(path: Path) -> Path:
    """Make an empty file of this name or, where there is one, of the next number. Raises: OSError."""
    found, number = path, 1
    while True:
        try:
            found.touch(exist_ok=False)
            return found
        except FileExistsError:  # of an earlier run, or of a process for which the template gives the same name
            number += 1
            found = path.with_name(f"{path.name.removesuffix(TRACE_SUFFIX)}_{number}{TRACE_SUFFIX}")


def _all_threads() -> Any:
    """Record every thread; a torch that cannot (before 2.8) records those that work under its own thread."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None
