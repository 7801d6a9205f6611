"""PID 1 of a stage pod: real processes over TCP with CURVE, probes, the termination message, orphans."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from omnipipeline_spec import crashes, planning
from omnipipeline_spec.cluster import ProcessGroup, Startup
from omnipipeline_spec.pipeline import Code, PipelineConfig, StageConfig
from omnipipeline_spec.types import metrics
from stage_runtime.metrics import catalog
from stage_runtime.processes.containers import pod_probes
from stage_runtime.processes.containers.pod_probes import ProbeServer, Reply
from stage_runtime.sockets.endpoints import hosts
from stage_runtime.web.listening.certificates import CertificatePair
from tests.patience import patience
from tests.ports import free_port
from tests.thoroughness import rows
from tests.web.certificate_authority import Authority, write

PATIENCE_S = patience(200.0)  # a stage that imports torch takes a minute where 30 programs share two cores
pytestmark = pytest.mark.timeout(3 * PATIENCE_S)
ECHO = """
    import subprocess
    def create():
        return lambda payload: {"echo": payload.data}
    def orphan():
        subprocess.run(["sh", "-c", "sleep 600 & echo $! > $ORPHAN_FILE"], check=True)
        return create()
    def broken():
        raise OSError("no weights at /models")
    def private():
        class RepositoryNotFoundError(Exception): pass
        hint = "If this is a private repository, make sure to pass a token\\n" * 200
        raise RepositoryNotFoundError(f"401 Client Error\\n\\nRepository Not Found\\n{hint}")
    def chained():
        raise RuntimeError("no model") from OSError("no space left")
    def segfault():
        import ctypes
        ctypes.string_at(0)
    def thrown():
        import os, sys
        print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr)
        print("  what():  out of device memory", file=sys.stderr, flush=True)
        os.abort()
    def leaves():
        import os
        print("cannot find the licence", flush=True)
        os._exit(7)
    def unspeakable():
        class Unspeakable(Exception):
            def __str__(self): raise ValueError("not even this")
        raise Unspeakable
    def hangs():
        import threading
        threading.Event().wait()
