"""OmniPipeline's runtime, and what stage authors import: ``import stage_runtime as omni``."""

import importlib
from typing import Any

from stage_runtime.api import *  # noqa: F403
from stage_runtime.api import __all__ as __all__


def __getattr__(name: str) -> Any:
    """Names that a light import must not bring, made when they are asked for: ``omni.testing``, ``omni.emit``,
    ``omni.span``.
    """
    if name in ("emit", "span"):
        return getattr(importlib.import_module("stage_runtime.profiler"), name)
    if name == "testing":
        return importlib.import_module("stage_runtime.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
