"""``kubectl omni`` shows a user's texts as they are; kubectl is a program that prints objects."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from omnipipeline_operator.kubectl import cli, tree
from tests.operator.kubectl.test_kubectl_tree import READY, pipeline, pod, shown
from tests.operator.running import pipeline as resource

MARKUP = "[shout] [/] [red]x[/red] :smile: \U0001f642"
OBEYED = "\x1b\x07\x9b\u202e\u2028"

#: Prints the objects that a file beside it holds, by kind.
KUBECTL = """\
#!{python}
import json, pathlib, sys
held = json.loads((pathlib.Path(__file__).parent / "objects.json").read_text())
kind = sys.argv[2] if sys.argv[1] == "get" else ""
print(json.dumps(held.get(kind.partition(".")[0], {{}})))
"""


@pytest.fixture
def omni(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command; ``objects``: what kubectl gets of each kind."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def run(*arguments: str, **objects: Any) -> Result:
        (tmp_path / "objects.json").write_text(json.dumps(objects))
        return CliRunner().invoke(cli.main, arguments)

    return run


def made(**spec: Any) -> dict[str, Any]:
    found = resource(**spec)
    found["metadata"] |= {"namespace": "team", "uid": "u", "generation": 1, "resourceVersion": "1"}
    return found


def entry(number: int, **spec: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"labels": {"omnipipeline.dev/revision": f"r{number}"}, "creationTimestamp": "now"}
    metadata["ownerReferences"] = [{"uid": "u"}]
    return {"metadata": metadata, "revision": number, "data": {"spec": made(**spec)["spec"]}}


def test_a_history_shows_the_names_of_stages_in_brackets(omni: Callable[..., Result]) -> None:
    stages = [{"name": "shout", "process": "shout", "factory": "m:f", "terminal": True}]
    louder = [{**stages[0], "factoryArgs": {"loud": MARKUP}}]
    listed = {"items": [entry(1, stages=stages), entry(2, stages=louder)]}
    done = omni("history", "duo", omnipipelines=made(stages=louder), controllerrevisions=listed)
    assert done.exit_code == 0, done.output
    assert "stages[shout].factoryArgs" in done.output
    whole = omni("history", "duo", "--revision", "2", omnipipelines=made(stages=louder), controllerrevisions=listed)
    assert MARKUP in whole.output


def test_a_status_shows_every_message_as_it_was_written(omni: Callable[..., Result]) -> None:
    found = made()
    said = {"type": "Ready", "status": "False", "reason": "CrashLoopBackOff", "message": f"unit: {MARKUP}{OBEYED}!"}
    unit = {"name": "first", "replicas": 1, "reason": "CrashLoopBackOff", "message": f"pod: {MARKUP}{OBEYED}!"}
    found["status"] = {"conditions": [said], "units": [unit], "observedGeneration": 1}
    done = omni("status", "duo", omnipipelines=found, pods={"items": []})
    assert done.output.count(MARKUP) == 2
    assert not set(OBEYED) & set(done.output)


def test_an_error_is_shown_as_it_was_written(omni: Callable[..., Result]) -> None:
    stages = [{"name": "shout", "process": "shout", "factory": f"{MARKUP}{OBEYED}", "terminal": True}]
    done = omni("logs", "duo", "--stage", MARKUP, omnipipelines=made(stages=stages))
    assert done.exit_code == 1
    assert "[shout]" in done.output
    assert not set(OBEYED) & set(done.output)


def test_a_crashed_pod_shows_the_line_that_the_condition_has() -> None:
    ended = {"exitCode": 1, "message": "FileNotFoundError: no weights\n---\nTraceback …\n  the last line"}
    crashed = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}}
    units = [{"name": "voice", "replicas": 1}]
    lines = shown(pipeline(observedGeneration=2, units=units), pod("a", containerStatuses=[crashed]))
    assert lines[-1] == "a  CrashLoopBackOff: FileNotFoundError: no weights  node n1"
    failed = pod("a", phase="Failed", containerStatuses=[{"state": {"terminated": ended}}])
    assert tree._state(failed) == ("failed: FileNotFoundError: no weights", "red")


@pytest.mark.parametrize(
    "arguments", [("status", "hello"), ("history", "hello"), ("logs", "hello", "--stage", "shout")]
)
def test_a_resource_of_thousands_of_levels_is_said_to_nest_too_deep(
    omni: Callable[..., Result], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    deep = '{"a":' * 9000 + "1" + "}" * 9000
    text = json.dumps({"omnipipelines": made(envDefaults={"deep": "here"})}).replace('"here"', deep)
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/deep.json\n")
    (tmp_path / "deep.json").write_text(text)
    done = omni(*arguments)
    assert (done.exit_code, done.stderr) == (
        1,
        "error: the resource nests too deep for this command: see kubectl get\n",
    )


@pytest.mark.parametrize("arguments", [("status", "hello"), ("logs", "hello"), ("ui", "hello")])
def test_a_kubectl_that_is_not_there_or_no_program_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(cli.main, arguments)
    assert (done.exit_code, done.stderr) == (1, "error: kubectl is not on the PATH\n")
    (tmp_path / "kubectl").write_text("no program")
    (tmp_path / "kubectl").chmod(0o755)
    done = CliRunner().invoke(cli.main, arguments)
    assert (done.exit_code, done.stderr) == (1, "error: kubectl cannot be started: Exec format error\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("-n", "team", "--context=far", "status", "hello"),
        ("status", "hello", "-n", "team", "--context=far"),
        ("status", "--namespace=team", "hello", "--context", "far"),
        ("-n", "other", "--context=far", "status", "hello", "-n", "team"),
    ],
)
def test_kubectls_flags_stand_before_and_after_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    program = tmp_path / "kubectl"
    program.write_text('#!/bin/sh\necho "$@" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(cli.main, arguments)
    assert (done.exit_code, done.stderr.endswith(" --namespace=team --context=far\n")) == (1, True), done.stderr


def test_a_pod_that_ends_before_it_is_evicted_is_drained(omni: Callable[..., Result], tmp_path: Path) -> None:
    left, other = pod("left", **READY), pod("other", **READY)
    for each in (left, other):
        each["metadata"] |= {"namespace": "team", "uid": each["metadata"]["name"]}
    names = ["first.json", "then.json"]
    for name, pods in zip(names, ([left, other], [other]), strict=True):
        (tmp_path / name).write_text(json.dumps({"items": pods}))
    program = tmp_path / "kubectl"
    program.write_text(
        f"#!/bin/sh\ncd {tmp_path}\nif [ $1 = create ]; then mv then.json first.json\n"
        "echo 'Error from server (NotFound): pods \"left\" not found' >&2; exit 1; fi\ncat first.json\n"
    )
    done = omni("drain", "hello", "left")
    assert (done.exit_code, done.output) == (0, "left has ended\n")


def test_a_disk_that_takes_no_file_is_said_in_one_line(
    omni: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    done = omni("restart", "hello", omnipipelines=made())
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: [Errno 2] No such file or directory: ")
