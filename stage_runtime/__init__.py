"""OmniPipeline's runtime, and what stage authors import: ``import stage_runtime as omni``."""

from stage_runtime.api import *  # noqa: F403
from stage_runtime.api import __all__ as __all__
