"""Makes the plan of a valid spec: what every process and every pod gets. Pure; the same bytes for the same spec.

Not here: the types of the plan (`types.plan`).
"""

from omnipipeline_spec.planning.planner import plan, without_gpus

__all__ = ["plan", "without_gpus"]
