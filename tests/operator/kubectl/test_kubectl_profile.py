"""``kubectl omni profile``: which coordinator, its key, and a run on a real pipeline behind a stand-in of kubectl."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import signal
import socket
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from omnipipeline_operator.kubectl import admin_routes, profiles
from omnipipeline_operator.kubectl.access import Kubectl, KubectlError
from omnipipeline_operator.kubectl.cli import main
from tests.cli.test_up import base, up
from tests.patience import patience

__all__ = ["base"]


def pod(name: str, *, ready: bool = True, **metadata: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"metadata": {"name": name, **metadata}, "status": {"conditions": conditions}}


#: Answers as kubectl does, of a file with the cluster's objects, and "forwards" to the port that the file names.
KUBECTL = """
import json, sys, time
cluster = json.load(open({cluster!r}))
match sys.argv[1:]:
    case ["get", "pods", *_]:
        print(json.dumps({{"items": cluster["pods"]}}))
    case ["get", "secret", name, *_]:
        print(json.dumps(cluster["secrets"][name]))
    case ["get", _, name, *_]:
        print(json.dumps(cluster["pipelines"][name]))
    case ["port-forward", pod, ":8001", *_] if "port" in cluster:
        print(f"Forwarding from 127.0.0.1:{{cluster['port']}} -> 8001", flush=True)
        time.sleep(600)
    case _:
        sys.exit("error: unable to forward port because pod is not running")
