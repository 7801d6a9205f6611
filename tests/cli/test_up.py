"""``omni up`` as people use it: a program, a terminal, ^C, and the end of the program itself."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.patience import patience
from tests.ports import free_port

HELLO = Path(__file__).parents[2] / "examples" / "hello" / "pipeline.yaml"
SLOW = """\
stages: [{name: slow, process: slow, factory: "slow_stage:create", terminal: true}]
code:
  inline:
    slow_stage.py: |
      import time
      def create():
          return lambda payload: time.sleep(3600)
"""
PATIENCE_S = patience(100.0)  # how long a test waits before it fails, on a machine that others use
PROGRAM = ("-P", "-m", "stage_runtime")
OMNI = (sys.executable, *PROGRAM)


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder for the run that no other test looks into. pytest's own paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


class Run:
    """A running `omni up` and what it has printed."""

    def __init__(self, program: subprocess.Popen[bytes], output: Path) -> None:
        self.program, self._output = program, output

    @property
    def text(self) -> str:
        return self._output.read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        eventually(lambda: re.search(pattern, self.text) or self.program.poll() is not None)
        found = re.search(pattern, self.text)
        assert found, self.text
        return found

    def children(self) -> list[psutil.Process]:
        """All that it has started, but the reaper."""
        found = []
        for one in psutil.Process(self.program.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                if not any("reaper.py" in word for word in one.cmdline()):
                    found.append(one)
        return found


def eventually(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)


@contextmanager
def up(
    base: Path,
    *more: str,
    file: Path = HELLO,
    environ: dict[str, str] | None = None,
    by: tuple[str, ...] = (),
    python: str = sys.executable,
) -> Iterator[Run]:
    """by: the program that starts it, if another one does. python: the interpreter that has `omni`."""
    output = base / "output.txt"
    with output.open("wb") as sink:
        arguments = [
            *by,
            python,
            *PROGRAM,
            "up",
            "-f",
            str(file),
            "--port",
            "0",
            "--set",
            f"endpoints.basePath={base}",
            *more,
        ]
        with subprocess.Popen(arguments, stdout=sink, stderr=sink, env=environ) as program:
            try:
                yield Run(program, output)
            finally:
                program.kill()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def runs(base: Path) -> list[str]:
    return sorted(path.name for path in base.glob("omni-*"))


@pytest.mark.proves("interrupt")
def test_it_prints_a_curl_line_that_works_and_an_interrupt_leaves_nothing(base: Path) -> None:
    with up(base) as run:
        run.wait_for(r"hello answers at (http://\S+)")
        curl = run.wait_for(r"curl (\S+)/v1/chat/completions -H '([^']+)' -d '([^']+)'")
        url, _, body = curl.groups()
        answer = httpx.post(
            f"{url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}, timeout=PATIENCE_S
        )
        assert answer.json()["choices"][0]["message"]["content"] == "HELLO!! THERE!! "
        children = run.children()
        assert len(children) == 3
        run.program.send_signal(signal.SIGINT)
        assert run.program.wait(PATIENCE_S) == 0
        assert run.text.endswith("stopped\n")
    assert gone(children)
    assert runs(base) == []


def test_an_interrupt_prints_one_line_for_each_process(base: Path) -> None:
    with up(base) as run:
        run.wait_for(r"\^C stops it")
        run.program.send_signal(signal.SIGINT)
        assert run.program.wait(PATIENCE_S) == 0
        after = run.text.partition("now\n")[2].splitlines()
    assert sorted(after) == ["coordinator stopped", "front stopped", "stopped", "voice stopped"]


def test_a_second_interrupt_does_not_wait_for_requests(base: Path) -> None:
    slow = base / "slow.yaml"
    slow.write_text(SLOW)
    with up(base, file=slow) as run:
        url = run.wait_for(r"answers at (http://\S+)")[1]
        request = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import httpx; httpx.post('{url}/v1/pipeline', json={{'inputs': 1}}, timeout=3600)",
            ],
            stderr=subprocess.DEVNULL,
        )
        eventually(lambda: httpx.get(f"{url}/status", timeout=PATIENCE_S).json()["in_flight"] == 1)
        children = run.children()
        run.program.send_signal(signal.SIGINT)
        run.wait_for("requests in flight are finished")
        time.sleep(0.5)
        assert run.program.poll() is None  # it waits for the request
        run.program.send_signal(signal.SIGINT)
        assert run.program.wait(PATIENCE_S) == 0
        request.wait(PATIENCE_S)
    assert gone(children)
    assert runs(base) == []


@pytest.mark.proves("ignored-signals")
def test_a_hang_up_that_whoever_started_it_ignores_ends_nothing_and_an_interrupt_does(base: Path) -> None:
    """`nohup` in the background of a script starts it like this."""
    with up(base, by=("sh", "-c", 'trap "" HUP INT; exec "$@"', "sh")) as run:
        url = run.wait_for(r"answers at (http://\S+)")[1]
        for process in (psutil.Process(run.program.pid), *run.children()):
            process.send_signal(signal.SIGHUP)
            assert signal.SIGHUP in ignored(process.pid), process.cmdline()
        answer = httpx.post(f"{url}/v1/pipeline", json={"inputs": "still here"}, timeout=PATIENCE_S)
        assert answer.status_code == 200
        run.program.send_signal(signal.SIGINT)
        assert run.program.wait(PATIENCE_S) == 0
    assert runs(base) == []


def ignored(pid: int) -> set[int]:
    (mask,) = re.findall(r"SigIgn:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return {number for number in range(1, 65) if int(mask, 16) >> (number - 1) & 1}


@contextmanager
def starting(base: Path) -> Iterator[Run]:
    """An `omni up` whose two processes run, one of which is never ready."""
    file = base / "starting.yaml"
    file.write_text(SLOW.replace("return lambda payload: time", "time"))
    with up(base, file=file) as run:
        eventually(lambda: len(run.children()) == 2)
        yield run


def test_an_interrupt_while_it_starts_leaves_nothing(base: Path) -> None:
    with starting(base) as run:
        children = run.children()
        run.program.send_signal(signal.SIGINT)
        assert run.program.wait(PATIENCE_S) == 130
    assert gone(children)
    assert runs(base) == []


@pytest.mark.proves("interrupt")
def test_a_second_interrupt_while_it_tidies_up_after_the_first_one_leaves_nothing(base: Path) -> None:
    with starting(base) as run:
        children = run.children()
        (reaper,) = (one for one in psutil.Process(run.program.pid).children() if one not in children)
        reaper.suspend()  # it is the last one to end
        run.program.send_signal(signal.SIGINT)
        eventually(lambda: gone(children))
        for _ in range(2):
            run.program.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                run.program.wait(1)
        reaper.resume()
        assert run.program.wait(PATIENCE_S) == 130
    assert runs(base) == []


@pytest.mark.proves("interrupt")
def test_children_end_with_a_killed_program_and_the_next_run_sweeps_up(base: Path) -> None:
    with up(base) as run:
        run.wait_for("answers at")
        children = run.children()
        run.program.kill()
        run.program.wait()
        eventually(lambda: gone(children))
    (left,) = runs(base)
    with up(base) as run:
        run.wait_for("answers at")
        (new,) = runs(base)
        assert new != left


def test_a_factory_that_raises_is_shown_with_its_traceback_and_exit_code_1(base: Path) -> None:
    raising = ("--set", "stages.shout.factory=json:loads", "--set", "stages.shout.factoryArgs={s: '{'}")
    with up(base, *raising) as run:
        assert run.program.wait(PATIENCE_S) == 1
        assert run.text.count("Traceback (most recent call last):") == 1
        assert "stage_runtime/" not in run.text.partition("Traceback")[2]
        last = run.text.splitlines()[-1]
        assert last.startswith("voice (stage shout) did not start: JSONDecodeError: ")
    assert runs(base) == []


def test_a_misspelt_factory_is_reported_in_one_line_with_the_nearest_name(base: Path) -> None:
    with up(base, "--set", "stages.shout.factory=hello:shuot") as run:
        assert run.program.wait(PATIENCE_S) == 1
        lines = [line for line in run.text.splitlines() if "shuot" in line]
        assert lines == [
            "voice (stage shout) did not start: stages.shout.factory: 'hello' has no 'shuot'; did you mean shout?"
        ]
        assert "Traceback" not in run.text


def test_a_gpu_on_a_machine_without_one_is_refused_before_anything_starts(base: Path) -> None:
    with up(base, "--set", "stages.shout.gpu=[1023]", environ={}) as run:
        assert run.program.wait(PATIENCE_S) == 1
        (line,) = run.text.splitlines()
        assert line.startswith("error: stages.shout.gpu: voice needs GPU 1023, and this machine has ")
        assert "--cpu" in line


def test_commands_reach_a_running_pipeline(base: Path) -> None:
    def omni(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*OMNI, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    with up(base) as run:
        run.wait_for("answers at")
        done = omni("scale", "voice", "2", "--base-path", str(base))
        assert (done.returncode, done.stdout) == (0, "voice: 2 replicas\n")
        assert len(run.children()) == 4
        before = {child.pid for child in run.children()}
        assert omni("restart", "front", "--base-path", str(base), "--pipeline", "hello").returncode == 0
        assert len(before - {child.pid for child in run.children()}) == 1
        wrong = omni("scale", "vioce", "2", "--base-path", str(base))
        assert (wrong.returncode, wrong.stderr) == (1, "error: 'vioce' is not a process group of hello: front, voice\n")


def test_a_terminal_gets_a_table_and_its_cursor_back(base: Path) -> None:
    leader, follower = pty.openpty()
    arguments = [*OMNI, "up", "-f", str(HELLO), "--port", "0", "--set", f"endpoints.basePath={base}"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    program = subprocess.Popen(arguments, stdout=follower, stderr=follower, stdin=follower, env=env, process_group=0)
    os.close(follower)
    seen = b""
    try:
        while b"^C stops it" not in seen:
            seen += os.read(leader, 65536)
        program.send_signal(signal.SIGINT)
        while chunk := _read(leader):
            seen += chunk
        assert program.wait(PATIENCE_S) == 0
    finally:
        program.kill()
        program.wait()
        os.close(leader)
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", seen).decode()
    assert re.search(r"PROCESS +STAGES +STATE", text)
    assert not re.search(r"^voice \| .*ready: shout", text, re.MULTILINE)  # no log lines between, while it starts
    assert re.search(r"voice +shout +ready +\d+ +\d+ MiB", text)
    assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l")  # shown after it was last hidden


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's word for: the other end is closed
        return b""


LOUD = """\
stages: [{name: loud, process: loud, factory: "loud_stage:create", terminal: true}]
code:
  inline:
    loud_stage.py: |
      def create():
          def say(payload):
              print("x" * 8000)
              return "said"
          return say
"""


def test_a_reader_who_pauses_stops_neither_requests_nor_the_end(base: Path) -> None:
    loud, port = base / "loud.yaml", free_port()
    loud.write_text(LOUD)
    end, theirs = os.pipe()  # nobody reads it
    overrides = ["--set", f"endpoints.basePath={base}", "--port", str(port)]
    with subprocess.Popen([*OMNI, "up", "-f", str(loud), *overrides], stdout=theirs, stderr=theirs) as program:
        try:
            url = f"http://127.0.0.1:{port}"
            eventually(lambda: serves(url) or program.poll() is not None)
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
                answers = [client.post("/v1/pipeline", json={"inputs": 1}).status_code for _ in range(60)]
            assert answers == [200] * 60
            children = psutil.Process(program.pid).children(recursive=True)
            program.send_signal(signal.SIGINT)
            assert program.wait(PATIENCE_S) == 0
        finally:
            program.kill()
            os.close(end)
            os.close(theirs)
    assert gone(children)
    assert runs(base) == []


def serves(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz", timeout=PATIENCE_S).status_code == 200
    return False
