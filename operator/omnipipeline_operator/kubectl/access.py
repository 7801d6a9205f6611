"""Runs kubectl with the context and the namespace that the user chose.

Here: reading objects, streaming logs, patching, evicting, forwarding a port. Not here: what is shown or decided.
Called by the commands.
kubectl is run instead of calling the API, so that its credential plugins and its configuration apply.
"""

from __future__ import annotations

import base64
import collections
import json
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from omnipipeline_operator.cluster import bodies
from omnipipeline_operator.kinds import Manifest
from omnipipeline_spec.types.resource import GROUP, PLURAL

TIMEOUT_S: Final = 60
_FORWARDING: Final = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")
RESOURCE: Final = f"{PLURAL}.{GROUP}"


class KubectlError(Exception):
    """kubectl failed; the message is kubectl's."""


class Kubectl(msgspec.Struct, frozen=True, kw_only=True):
    """kubectl with its global flags."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None
    program: str = "kubectl"

    def command(self, *arguments: str) -> list[str]:
        """The whole command line."""
        chosen = {"--namespace": self.namespace, "--context": self.context, "--kubeconfig": self.kubeconfig}
        flags = [f"{flag}={value}" for flag, value in chosen.items() if value]
        return [self.program, *arguments, *flags]

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """The output of kubectl. Raises: KubectlError."""
        try:
            with self._started():
                done = subprocess.run(
                    self.command(*arguments),
                    input=stdin,
                    capture_output=True,
                    text=True,
                    encoding="utf-8",
                    errors="replace",
                    timeout=TIMEOUT_S,
                )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl {arguments[0]}: no answer within {TIMEOUT_S} s") from error
        if done.returncode:
            raise KubectlError(done.stderr.strip() or f"kubectl {arguments[0]}: exit code {done.returncode}")
        return done.stdout

    def show(self, *arguments: str) -> int:
        """Let kubectl write to the terminal; its exit code. Raises: KubectlError: it cannot be started."""
        with self._started():
            return subprocess.run(self.command(*arguments)).returncode

    def pipeline(self, name: str) -> Manifest:
        """The resource. Raises: KubectlError: it does not exist."""
        return self._read("get", RESOURCE, name)

    def listed(self, kind: str, selector: Mapping[str, str]) -> list[Manifest]:
        """Objects by their labels."""
        labels = ",".join(f"{label}={value}" for label, value in selector.items())
        items: list[Manifest] = self._read("get", kind, f"--selector={labels}").get("items", [])
        return items

    def secret_value(self, name: str, key: str) -> str:
        """One value of a Secret, as text. Raises: KubectlError: it is not there, or may not be read."""
        data: Mapping[str, str] = self._read("get", "secret", name).get("data") or {}
        if key not in data:
            raise KubectlError(f"the Secret {name} has no key {key}")
        return base64.b64decode(data[key]).decode(errors="replace")

    @contextmanager
    def forwarded(self, pod: str, port: int) -> Iterator[int]:
        """A port of this machine that leads to the pod's, while the block runs. Raises: KubectlError."""
        command = self.command("port-forward", f"pod/{pod}", f":{port}", "--address=127.0.0.1")
        with self._started():
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
            )
        with process:
            assert process.stdout is not None
            said: list[str] = []
            try:
                for line in process.stdout:
                    found = _FORWARDING.match(line)
                    if found is not None:
                        break
                    said.append(line)
                else:
                    raise KubectlError("".join(said).strip() or "kubectl port-forward has ended")
                # kubectl writes a line for each connection, and would stop where nobody reads them.
                rest = threading.Thread(target=collections.deque, args=(process.stdout, 0), daemon=True)
                rest.start()
                try:
                    yield int(found[1])
                finally:
                    process.kill()
                    rest.join()
            finally:
                process.kill()

    def patch(self, name: str, spec: Mapping[str, Any], *, annotations: Mapping[str, str] | None = None) -> None:
        """Merge ``spec`` and ``annotations`` into the resource's."""
        patch: Manifest = {"spec": dict(spec)}
        if annotations:
            patch["metadata"] = {"annotations": dict(annotations)}
        self._patch(name, "merge", patch)

    def replace_spec(self, name: str, spec: Mapping[str, Any], version: str) -> None:
        """Replace the resource's spec, unless the resource has changed since ``version``."""
        patch = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": version},
            {"op": "replace", "path": "/spec", "value": dict(spec)},
        ]
        self._patch(name, "json", patch)

    def _patch(self, name: str, kind: str, patch: Any) -> None:
        """Patch by a file: a whole spec can be longer than an argument may be. kubectl reads it as YAML."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "patch.yaml"
            file.write_text(bodies.encode(patch), encoding="utf-8")
            self.run("patch", RESOURCE, name, f"--type={kind}", f"--patch-file={file}")

    def evict(self, pod: Manifest) -> None:
        """Evict a pod, as far as its disruption budget allows. Raises: KubectlError: not now."""
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/eviction"
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "deleteOptions": {"preconditions": {"uid": metadata["uid"]}},
        }
        self.run("create", f"--raw={path}", "--filename=-", stdin=json.dumps(body))

    @contextmanager
    def _started(self) -> Iterator[None]:
        """Raises: KubectlError: the program cannot be started."""
        try:
            yield
        except FileNotFoundError as error:
            raise KubectlError(f"{self.program} is not on the PATH") from error
        except OSError as error:
            raise KubectlError(f"{self.program} cannot be started: {error.strerror or error}") from error

    def _read(self, *arguments: str) -> Manifest:
        found: Manifest = json.loads(self.run(*arguments, "--output=json"))
        return found


def first_line(error: KubectlError) -> str:
    """kubectl's reason without its hints."""
    lines: Sequence[str] = str(error).splitlines()
    return lines[0] if lines else str(error)
