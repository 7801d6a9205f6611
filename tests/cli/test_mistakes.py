"""A mistake is reported in one line that names the place, with an exit code for scripts, and no traceback."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from stage_runtime import cli
from stage_runtime.cli import options
from stage_runtime.cli.running import runs
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.starting import rundir
from tests.patience import patience

HELLO = Path(__file__).parents[2] / "examples" / "hello" / "pipeline.yaml"
OMNI = (sys.executable, "-P", "-m", "stage_runtime")


def omni(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder for the run that no other test looks into. pytest's own paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("command", [("up", "-f"), ("validate", "-f"), ("plan", "-f"), ("convert",)])
@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("missing.yaml", None, "missing.yaml: No such file or directory"),
        ("empty.yaml", b"", "the file is empty"),
        ("comment.yaml", b"# nothing yet\n---\n", "the file is empty"),
        ("torn.yaml", b"stages: [", "line 1: expected the node content"),
        ("latin.yaml", b"name: caf\xe9\n", "can't decode byte"),
        ("two.yaml", HELLO.read_bytes() + b"---\n" + HELLO.read_bytes(), "has 2 documents of kind OmniPipeline"),
        ("large.yaml", HELLO.read_bytes() + b"#" * (3 << 20), "is larger than 3 MiB"),
        ("control.yaml", b"a: \x1b[31m", "line 1: the character U+001B is not allowed in YAML"),
        ("pod.yaml", b"apiVersion: v1\nkind: Pod\n", "is v1 Pod"),
        ("list.yaml", b"- 1\n", "a pipeline is a map with stages"),
        ("surrogate.yaml", b'modelPath: "\\ud800"\nstages: []\n', "line 1: '\\ud800' contains half of a surrogate"),
        ("none.py", b"x = 1\n", "has no PipelineConfig(...) at module level"),
        ("needs.py", b"\nimport a_package_that_is_not_here\n", "No module named 'a_package_that_is_not_here' ("),
        ("exits.py", b"raise SystemExit(0)\n", "exits.py: SystemExit: 0 ("),
        ("odd.py", b"class B(BaseException):\n  def __str__(self): 1 / 0\nraise B()\n", "odd.py: B ("),
    ],
)
def test_a_file_that_holds_no_pipeline_is_named_with_what_is_wrong(
    command: tuple[str, ...], name: str, content: bytes | None, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    done = omni(*command, file)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {file}")
    assert problem in line


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full"])
def test_a_file_without_an_end_is_read_only_so_far(device: str) -> None:
    done = omni("validate", "-f", device)
    assert (done.exit_code, done.stderr) == (1, f"error: {device}: is larger than 3 MiB\n")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("nowhere=1", "'nowhere' is not a key of the spec"),
        ("stages.split", "write it as path=value"),
        ("stages[7].gpu=0", "stages has 2 entries; [7] is out of range"),
        ('envDefaults={A: "a\\0b"}', "envDefaults.A: 'a\\x00b' contains NUL or half of a surrogate pair"),
        ('endpoints.basePath="/tmp/a\\0b"', "endpoints.basePath: '/tmp/a\\x00b' contains NUL"),
    ],
)
def test_an_override_that_cannot_be_is_named(override: str, problem: str) -> None:
    for command in ("up", "validate", "plan"):
        done = omni(command, "-f", HELLO, "--set", override)
        assert done.exit_code == 1
        assert isinstance(done.exception, SystemExit)
        assert problem in done.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--host", "no.such.host.invalid"), "error: --host 'no.such.host.invalid': "),
        (("--host", "192.0.2.1", "--no-auth"), "error: cannot listen on 192.0.2.1:8000: "),
        (("--host", ""), "error: --host ''"),
        (("--host", "a..b"), "error: --host 'a..b'"),
        (("--startup-timeout", "nan"), "nan is not a number of seconds"),
        (("--set", "endpoints.basePath=/proc"), "error: endpoints.basePath: "),
        (("--debug", "talk"), "error: --debug 'talk' is not a stage of hello: split, shout\n"),
        (
            ("--debug", "shout", "--set", "stages[1].tpSize=2", "--set", "stages[1].gpu=[0,1]"),
            "--debug shout: it has 2 ranks, which",
        ),
    ],
)
def test_what_omni_up_cannot_have_here_is_said_before_anything_starts(options: tuple[str, ...], problem: str) -> None:
    done = omni("up", "-f", HELLO, *options)
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    assert problem in done.stderr
    assert "pid" not in done.output


def test_a_working_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    there = tmp_path / "gone"
    there.mkdir()
    program = f"import os, runpy, sys; os.rmdir({str(there)!r}); sys.argv = ['omni', 'init']; "
    program += "runpy.run_module('stage_runtime', run_name='__main__')"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=there, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "error: the working directory is gone\n")


def test_a_full_disk_is_not_said_to_be_a_missing_working_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    cure = "error: no folder for temporary files can be written: free some disk space, or set TMPDIR to such a folder\n"
    for command in (("up", "-f", str(HELLO), "--port", "0"), ("scale", "voice", "2"), ("top", "--once")):
        done = omni(*command)
        assert (done.exit_code, done.stderr.splitlines(keepends=True)[-1]) == (1, cure)
    with pytest.raises(SystemExit), options.errors_as_messages():
        refuse()
    assert capsys.readouterr().err == "error: No usable temporary directory found in ['/tmp']\n"


def test_output_that_cannot_be_written_is_an_error_and_a_reader_that_has_enough_is_none() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*OMNI, "validate", "-f", str(HELLO)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")
    command = f"{' '.join(OMNI)} plan -f {HELLO} -o json | head -c 10"
    piped = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=100, check=False)
    assert piped.stderr == ""


def test_omni_up_ends_and_leaves_nothing_when_nobody_reads_what_it_prints(base: Path) -> None:
    command = [*OMNI, "up", "-f", str(HELLO), "--port", "0", "--set", f"endpoints.basePath={base}"]
    before = set(psutil.Process().children(recursive=True))  # a pipeline that other tests share may run
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.readline().startswith("starting hello")
        program.stdout.close()
        assert program.wait(100) == 1
        assert program.stderr.read() == ""
    assert list(base.iterdir()) == []
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [one for one in left if "stage_runtime" in " ".join(one.cmdline())]


def test_of_two_runs_with_one_name_the_pid_says_which(base: Path) -> None:
    one, other, third = (rundir.RunDir(str(base)) for _ in range(3))
    try:
        one.publish({"pipeline": "hello", "pid": 11})
        other.publish({"pipeline": "hello", "pid": 12})
        third.publish({"pipeline": "voice", "pid": 13})
        found = runs.find(pipeline=None, pid=12, base_path=str(base))
        assert found == other.path
        assert runs.find(pipeline="voice", pid=None, base_path=str(base)) == third.path
        with pytest.raises(ConfigurationError, match=r"select one with --pid; running: .*hello \(pid 11\)"):
            runs.find(pipeline="hello", pid=None, base_path=str(base))
        with pytest.raises(ConfigurationError, match="select one with --pipeline"):
            runs.find(pipeline=None, pid=None, base_path=str(base))
        with pytest.raises(ConfigurationError, match="--pipeline voice: --pid 11: no such `omni up` runs here"):
            runs.find(pipeline="voice", pid=11, base_path=str(base))
    finally:
        for made in (one, other, third):
            made.remove()


def test_a_run_that_starts_is_found_and_has_no_address(base: Path) -> None:
    """Models load for minutes: `omni logs` then shows what they have written."""
    (base / "waiting.py").write_text(
        "def load():\n    print('I load', flush=True)\n    while True: __import__('time').sleep(1)\n"
    )
    file, where = base / "pipeline.yaml", ("--base-path", str(base / "run"))
    stage = "{name: one, process: one, factory: 'waiting:load', terminal: true}"
    file.write_text(f"name: waits\nendpoints: {{basePath: {where[1]}}}\nstages:\n- {stage}\n")
    with subprocess.Popen([*OMNI, "up", "-f", str(file), "--port", "0"], stdout=subprocess.DEVNULL) as program:
        try:
            until = time.monotonic() + patience(100)
            while "I load" not in (written := omni("logs", "one", *where)).output:
                assert time.monotonic() < until and program.poll() is None, written.output
                time.sleep(0.1)
            asked = omni("call", "one", "x", *where)
            problem = "is starting and takes no requests yet: `omni logs` shows what it does"
            assert asked.stderr == f"error: waits (pid {program.pid}) {problem}\n"
        finally:
            program.send_signal(signal.SIGINT)
            program.wait(100)


def test_without_home_path_or_terminal_the_commands_work(tmp_path: Path) -> None:
    for command in (["plan", "-f", str(HELLO)], ["validate", "--imports", "-f", str(HELLO)], ["init", str(tmp_path)]):
        done = subprocess.run([*OMNI, *command], env={}, capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300"])
@pytest.mark.parametrize(
    "command",
    [("top", "--every"), ("profile", "run", "--seconds"), ("call", "stage", "operation", "--timeout")],
    ids=lambda command: command[0],
)
def test_a_time_that_no_clock_counts_is_refused(command: tuple[str, ...], value: str) -> None:
    done = omni(*command, value, "--url", "http://127.0.0.1:1")
    assert done.exit_code == 2, done.output
    assert f"Invalid value for '{command[-1]}'" in done.stderr


def test_a_mistake_is_one_line_where_standard_output_is_closed() -> None:
    program = shlex.join([*OMNI, "plan", "-f", "/nowhere/at/all.yaml"])
    done = subprocess.run(["sh", "-c", f"{program} >&-"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: /nowhere/at/all.yaml")


def test_functions_are_imported_where_standard_error_is_closed() -> None:
    program = shlex.join([*OMNI, "validate", "--imports", "-f", str(HELLO)])
    done = subprocess.run(["sh", "-c", f"{program} 2>&-"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0
    assert "hello is valid" in done.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads and writes everything")
def test_files_and_folders_that_may_not_be_touched_are_named(tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret.yaml", tmp_path / "folder"
    secret.write_bytes(HELLO.read_bytes())
    secret.chmod(0)
    folder.mkdir(mode=0o500)
    assert omni("up", "-f", secret).stderr == f"error: {secret}: Permission denied\n"
    assert omni("init", folder).stderr == f"error: {folder}/pipeline.yaml: Permission denied\n"


def test_an_interrupt_is_no_traceback_whether_a_command_has_begun_or_not(tmp_path: Path) -> None:
    interrupts = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "early.py").write_text(interrupts)
    (tmp_path / "late.py").write_text(
        "import click\nfrom stage_runtime.cli import options\n@click.command()\ndef command():\n"
        f"    with options.errors_as_messages():\n        {interrupts}"
    )
    outcomes = {}
    for module in ("early", "late"):
        program = f"from stage_runtime import cli; cli.COMMANDS['x'] = ({module!r}, ''); cli.main(['x'])"
        environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-P", "-c", program]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
        outcomes[module] = (done.returncode, done.stderr)
    assert outcomes == {"early": (-signal.SIGINT, ""), "late": (130, "interrupted\n")}


@pytest.mark.parametrize("command", [("up", "-f"), ("validate", "-f"), ("validate", "--imports", "-f")])
def test_a_module_beside_the_pipeline_that_takes_the_place_of_another_is_named(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "pipeline.yaml").write_bytes(HELLO.read_bytes())
    (tmp_path / "tokenize.py").write_text("def load(): ...\n")
    done = omni(*command, tmp_path / "pipeline.yaml")
    assert (done.exit_code, done.stderr) == (
        1,
        f"error: {tmp_path / 'tokenize.py'} would be imported in place of the module tokenize, which the pipeline's "
        "processes need: give it another name\n",
    )
