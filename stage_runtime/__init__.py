"""OmniPipeline's runtime, and what stage authors import: ``import stage_runtime as omni``."""

import importlib
from typing import Any

from stage_runtime.api import *  # noqa: F403
from stage_runtime.api import __all__ as __all__


def __getattr__(name: str) -> Any:
    """``omni.testing``, when it is asked for: it brings numpy, which a light import must not."""
    if name == "testing":
        return importlib.import_module("stage_runtime.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
