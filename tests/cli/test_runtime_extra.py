"""Every command of `omni` with what README installs, and no more: the extra ``runtime``."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from stage_runtime import cli
from tests.cli import runtime_only
from tests.cli.test_up import HELLO, PATIENCE_S, base, up
from tests.thoroughness import rows

__all__ = ["base"]

#: command -> its arguments, of each call; those of the second table ask the pipeline that runs.
Calls = dict[str, list[tuple[str, ...]]]
ALONE: Calls = {
    "init": [("{folder}/made",)],
    "validate": [("-f", "{hello}"), ("-f", "{hello}", "--imports")],
    "plan": [("-f", "{hello}", "-o", form) for form in rows(("table", "json", "svg", "mermaid"), each_run=2)],
    "convert": [("{hello}",)],
}
ASKING: Calls = {
    "trace": [("mine",), ("mine", "--json")],
    "top": [("--once", "--every", "0.1")],
    "profile": [
        ("run", "--seconds", "0.1", "--format", form, "--out", "{folder}/out")
        for form in rows(("table", "tar", "html", "perfetto"), each_run=2)
    ]
    + [("list",), ("report",)],
    "logs": [("--tail", "3", "coordinator")],
    "bench": [("--num-prompts", "2", "--random-input-len", "3", "--random-output-len", "9")],
    "scale": [("voice", "1")],
    "restart": [("voice",)],
}
#: These are refused here, by one line: no stage of the example has an operation, and no pod and no bucket exists.
REFUSED = {"call": ("shout", "reset"), "stage": (), "coordinator": (), "prefetch": ("s3:///",)}
BY_SOCKET = {"scale", "restart", "logs"}  #: They ask an `omni up` by its socket or folder, which needs no package.
#: Each call is a process, which imports what its command needs and has `PATIENCE_S`; so has the pipeline's start.
CALLS = sum(map(len, (*ALONE.values(), *ASKING.values()))) + len(REFUSED) + 1
BODY = {"model": "hello", "messages": [{"role": "user", "content": "hello big world"}]}


def run_all(python: str, environ: Mapping[str, str], base: Path) -> None:
    """Every command once or more, in this interpreter."""
    names = {"folder": str(base), "hello": str(HELLO)}

    def omni(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [python, "-P", "-m", "stage_runtime", command, *(each.format(**names) for each in arguments)]
        return subprocess.run(argv, env=dict(environ), capture_output=True, text=True, timeout=PATIENCE_S)

    def succeeds(command: str, *arguments: str) -> None:
        done = omni(command, *arguments)
        assert done.returncode == 0, (command, arguments, done.stderr)

    for command, calls in ALONE.items():
        for arguments in calls:
            succeeds(command, *arguments)
    with up(base, environ=dict(environ), python=python) as program:
        url = program.wait_for(r"http://127\.0\.0\.1:\d+")[0]
        program.wait_for("curl")
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=BODY, headers={"x-request-id": "mine"}, timeout=PATIENCE_S
        )
        assert answer.status_code == 200, answer.text
        for command, calls in ASKING.items():
            for arguments in calls:
                succeeds(command, *arguments, "--base-path", str(base))
        for command, last in REFUSED.items():
            where = ("--base-path", str(base)) if command == "call" else ()
            done = omni(command, *last, *where)
            assert done.returncode == 1
            assert len(done.stderr.splitlines()) == 1, done.stderr
            assert "is not installed" not in done.stderr


def test_the_tables_of_these_tests_have_all_commands() -> None:
    assert {*ALONE, *ASKING, *REFUSED, "up"} == set(cli.COMMANDS)


@pytest.mark.long
@pytest.mark.timeout(CALLS * PATIENCE_S)
def test_every_command_runs_with_the_extra_runtime_alone(base: Path, tmp_path: Path) -> None:
    environ = runtime_only.environ(tmp_path)
    hidden = subprocess.run([sys.executable, "-c", "import kopf"], env=environ, capture_output=True, text=True)
    assert "No module named 'kopf'" in hidden.stderr
    run_all(sys.executable, environ, base)


@pytest.mark.parametrize("command", sorted({*ALONE, *ASKING, "call", "up"} - BY_SOCKET))
def test_without_the_extra_a_command_runs_or_says_what_to_install(command: str, base: Path, tmp_path: Path) -> None:
    environ = runtime_only.environ(tmp_path, extra="")
    names = {"folder": str(base), "hello": str(HELLO)}
    table: Calls = {**ALONE, **ASKING, **{name: [last] for name, last in REFUSED.items()}}
    arguments = [each.format(**names) for each in table.get(command, [("-f", "{hello}", "--port", "0")])[-1]]
    where = ("--url", "http://127.0.0.1:1") if command in {*ASKING, "call"} else ()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "stage_runtime", command, *arguments, *where],
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode:
        assert len(done.stderr.splitlines()) == 1, (done.stdout, done.stderr)
        assert "pip install 'omnipipeline[runtime]'" in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(CALLS * PATIENCE_S + 600)  # pip downloads torch
def test_every_command_runs_in_an_environment_that_pip_made_of_the_extra(base: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "-c", "constraints.txt", "-e", ".[runtime]"]
    subprocess.run(pip, cwd=runtime_only.ROOT, check=True)
    run_all(python, os.environ, base)
