"""The commands that start nothing: validate, convert, plan, init, and what a user's mistake looks like."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from omnipipeline_spec import loading, planning
from omnipipeline_spec.types.plan import PipelinePlan
from stage_runtime import cli
from tests.docs.blocks import ROOT, blocks

HELLO = Path(__file__).parents[2] / "examples" / "hello" / "pipeline.yaml"

FAULTY = """\
apiVersion: omnipipeline.dev/v1alpha1
kind: OmniPipeline
metadata: {name: faulty}
spec:
  stages:
  - {name: one, process: p, factory: "m:f", next: [tow]}
  - {name: two, process: p, factory: "m:f", terminal: true, nxt: [one]}
"""


def omni(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    file = tmp_path / "faulty.yaml"
    file.write_text(FAULTY)
    return file


def test_validate_names_every_fault_with_its_line_and_path_and_fails(faulty: Path) -> None:
    done = omni("validate", "-f", faulty)
    assert done.exit_code == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert any(line.startswith(f"{faulty}:6: stages[0].next") and "tow" in line for line in lines)
    assert any(line.startswith(f"{faulty}:7: stages[1].nxt") and "next" in line for line in lines)
    assert lines[-1].endswith("faults")


def test_validate_of_a_sound_pipeline_says_so() -> None:
    done = omni("validate", "-f", HELLO)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "hello is valid" in done.stdout


@pytest.mark.parametrize(("command", "count"), [("validate", 2), ("plan", 1)])
def test_what_some_requests_meet_or_no_request_calls_is_warned_of(command: str, count: int, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(
        "stages:\n"
        "- {name: a, process: p, factory: 'w:m', route_fn: 'w:r', next: [b, c]}\n"
        "- {name: b, process: p, factory: 'w:m', next: [c], stream_to: [d], project_payload: {d: 'w:p'}}\n"
        "- {name: c, process: p, factory: 'w:m', next: [d]}\n"
        "- {name: d, process: p, factory: 'w:m', terminal: true}\n"
    )
    done = omni(command, "-f", file)
    assert (done.exit_code, [line.partition(" ")[0] for line in done.stderr.splitlines()]) == (0, ["warning:"] * count)
    assert ("stages[2]: 'c' gets results of 'a', 'b' and has no waitFor" in done.stderr) == (command == "validate")
    assert "stages[1].projectPayload: 'd' gets no result of 'b', only chunks" in done.stderr


@pytest.mark.parametrize("command", ["validate", "plan", "convert"])
def test_a_null_that_sets_nothing_is_warned_of_with_its_line(command: str, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    head = "stages:\n- name: a\n  process: a\n  factory: w:m\n  terminal: true\n"
    file.write_text(f"{head}  factory_args:\n    x: null\n")
    done = omni(command, *([] if command == "convert" else ["-f"]), file)
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: line 7: stages[0].factoryArgs.x: null sets nothing here")


@pytest.mark.parametrize("command", ["up", "plan", "validate"])
def test_no_command_answers_a_users_mistake_with_a_traceback(command: str, faulty: Path) -> None:
    for wrong in (faulty, faulty.parent / "missing.yaml", faulty.parent):
        done = omni(command, "-f", wrong)
        assert done.exit_code == 1
        assert isinstance(done.exception, SystemExit)
        assert str(wrong) in done.stderr
        assert "Traceback" not in done.output


def test_a_mistyped_override_names_what_is_there() -> None:
    done = omni("plan", "-f", HELLO, "--set", "stages.shuot.factoryArgs.times=3")
    assert done.exit_code == 1
    assert "shout" in done.stderr


def test_convert_gives_a_resource_with_the_same_plan(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(
        "from omnipipeline_spec.pipeline import PipelineConfig, StageConfig\n"
        "config = PipelineConfig(name='In Python', stages=[\n"
        "    StageConfig(name='one', process='p', factory='m:f', next='two'),\n"
        "    StageConfig(name='two', process='q', factory='m:f', terminal=True, factory_args={'version': '1e3'})])\n"
    )
    done = omni("convert", file)
    assert done.exit_code == 0, done.output
    converted = tmp_path / "resource.yaml"
    converted.write_text(done.stdout)
    assert "name: in-python" in done.stdout
    one, other = loading.load(file), loading.load(converted)
    assert planning.plan(one.spec, name=one.name) == planning.plan(other.spec, name=other.name)


def test_plan_as_json_is_the_whole_plan() -> None:
    done = omni("plan", "-f", HELLO, "-o", "json")
    loaded = loading.load(HELLO)
    assert msgspec.json.decode(done.stdout, type=PipelinePlan) == planning.plan(loaded.spec, name="hello")


def test_plan_as_table_shows_pods_processes_and_transports() -> None:
    done = omni("plan", "-f", HELLO)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["front", "front", "split", "1"] in lines
    assert ["voice", "voice", "shout", "1"] in lines
    assert ["split", "shout", "stream", "between", "pods", "tcp", "tcp+curve", "cpu"] in lines


def test_plan_says_what_omni_up_uses_instead_of_a_way_between_pods() -> None:
    said = " ".join(omni("plan", "-f", HELLO).stdout.split())
    assert "tcp is for there. `omni up` runs all of them on this machine and uses shm" in said
    assert "tcp+curve: TCP, encrypted" in said
    named = " ".join(omni("plan", "-f", HELLO, "--set", "relayBackend=tcp").stdout.split())
    assert "tcp+curve: TCP, encrypted" in named and "`omni up`" not in named


EXPLAINED = """\
name: said
stages:
- {name: a, process: p, factory: 'w:m', next: [b], factory_args: {depth: 2, "a.b": x}}
- {name: b, process: q, factory: 'w:m', terminal: true}
"""


def explained(file: Path, *arguments: str) -> list[str]:
    done = omni("plan", "-f", file, *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_plan_explains_every_value_with_its_source(tmp_path: Path) -> None:
    file = tmp_path / "said.yaml"
    file.write_text(EXPLAINED)
    lines = explained(file, "--set", "stages.b.relay.credits=4", "--explain")
    assert {
        f'name = "said"  # {file}, line 1',
        f'stages[0].factoryArgs = {{"a.b":"x","depth":2}}  # {file}, line 3',
        "stages[1].relay.credits = 4  # --set stages.b.relay.credits=4",
        "stages[0].relay = null  # default",
        "stages[1].relay.slotSizeMb = 512  # default",
        'relayBackend = "auto"  # default',
    } <= set(lines)
    assert len(lines) == len(loading.explain(loading.load(file, overrides=["stages.b.relay.credits=4"])))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("stages.*.relay.credits", ["stages[0].relay = null", "stages[1].relay.credits = 4"]),
        ("stages[1].relay.credits", ["stages[1].relay.credits = 4"]),
        ("relay_backend", ['relayBackend = "auto"']),
        ("stages.a.factoryArgs.depth", ['stages[0].factoryArgs = {"a.b":"x","depth":2}']),
        ("stages.a.factoryArgs['a.b']", ['stages[0].factoryArgs = {"a.b":"x","depth":2}']),
        ("stages.b.next", ["stages[1].next = []"]),
    ],
)
def test_plan_explains_the_values_that_a_path_of_set_names(path: str, expected: list[str], tmp_path: Path) -> None:
    file = tmp_path / "said.yaml"
    file.write_text(EXPLAINED)
    lines = explained(file, "--set", "stages.b.relay.credits=4", "--explain", path)
    assert [line.partition("  # ")[0] for line in lines] == expected


def test_the_pages_example_of_explain_is_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = [block for block in blocks("docs/cli.md", "") if "--explain" in block]
    command, *lines = block.splitlines()
    _, _, *arguments = shlex.split(command.removeprefix("$ "))
    monkeypatch.chdir(ROOT)
    done = omni("plan", *arguments)
    assert (done.exit_code, done.stdout.splitlines()) == (0, lines)


@pytest.mark.parametrize(
    ("path", "explanation"),
    [
        ("stages.aa.gpu", "--explain stages.aa.gpu: 'aa' is not a stage; did you mean a?"),
        ("relayBackand", "--explain relayBackand: 'relayBackand' is not a key of the spec; did you mean relayBackend?"),
        ("stages[", "--explain stages[: cannot parse the path from '[' on"),
        ("stages.a.factoryArgs.dpth", "--explain stages.a.factoryArgs.dpth: nothing is there"),
        ("processGroups.p.replicas", "--explain processGroups.p.replicas: nothing is there"),
    ],
)
def test_a_path_that_names_nothing_is_explained_by_what_is_there(path: str, explanation: str, tmp_path: Path) -> None:
    file = tmp_path / "said.yaml"
    file.write_text(EXPLAINED)
    done = omni("plan", "-f", file, "--explain", path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert explanation in done.stderr


def test_plan_says_by_reference_once_stages_share_a_process() -> None:
    done = omni("plan", "-f", HELLO, "--set", "stages.shout.process=front")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["front", "front", "split,", "shout", "1"] in lines
    assert ["split", "shout", "normal", "same", "process", "by", "reference", "cpu"] in lines


def test_init_writes_a_sound_pipeline_and_never_overwrites(tmp_path: Path) -> None:
    folder = tmp_path / "My Pipeline"
    first = omni("init", folder)
    assert first.exit_code == 0, first.output
    written = (folder / "pipeline.yaml").read_text()
    assert omni("validate", "-f", folder / "pipeline.yaml").exit_code == 0
    assert loading.load(folder / "pipeline.yaml").name == "my-pipeline"
    again = omni("init", folder)
    assert again.exit_code == 1
    assert "is there already" in again.stderr
    assert (folder / "pipeline.yaml").read_text() == written


def test_an_order_without_a_run_says_that_there_is_none(tmp_path: Path) -> None:
    done = omni("scale", "voice", "2", "--base-path", tmp_path)
    assert done.exit_code == 1
    assert done.stderr == "error: no such `omni up` runs here; running: none\n"


def test_every_command_has_help_and_loading_the_list_loads_no_command() -> None:
    for name in cli.COMMANDS:
        done = omni(name, "--help")
        assert done.exit_code == 0, done.output
    program = (
        "import sys, stage_runtime.cli; print([m for m in sys.modules if m in ('torch', 'zmq', 'fastapi', 'rich')])"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(loaded.stdout.replace("'", '"')) == []


NAMING = """\
stages:
- {name: a, process: a, factory: "good:create", next: [b, c, d, e], routeFn: "good:ruote"}
- {name: b, process: b, factory: "dies:create", terminal: true}
- {name: c, process: c, factory: "good:run", terminal: true}
- {name: d, process: d, factory: "needs:create", terminal: true}
- {name: e, process: e, factory: "exits:create", terminal: true}
terminalStagesFn: "leaves:create"
env: [{name: GREETING, value: hi}]
code:
  inline:
    good.py: |
      import os
      assert os.environ["GREETING"] == "hi"
      print("on standard output")
      def create(): return run
      def run(payload): return payload.data
      def route(request_id, output): return "b"
    dies.py: |
      import os
      os.abort()
    exits.py: "import os; os._exit(0)"
    needs.py: "import a_package_that_is_not_here"
    leaves.py: "raise SystemExit(0)"
