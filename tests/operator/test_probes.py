"""The start-up probe: it waits for a process that loads, fails for one that hangs, and gives way to an author's own."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from omnipipeline_operator.desired.pod_templates import probes, templates


@contextmanager
def serving(unready: int, *, address: str = "127.0.0.1") -> Iterator[tuple[int, list[str]]]:
    """A server that is not ready for so many questions; its port, and what it was asked."""
    asked: list[str] = []
    count = itertools.count()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            ready = self.path == "/livez" or next(count) >= unready
            self.send_response(200 if ready else 503)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer((address, 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def waiting(port: int, *, never_s: float, silent_s: float = 60) -> subprocess.CompletedProcess[str]:
    limits = [str(port), str(never_s), str(silent_s), "0.01"]
    command = [sys.executable, "-I", "-S", "-c", probes.WAITS, *limits]
    environment = {"OMNI_POD_IP": "127.0.0.1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_the_startup_probe_waits_while_a_process_loads() -> None:
    with serving(unready=3) as (port, asked):
        assert waiting(port, never_s=0).returncode == 0, "a process that answers is not given up"
    assert asked == ["/readyz", "/livez"] * 3 + ["/readyz"]


def test_the_startup_probe_fails_for_a_process_that_never_answers() -> None:
    with serving(unready=0) as (port, _):
        pass
    done = waiting(port, never_s=0)
    assert (done.returncode, done.stderr) == (1, "the process does not answer\n")


def test_a_container_is_given_as_long_as_a_model_loads() -> None:
    probe = probes.probes()["startupProbe"]
    assert probe["timeoutSeconds"] >= 24 * 3600 and "httpGet" not in probe


def test_an_authors_own_probe_replaces_the_program_and_keeps_the_rest() -> None:
    merged = templates.merge(probes.probes(), {"startupProbe": {"tcpSocket": {"port": 1}, "timeoutSeconds": 3}})
    assert merged["startupProbe"] == {
        "tcpSocket": {"port": 1},
        "timeoutSeconds": 3,
        "periodSeconds": 1,
        "failureThreshold": 3,
    }
    assert merged["readinessProbe"] == probes.probes()["readinessProbe"]
    again = templates.merge(probes.probes(), {"readinessProbe": {"httpGet": {"path": "/mine"}}})
    assert again["readinessProbe"]["httpGet"] == {"path": "/mine", "port": 8081}
