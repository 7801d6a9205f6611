"""Commands that ask a URL: no proxy sees the request, and an answer of another program is said to be one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from click.testing import CliRunner, Result

from stage_runtime.cli import main

ASKING = [
    ("top", "--once", "--every", "0.1"),
    ("trace", "x"),
    ("trace", "x", "--json"),
    ("profile", "list"),
    ("profile", "report"),
    ("profile", "start"),
    ("profile", "stop"),
    ("call", "stage", "operation"),
]


def omni(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, arguments, env=env)


@contextmanager
def serving(status: int, content: bytes, paths: list[str] | None = None) -> Iterator[str]:
    """A server that gives every request the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if paths is not None:
                paths.append(self.path)
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("location", "http://192.0.2.1/")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def error_line(done: Result) -> str:
    """Its one line."""
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
@pytest.mark.parametrize(
    ("status", "content", "problem"),
    [
        (200, b"<html>hello</html>", "this is not a coordinator of a pipeline"),
        (200, b"\xff\xfe", "this is not a coordinator of a pipeline"),
        (200, b"[" * 100_000, "this is not a coordinator of a pipeline"),
        (200, b"[1]", "this is not a coordinator of a pipeline"),
        (200, b"{}", "this is not a coordinator of a pipeline"),
        (302, b"", "status 302"),
        (404, b"[" * 100_000, "status 404"),
    ],
    ids=["html", "bytes", "deep", "list", "empty map", "redirect", "deep error"],
)
def test_an_answer_of_another_program_is_said_to_be_one(
    command: tuple[str, ...], status: int, content: bytes, problem: str
) -> None:
    if content == b"{}" and "--json" in command:
        return  # it is printed as it is
    with serving(status, content) as url:
        line = error_line(omni(*command, "--url", url))
    assert line.startswith(f"error: {url}")
    assert problem in line


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--url", "http://localhost:80a"), "http://localhost:80a: Invalid port"),
        (("--url", "localhost:8000"), "localhost:8000: "),
        (("--url", "http://[::1"), "http://[::1: "),
        (("--url", "http://a\x01b"), ": Invalid"),
        (("--url", "http://127.0.0.1:1", "--api-key", "clé"), "the API key has characters that are not ASCII"),
        (("--url", "http://127.0.0.1:1", "--api-key", "a\nb"), "http://127.0.0.1:1: "),
    ],
)
def test_a_url_or_a_key_that_cannot_be_is_named(options: tuple[str, ...], problem: str) -> None:
    for command in (("top", "--once"), ("trace", "x"), ("profile", "list")):
        assert problem in error_line(omni(*command, *options))


@pytest.mark.parametrize("name", ["a\nb", "a/../b", "a?b#c", "\udcff", "é"])
def test_a_name_of_a_run_reaches_the_coordinator_as_one_name(name: str) -> None:
    paths: list[str] = []
    with serving(404, b'{"error": {"message": "no such run"}}', paths) as url:
        line = error_line(omni("profile", "report", "--url", url, "--run", name))
    assert line.endswith(": no such run")
    assert [unquote(path).partition("/report?")[0] for path in paths] == [f"/profiles/{name}".replace("\udcff", "?")]


def test_a_benchmark_s_key_that_cannot_be_is_named() -> None:
    line = error_line(omni("bench", "http://127.0.0.1:1", "--api-key", "clé", "--num-prompts", "1"))
    assert "the API key has characters that are not ASCII" in line


@pytest.mark.parametrize("proxy", ["http", "socks5"])
def test_no_proxy_of_the_environment_sees_the_request_or_the_key(proxy: str) -> None:
    seen: list[str] = []
    with serving(200, b'{"runs": []}') as url, serving(502, b"", seen) as other:
        address = other.replace("http:", f"{proxy}:")
        names = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
        done = omni(
            "profile", "list", "--url", url, "--api-key", "k", env={**dict.fromkeys(names, address), "NO_PROXY": ""}
        )
    assert (done.exit_code, done.exception, seen) == (0, None, [])
