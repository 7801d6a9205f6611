"""Probes of our containers: what the kubelet asks, and when.

Here: all three of a container. Not here: the answers (the runtime's probe server). Called by `pods`.

A probe that fails is a warning event, and loading takes minutes. So the start-up probe does not fail while a process
loads: a small program in the container waits until the process is ready, and fails only when it hangs. The readiness
probe begins after it. An HTTP probe cannot wait like this: until Python has imported the server, nobody listens.
"""

from __future__ import annotations

from typing import Any, Final

from omnipipeline_spec.types.pods import PROBE_PORT

NEVER_ANSWERED_S: Final = 120  # until then the process must have answered once…
SILENT_S: Final = 60  # …and then it may be silent for so long, as for the liveness probe
WAITING_S: Final = 86_400  # longer than any model loads
#: Imports little, so that it runs in any image that has Python; asks the pod's own address, of either family.
WAITS: Final = """\
import os, socket, sys, time
address = os.environ["OMNI_POD_IP"], int(sys.argv[1])
never_s, silent_s, every_s = map(float, sys.argv[2:])
def status(path):
    try:
        with socket.create_connection(address, timeout=5) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\\r\\nHost: probe\\r\\n\\r\\n".encode())
            return int((connection.makefile("rb").readline().split() or [b"0", b"0"])[1])
    except (OSError, ValueError, IndexError):
        return 0
until = time.monotonic() + never_s
while True:
    if status("/readyz") == 200:
        sys.exit()
    if status("/livez") == 200:
        until = time.monotonic() + silent_s
    if time.monotonic() > until:
        sys.exit("the process does not answer")
    time.sleep(every_s)
"""


def probes() -> dict[str, Any]:
    """The three probes, as fields of a container."""
    limits = [str(PROBE_PORT), str(NEVER_ANSWERED_S), str(SILENT_S), "0.3"]
    return {
        "startupProbe": {
            "exec": {"command": ["python3", "-I", "-S", "-c", WAITS, *limits]},
            "periodSeconds": 1,
            "timeoutSeconds": WAITING_S,
            "failureThreshold": 3,
        },
        "livenessProbe": _http("/livez", period_s=10, failures=6),
        "readinessProbe": _http("/readyz", period_s=2, failures=3),
    }


def _http(path: str, *, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": PROBE_PORT},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