"""


def test_validate_imports_what_is_named_in_a_process_of_its_own_and_names_all_that_fails(tmp_path: Path) -> None:
    file = tmp_path / "naming.yaml"
    file.write_text(NAMING)
    assert omni("validate", "-f", file).exit_code == 0
    command = [sys.executable, "-P", "-m", "stage_runtime", "validate", "--imports", "-f", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    faults = dict(line.removeprefix(f"{file}: ").split(": ", 1) for line in done.stderr.splitlines() if ": " in line)
    assert faults["stages.b.factory"] == "importing 'dies:create' ends the process (killed by SIGABRT)"
    assert faults["stages.c.factoryArgs"].startswith("good:run: missing a required argument: 'payload'")
    assert faults["stages.d.factory"].startswith("importing 'needs:create' raises ModuleNotFoundError: ")
    assert faults["stages.d.factory"].endswith("needs.py:1)")
    assert faults["stages.e.factory"] == "importing 'exits:create' ends the process (exit code 0)"
    assert faults["stages.a.routeFn"] == "'good' has no 'ruote'; did you mean route?"
    assert faults["terminalStagesFn"].startswith("importing 'leaves:create' raises SystemExit: 0")
    assert done.stderr.splitlines()[-1] == "6 faults"
    assert "stages.a.factory" not in faults


HOOKED = """\
terminal_stages_fn: "h:none"
stages:
- {name: a, process: p, factory: "h:f", route_fn: "h:none", next: [c], stream_to: [b], stream_done_to_fn: "h:later",
   project_payload: {c: "h:none"}}