"""


class FakeCluster:
    """Objects, and a kubectl that shows them. Its folder goes on the PATH."""

    def __init__(self, folder: Path, **objects: Any) -> None:
        (folder / "cluster.json").write_text(json.dumps(objects))
        program = folder / "kubectl"
        program.write_text(f"#!{sys.executable}\n" + KUBECTL.format(cluster=str(folder / "cluster.json")))
        program.chmod(0o755)
        self._folder = folder

    def omni(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, arguments, env={"PATH": f"{self._folder}:/usr/bin:/bin"})


@pytest.mark.parametrize(
    ("pods", "wanted", "problem"),
    [
        ([], None, "p has no ready coordinator (no pod): kubectl omni status p"),
        ([pod("a", ready=False)], None, "p has no ready coordinator (1 not ready): kubectl omni status p"),
        ([pod("a", deletionTimestamp="now")], None, "p has no ready coordinator (1 not ready): kubectl omni status p"),
        ([pod("b"), pod("a")], None, "p has several coordinators: name one with --pod: a, b"),
        ([pod("a")], "z", "p has no ready coordinator z; ready: a"),
        ([], "z", "p has no ready coordinator (no pod): kubectl omni status p"),
    ],
)
def test_without_one_coordinator_nothing_is_recorded(
    pods: list[dict[str, Any]], wanted: str | None, problem: str
) -> None:
    with pytest.raises(KubectlError, match=f"^{re.escape(problem)}$"):
        admin_routes.coordinator("p", pods, wanted)


def test_the_one_that_is_ready_or_named_records() -> None:
    assert admin_routes.coordinator("p", [pod("a", ready=False), pod("b")], None) == "b"
    assert admin_routes.coordinator("p", [pod("a"), pod("b")], "b") == "b"


def test_the_key_is_the_first_of_the_secret_that_the_pipeline_names(tmp_path: Path) -> None:
    keys = base64.b64encode(b"old\nnew\n").decode()
    FakeCluster(tmp_path, secrets={"s": {"data": {"keys": keys, "none": ""}}})
    kubectl = Kubectl(program=str(tmp_path / "kubectl"))

    def pipeline(key: str) -> dict[str, Any]:
        return {"spec": {"coordinator": {"http": {"apiKeySecretRef": {"name": "s", "key": key}}}}}

    assert admin_routes.api_key(kubectl, {"spec": {}}) is None
    assert admin_routes.api_key(kubectl, pipeline("keys")) == "old"
    for key, problem in (("other", "has no key other"), ("none", "holds no key")):
        with pytest.raises(KubectlError, match=f"the Secret s {problem}"):
            admin_routes.api_key(kubectl, pipeline(key))


def test_a_running_pipeline_is_profiled_and_its_files_are_fetched(base: Path, tmp_path: Path) -> None:
    with up(base, environ={"PATH": "/usr/bin:/bin", "OMNI_PROFILE_ROOT": str(base / "profiles")}) as program:
        url = program.wait_for(r"http://127\.0\.0\.1:\d+")[0]
        program.wait_for("curl")
        cluster = FakeCluster(
            tmp_path, pods=[pod("c")], pipelines={"hello": {"spec": {}}}, port=int(url.rpartition(":")[2])
        )
        body = {"model": "hello", "messages": [{"role": "user", "content": "hello big world"}]}
        over = threading.Event()

        def load() -> None:
            while not over.is_set():
                httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

        client = threading.Thread(target=load)
        client.start()
        try:
            done = cluster.omni("profile", "hello", "--seconds", "0.5", "--out", str(tmp_path / "out"))
        finally:
            over.set()
            client.join()
        program.program.send_signal(signal.SIGINT)
        program.program.wait(30)
    assert done.exit_code == 0, done.output
    assert re.search(r"│ split +│ shout +│ payload +│", done.stdout)
    assert re.search(r"^recording run-[-0-9]+ for 0.5 s$", done.stderr, re.M)
    found = tmp_path / "out"
    assert sorted(each.name for each in found.iterdir()) == sorted(profiles.FILES)
    assert json.loads((found / "report.json").read_text())["request_count"] > 0
    assert json.loads((found / "perfetto.json").read_text())["traceEvents"]
    with tarfile.open(found / "files.tar") as files:
        assert len(files.getnames()) == 3


class _Refuses(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        switched_off = self.headers.get("authorization") == "Bearer off"
        message = "profiling is switched off: profiling.enabled is false"
        content = json.dumps({"error": {"message": message}}).encode() if switched_off else b"?"
        self.send_response(400 if switched_off else 404)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("off", "the coordinator refuses: profiling is switched off: profiling.enabled is false"),
        ("old", "the coordinator refuses: it has no such route (an older version?)"),
    ],
)
def test_what_the_coordinator_refuses_is_said_in_one_line(tmp_path: Path, key: str, problem: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cluster = FakeCluster(tmp_path, pods=[pod("c")], pipelines={"p": {}}, port=server.server_port)
        done = cluster.omni("profile", "p", "--api-key", key)
        server.shutdown()
    assert (done.exit_code, done.stderr) == (1, f"error: {problem}\n")


def test_a_port_forward_that_fails_is_said_in_kubectls_words(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, pods=[pod("c")], pipelines={"p": {}})
    done = cluster.omni("profile", "p")
    assert (done.exit_code, done.stderr) == (1, "error: error: unable to forward port because pod is not running\n")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{", "the connection to the coordinator broke: IncompleteRead"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 90\r\n\r\n{", "the coordinator refuses: status 500"),
        (b"SSH-2.0-x\r\n", "the connection to the coordinator broke: SSH-2.0-x"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "the coordinator answers b'<html>': is it of another version?"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", "the coordinator answers b'[]': is it of another version?"),
        (
            b'HTTP/1.1 200 OK\r\n\r\n{"results": [{}]}',
            "the coordinator's answer has no results: is it of another version?",
        ),
    ],
)
def test_a_broken_answer_is_said_in_one_line(tmp_path: Path, answer: bytes, problem: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answers() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):  # closed with bytes unread, it would reset the connection
                    pass

        thread = threading.Thread(target=answers)
        thread.start()
        cluster = FakeCluster(tmp_path, pods=[pod("c")], pipelines={"p": {}}, port=listening.getsockname()[1])
        done = cluster.omni("call", "p", "stage", "flush")
        thread.join()
    assert done.exit_code == 1 and done.stderr.startswith(f"error: {problem}"), done.stderr
    assert done.stderr.count("\n") == 1


#: Forwards, and says so, more often than a pipe holds; then tells the other end of a FIFO.
TALKATIVE = """\
#!{python}
import sys, time
print("Warning: something", file=sys.stderr, flush=True)
print("Forwarding from 127.0.0.1:4711 -> 8001", flush=True)
for stream in (sys.stdout, sys.stderr):
    print("Handling connection for 4711\\n" * 10_000, file=stream, flush=True)
with open({fifo!r}, "w") as told:
    told.write("done")
time.sleep(600)
"""


def test_a_port_forward_goes_on_however_many_connections_it_reports(tmp_path: Path) -> None:
    fifo, program = tmp_path / "fifo", tmp_path / "kubectl"
    os.mkfifo(fifo)
    program.write_text(TALKATIVE.format(python=sys.executable, fifo=str(fifo)))
    program.chmod(0o755)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with Kubectl(program=str(program)).forwarded("pod", 8001) as port:
            told, _, _ = select.select([reading], [], [], patience(10))
    finally:
        os.close(reading)
    assert (port, told) == (4711, [reading])
