"""Two "pods" on this machine, with namespaces (network, PID, IPC, mount) of their own and one link. Needs root."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final, Literal

from benchmarks.faultlab import namespaces

Pod = Literal["near", "far"]
ADDRESSES: Final[dict[Pod, str]] = {"near": "10.213.78.1", "far": "10.213.78.2"}  # seen by nobody else

RUNNING_S: Final = 10.0
PREFIX: Final = "op"


class Pods:
    """Both pods. Close them, or their networks stay."""

    def __init__(self) -> None:
        namespaces.delete_left(PREFIX)
        self._name = namespaces.new_name(PREFIX)
        for pod in ADDRESSES:
            namespaces.ip("netns", "add", self._space(pod))
        near, far = self._space("near"), self._space("far")
        namespaces.ip("-n", near, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", far)
        for pod, address in ADDRESSES.items():
            for words in (("addr", "add", f"{address}/24", "dev", "eth0"), *(("link", "set", one, "up") for one in UP)):
                namespaces.ip("-n", self._space(pod), *words)
        # The kernel calls an interface running some time after both ends are up; until then UCX takes it for none.
        deadline = time.monotonic() + RUNNING_S
        while not all(self._runs(pod) for pod in ADDRESSES):
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError(f"a link between namespaces does not run within {RUNNING_S:g} s")
            time.sleep(0.02)

    def command(self, pod: Pod, argv: list[str]) -> list[str]:
        """The command, to be run in that pod. It ends when the process that it starts is killed."""
        inside = ("unshare", "--pid", "--fork", "--kill-child", "--ipc", "--mount", "--mount-proc")
        return ["nsenter", f"--net=/run/netns/{self._space(pod)}", *inside, *argv]

    def cut(self) -> None:
        """Take the link down, without notice to anybody."""
        namespaces.ip("-n", self._space("far"), "link", "set", "eth0", "down")

    def mend(self) -> None:
        namespaces.ip("-n", self._space("far"), "link", "set", "eth0", "up")

    def slow(self, nbytes_per_s: int) -> None:
        """No more bytes a second go over the link, in either direction."""
        for pod in ADDRESSES:
            namespaces.limit(self._space(pod), "eth0", nbytes_per_s)

    def close(self) -> None:
        for pod in ADDRESSES:
            namespaces.ip("netns", "del", self._space(pod))

    def _runs(self, pod: Pod) -> bool:
        [link] = json.loads(namespaces.ip("-n", self._space(pod), "-j", "link", "show", "eth0"))
        return bool(link["operstate"] == "UP")

    def _space(self, pod: Pod) -> str:
        return f"{self._name}-{pod}"


UP: Final = ("eth0", "lo")


def child(pid: int) -> int | None:
    """The process that `Pods.command` has started, as this namespace numbers it; None: it has not started yet."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found[0]) if found else None
