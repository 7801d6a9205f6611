"""Facts about a pipeline's pods that all programs share: the coordinator's name and the ports.

Here: these facts alone, once. Not here: names of children (the operator's `desired.naming`), which ports an author may
not choose (`validation.deployment`). Called by the contract, the operator and the runtime.
"""

from __future__ import annotations

from typing import Final

#: Name of the coordinator's unit, container and process, of its role (`python -m stage_runtime ROLE`), and the target
#: of a terminal stage's edge. No author's process may have it.
COORDINATOR: Final = "coordinator"
#: The file beside the list of revisions that a coordinator takes over as it runs.
PROFILING_FILE: Final = "profiling.json"
#: The file beside it of the groups that requests wait for, however long they have had no instance: those that start
#: when a request needs one, and those whose old instances end before new ones start.
ON_DEMAND_FILE: Final = "on-demand.json"
#: The file beside it of the share of the requests a revision that is tried gets (`plan.CanaryShare`, or null).
CANARY_FILE: Final = "canary.json"
HTTP_PORT: Final = 8000  # by default; the spec may set another
ADMIN_PORT: Final = 8001  # on the loopback only
PROBE_PORT: Final = 8081  # probes, metrics, status
PUBLISH_PORT: Final = 5549
CONTROL_PORT: Final = 5550  # plus the index of the group in its pod
