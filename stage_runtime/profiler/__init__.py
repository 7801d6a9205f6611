"""The request-level profiler: what authors import.

    from stage_runtime.profiler import emit, span

Both do nothing while no profile is recorded.
"""

from stage_runtime.profiler.recording.recorder import emit, reset_active_stage, set_active_stage, span
from stage_runtime.profiler.views import build_report

__all__ = ["build_report", "emit", "reset_active_stage", "set_active_stage", "span"]