"""


class Ports:
    def __init__(self) -> None:
        self.control, self.publish, self.http, self.stage, self.probe = (free_port() for _ in range(5))


@contextmanager
def process(role: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OMNI_")}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "stage_runtime", role],
        env={**clean, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def stage_pod(tmp_path: Path, ports: Ports, factory: str, **group: Any) -> Iterator[subprocess.Popen[str]]:
    spec = PipelineConfig(
        name="pods",
        stages=[StageConfig(name="echo", process="echo", factory=f"pod_stages:{factory}", terminal=True)],
        process_groups=[ProcessGroup(name="echo", **group)],
        code=Code(inline={"pod_stages.py": textwrap.dedent(ECHO)}),
    )
    plan = planning.plan(spec)
    (tmp_path / "coordinator.json").write_bytes(msgspec.json.encode(plan.coordinator))
    (tmp_path / "unit.json").write_bytes(msgspec.json.encode(plan.units[0]))
    (tmp_path / "revisions.json").write_bytes(msgspec.json.encode([plan.current]))
    (tmp_path / "key").write_bytes(bytes(range(32)))
    env = {
        "OMNI_PLAN": str(tmp_path / "unit.json"),
        "OMNI_COORDINATOR": f"tcp://127.0.0.1:{ports.control}",
        "OMNI_CONTROL_KEY_FILE": str(tmp_path / "key"),
        "OMNI_POD_IP": "127.0.0.1",
        "OMNI_CONTROL_PORT": str(ports.stage),
        "OMNI_PROBE_HOST": "127.0.0.1",
        "OMNI_PROBE_PORT": str(ports.probe),
        "OMNI_TERMINATION_LOG": str(tmp_path / "termination-log"),
        "ORPHAN_FILE": str(tmp_path / "orphan"),
    }
    with process("supervisor", env) as child:
        yield child


@contextmanager
def coordinator(tmp_path: Path, ports: Ports, **more: str) -> Iterator[subprocess.Popen[str]]:
    env = {
        "OMNI_PLAN": str(tmp_path / "coordinator.json"),
        "OMNI_REVISIONS": str(tmp_path / "revisions.json"),
        "OMNI_LISTEN": f"tcp://127.0.0.1:{ports.control}",
        "OMNI_PUBLISH": f"tcp://127.0.0.1:{ports.publish}",
        "OMNI_HTTP_PORT": str(ports.http),
        "OMNI_CONTROL_KEY_FILE": str(tmp_path / "key"),
    }
    with process("coordinator", env | more) as child:
        yield child


def probe(ports: Ports, path: str) -> httpx.Response | None:
    try:
        return httpx.get(f"http://127.0.0.1:{ports.probe}{path}", timeout=PATIENCE_S)
    except httpx.TransportError:
        return None


def eventually(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.05)


def answers(ports: Ports, path: str, status: int) -> bool:
    reply = probe(ports, path)
    return reply is not None and reply.status_code == status


def test_a_pod_is_alive_at_once_ready_when_registered_and_drains_on_sigterm(tmp_path: Path) -> None:
    ports = Ports()
    with stage_pod(tmp_path, ports, "create") as running:
        eventually(lambda: answers(ports, "/livez", 200))
        reply = probe(ports, "/readyz")  # no coordinator yet
        assert reply is not None
        assert reply.status_code == 503
        assert reply.text.startswith("echo: ")
        with coordinator(tmp_path, ports):
            eventually(lambda: answers(ports, "/readyz", 200))
            # The pod knows that it is ready a moment before the coordinator does.
            url = f"http://127.0.0.1:{ports.http}"
            eventually(lambda: httpx.get(f"{url}/readyz", timeout=PATIENCE_S).status_code == 200)
            answer = httpx.post(f"{url}/v1/pipeline", json={"inputs": "hi"}, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            assert answer.json()["results"] == {"echo": {"echo": "hi"}}
            (view,) = json.loads(probe_text(ports, "/status"))["processes"]
            assert (view["process"], view["state"]) == ("echo", "ready")
            assert 'omnipipeline_process_ready{process="echo"} 1.0' in probe_text(ports, "/metrics")
            silent = {*catalog.PLANES} - {*catalog.EDGES} | {catalog.EDGE_INSTANCES}  # nothing has gone by relay
            listed = metrics.series([*silent, *catalog.PROCESSES])
            eventually(lambda: served(ports) == listed)  # the planes' numbers come with a heartbeat
            running.send_signal(signal.SIGTERM)
            assert running.wait(PATIENCE_S) == 0
        assert not psutil.pid_exists(view["pid"])


def served(ports: Ports) -> dict[str, frozenset[str]]:
    families = text_string_to_metric_families(probe_text(ports, "/metrics"))
    return {sample.name: frozenset(sample.labels) for family in families for sample in family.samples}


def probe_text(ports: Ports, path: str) -> str:
    reply = probe(ports, path)
    assert reply is not None
    return reply.text


def test_a_stage_that_cannot_start_ends_the_pod_with_its_traceback_as_termination_message(tmp_path: Path) -> None:
    with stage_pod(tmp_path, Ports(), "broken") as running:
        assert running.wait(PATIENCE_S) == 1
    message = (tmp_path / "termination-log").read_text()
    assert message.startswith("echo: OSError: no weights at /models\n---\nTraceback")
    assert 'raise OSError("no weights at /models")' in message


def nobody_reads(running: subprocess.Popen[str]) -> None:
    assert running.stdout is not None
    running.stdout.close()


def test_a_pod_whose_output_nobody_reads_serves_and_drains(tmp_path: Path) -> None:
    ports = Ports()
    with stage_pod(tmp_path, ports, "create") as running:
        nobody_reads(running)
        with coordinator(tmp_path, ports):
            eventually(lambda: answers(ports, "/readyz", 200))
            running.send_signal(signal.SIGTERM)
            assert running.wait(PATIENCE_S) == 0


def test_a_pod_whose_output_nobody_reads_leaves_its_termination_message(tmp_path: Path) -> None:
    with stage_pod(tmp_path, Ports(), "broken") as running:
        nobody_reads(running)
        assert running.wait(PATIENCE_S) == 1
    assert "OSError: no weights at /models" in (tmp_path / "termination-log").read_text()


def test_a_killed_process_is_started_again_in_the_same_pod(tmp_path: Path) -> None:
    ports = Ports()
    with stage_pod(tmp_path, ports, "create") as running, coordinator(tmp_path, ports):
        eventually(lambda: answers(ports, "/readyz", 200))
        (stage,) = psutil.Process(running.pid).children()
        stage.kill()
        eventually(lambda: 'restarts_total{process="echo"} 1.0' in probe_text(ports, "/metrics"))
        eventually(lambda: answers(ports, "/readyz", 200))
        assert running.poll() is None


def test_orphans_of_a_stage_are_reaped(tmp_path: Path) -> None:
    ports = Ports()
    with stage_pod(tmp_path, ports, "orphan") as running:
        eventually(lambda: (tmp_path / "orphan").exists() and (tmp_path / "orphan").read_text())
        orphan = int((tmp_path / "orphan").read_text())
        eventually(lambda: psutil.Process(orphan).ppid() == running.pid)  # adopted
        os.kill(orphan, signal.SIGTERM)
        eventually(lambda: not psutil.pid_exists(orphan))  # a zombie would still be there


@pytest.mark.proves("failed-start")
@pytest.mark.parametrize(
    ("factory", "cause"),
    [
        ("private", "echo: RepositoryNotFoundError: 401 Client Error"),
        ("chained", "echo: RuntimeError: no model (because of OSError: no space left)"),
        (
            "segfault",
            "echo: ended before its time (killed by SIGSEGV): Fatal Python error: Segmentation fault in string_at",
        ),
        ("thrown", "echo: ended before its time (killed by SIGABRT): std::bad_alloc: out of device memory"),
        ("leaves", "echo: ended before its time (exit code 7): cannot find the licence"),
        ("unspeakable", "echo: Unspeakable: (its message cannot be shown)"),
    ],
)
def test_the_cause_of_a_failed_start_is_the_first_line_of_the_termination_message(
    tmp_path: Path, factory: str, cause: str
) -> None:
    with stage_pod(tmp_path, Ports(), factory) as running:
        assert running.wait(PATIENCE_S) == 1
    message = (tmp_path / "termination-log").read_bytes()
    assert message.decode().startswith(cause)
    assert len(message) <= crashes.MAX_BYTES
    assert crashes.cause(message.decode()).startswith(cause)


def test_a_start_that_hangs_says_so_by_its_exit_code_and_message(tmp_path: Path) -> None:
    with stage_pod(tmp_path, Ports(), "hangs", startup=Startup(deadline_seconds=5)) as running:
        assert running.wait(PATIENCE_S) == crashes.EXIT_HUNG
    message = (tmp_path / "termination-log").read_text()
    said = re.match(r"echo: no progress for (\d+) s while starting", message)
    assert said is not None and int(said[1]) >= 5, message  # it is looked at once in a while: more on a busy machine
    assert "in hangs" in message, "where it hung"


@pytest.mark.parametrize(("role", "cause"), [("coordinator", "OMNI_PLAN is not set"), ("supervisor", "OMNI_PLAN")])
def test_a_program_with_a_nonsensical_environment_reports_that_to_the_kubelet(
    tmp_path: Path, role: str, cause: str
) -> None:
    log = tmp_path / "termination-log"
    with process(role, {"OMNI_TERMINATION_LOG": str(log)}) as running:
        assert running.wait(PATIENCE_S) == 1
    assert log.read_text().startswith(f"cannot start: {cause}")


def test_a_coordinator_whose_port_is_taken_says_so_to_the_kubelet(tmp_path: Path) -> None:
    ports, log = Ports(), tmp_path / "termination-log"
    with socket.create_server(("127.0.0.1", ports.http)), stage_pod(tmp_path, ports, "create"):
        with coordinator(tmp_path, ports, OMNI_TERMINATION_LOG=str(log)) as running:
            assert running.wait(PATIENCE_S) == 1
    assert str(ports.http) in log.read_text().splitlines()[0], log.read_text()


@pytest.mark.proves("address-taken")
@pytest.mark.parametrize("port", rows(["control", "publish"], each_run=1))
def test_a_coordinator_whose_control_port_is_taken_ends_with_a_line_that_names_it(tmp_path: Path, port: str) -> None:
    ports, log = Ports(), tmp_path / "termination-log"
    with socket.create_server(("127.0.0.1", getattr(ports, port))), stage_pod(tmp_path, ports, "create"):
        with coordinator(tmp_path, ports, OMNI_TERMINATION_LOG=str(log)) as running:
            assert running.wait(PATIENCE_S) == 1
            assert running.stdout is not None
            cause = f"cannot start: cannot listen at tcp://127.0.0.1:{getattr(ports, port)}: Address already in use"
            assert cause in running.stdout.read().splitlines()
    assert log.read_text().splitlines()[0] == cause


@pytest.mark.parametrize("wrong", rows(["another key", "no PEM", "no key"], each_run=1))
def test_a_coordinator_with_a_wrong_certificate_names_its_files_and_what_is_wrong(tmp_path: Path, wrong: str) -> None:
    authority, ports, log = Authority(), Ports(), tmp_path / "termination-log"
    pair = authority.issue("one")
    given, said = {
        "another key": (CertificatePair(pair.chain, authority.issue("other").key), "key values mismatch"),
        "no PEM": (CertificatePair(b"garbage", pair.key), "the certificate is not PEM"),
        "no key": (CertificatePair(pair.chain, b""), "the private key is empty"),
    }[wrong]
    chain, key = write(given, tmp_path / "tls")
    files = {"OMNI_TLS_CERT_FILE": str(chain), "OMNI_TLS_KEY_FILE": str(key), "OMNI_TERMINATION_LOG": str(log)}
    with stage_pod(tmp_path, ports, "create"), coordinator(tmp_path, ports, **files) as running:
        assert running.wait(PATIENCE_S) == 1
    told = f"OMNI_TLS_CERT_FILE {chain}, OMNI_TLS_KEY_FILE {key}: not a certificate and its private key, as PEM: {said}"
    assert log.read_text().splitlines()[0] == f"cannot start: {told}"


@pytest.mark.proves("address-taken")
def test_a_stage_whose_control_port_is_taken_ends_its_pod_with_a_line_that_names_it(tmp_path: Path) -> None:
    ports = Ports()
    with socket.create_server(("0.0.0.0", ports.stage)), stage_pod(tmp_path, ports, "create") as running:
        assert running.wait(PATIENCE_S) == 1
    anywhere = hosts.written_out(f"tcp://*:{ports.stage}")
    cause = f"echo: cannot listen at {anywhere}: Address already in use"
    assert (tmp_path / "termination-log").read_text().splitlines()[0] == cause


@pytest.mark.proves("address-taken")
def test_a_pod_whose_probe_port_is_taken_ends_with_a_line_that_names_it(tmp_path: Path) -> None:
    ports = Ports()
    with socket.create_server(("127.0.0.1", ports.probe)), stage_pod(tmp_path, ports, "create") as running:
        assert running.wait(PATIENCE_S) == 1
    cause = (tmp_path / "termination-log").read_text().splitlines()[0]
    assert cause.startswith(f"cannot start: cannot listen on 127.0.0.1:{ports.probe}: ") and "already in use" in cause


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (b"HEAD /livez?verbose=1 HTTP/1.0\r\n\r\n", 200),
        (b"GET /secret HTTP/1.1\r\n\r\n", 404),
        (b"POST /livez HTTP/1.1\r\n\r\n", 405),
        (b"\x16\x03\x01 nonsense\r\n\r\n", 400),
    ],
)
async def test_probes_answer_only_what_they_should(request_head: bytes, status: int) -> None:
    async with ProbeServer({"/livez": lambda: Reply(body="alive\n")}, host="127.0.0.1", port=0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_head)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.endswith(b"alive\n") == request_head.startswith(b"GET /livez")


async def test_connections_beyond_the_limit_are_closed_at_once_and_a_place_is_given_back() -> None:
    async with ProbeServer({"/livez": lambda: Reply(body="alive\n")}, host="127.0.0.1", port=0) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(pod_probes.MAX_CONNECTIONS)]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with contextlib.suppress(ConnectionError):  # how a closed connection looks depends on the moment
            assert await reader.read() == b""
        writer.close()
        head = b"GET /livez HTTP/1.1\r\n\r\n"
        silent[0][1].write(head)
        assert (await silent[0][0].read()).startswith(b"HTTP/1.1 200 ")
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200 "):
            reader, again = await asyncio.open_connection("127.0.0.1", server.port)
            with contextlib.suppress(ConnectionError):
                again.write(head)
                answer = await reader.read()
            again.close()
        for _, one in silent:
            one.close()