- {name: b, process: p, factory: "h:f", terminal: true}
- {name: c, process: p, factory: "h:f", wait_for: [a], wait_for_fn: "h:two", merge_fn: "h:two", terminal: true}
"""
HOOKS = """\
def f(): return lambda payload: payload
def none(): return "c"
async def later(request_id, output): return ["b"]
def two(request_id, source): return None
"""


def test_hooks_that_cannot_be_called_are_faults_of_the_pipeline(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(HOOKED)
    (tmp_path / "h.py").write_text(HOOKS)
    command = [sys.executable, "-P", "-m", "stage_runtime"]
    checked = subprocess.run([*command, "validate", "--imports", "-f", file], capture_output=True, text=True)
    assert checked.returncode == 1
    lines = checked.stderr.splitlines()
    for path, hook in (
        ("stages.a.routeFn", "none"),
        ("stages.a.streamDoneToFn", "later"),
        ("stages.a.projectPayload.c", "none"),
        ("stages.c.waitForFn", "two"),
        ("stages.c.mergeFn", "two"),
        ("terminalStagesFn", "none"),
    ):
        [line] = [line for line in lines if f" {path}: " in line]
        assert f"'h:{hook}' " in line
    assert (
        "'h:none' cannot be called: too many positional arguments; routeFn is a plain function (request_id, output)"
        in (checked.stderr)
    )
    assert "'h:later' is async or a generator; streamDoneToFn is a plain function" in checked.stderr
    assert lines[-1] == "6 faults"
    upped = subprocess.run([*command, "up", "-f", file, "--port", "0"], capture_output=True, text=True)
    assert upped.returncode == 1
    assert "cannot be called" in upped.stdout


def test_validate_imports_of_a_sound_pipeline_says_so() -> None:
    command = [sys.executable, "-P", "-m", "stage_runtime", "validate", "--imports", "-f", str(HELLO)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
