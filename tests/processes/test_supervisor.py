"""Real processes under the supervisor: what is started again, what ends it all, what is left behind."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from stage_runtime.processes.supervision import statuspipe
from stage_runtime.processes.supervision.children import Command, recent
from stage_runtime.processes.supervision.instances import InstanceSpec, ProcessView, RestartPolicy
from stage_runtime.processes.supervision.startup_failures import StartupFailed
from stage_runtime.processes.supervision.supervisor import Supervisor
from tests.patience import patience

ACTOR = Path(__file__).with_name("acting_child.py")
PATIENCE_S = patience(60.0)
POLICY = RestartPolicy(startup_s=PATIENCE_S, grace_s=PATIENCE_S)
SHORT_S = 5.0  # without progress: longer than a busy machine lets a process wait for a core
IMPATIENT = RestartPolicy(startup_s=SHORT_S, grace_s=PATIENCE_S)


def command(name: str, *script: str) -> Command:
    argv = (sys.executable, "-P", str(ACTOR), *script)
    return Command(name=name, argv=argv, env=dict(os.environ), awaits=frozenset({statuspipe.Loaded}))


def instance(name: str, *script: str) -> InstanceSpec:
    return ranks(name, script)


def ranks(name: str, *scripts: tuple[str, ...]) -> InstanceSpec:
    names = (name,) if len(scripts) == 1 else tuple(f"{name}_tp{rank}" for rank in range(len(scripts)))
    return InstanceSpec(
        name=name,
        group=name,
        replica=0,
        stages=("s",),
        processes=names,
        commands=lambda: [command(process, *script) for process, script in zip(names, scripts, strict=True)],
    )


class Watched(Supervisor):
    """A supervisor that remembers what it would have shown."""

    def __init__(self) -> None:
        self.changes: list[ProcessView] = []
        self.lines: list[tuple[str, str]] = []
        super().__init__(on_change=self.changes.append, on_line=lambda name, line: self.lines.append((name, line)))

    def pids(self) -> list[int]:
        return [view.pid for view in self.views() if view.pid is not None]


@asynccontextmanager
async def supervised() -> AsyncIterator[Watched]:
    supervisor = Watched()
    try:
        yield supervisor
    finally:
        await supervisor.close()


async def up(supervisor: Supervisor) -> None:
    """All started, and from now on deaths are forgiven."""
    await supervisor.started()
    supervisor.settle()


async def eventually(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it never came about"
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.proves("killed-stage")
async def test_a_process_that_was_ready_and_is_killed_runs_again() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("voice", "ready", "sleep"), POLICY)
        await up(supervisor)
        (first,) = supervisor.pids()
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: supervisor.pids() not in ([], [first]))
        await up(supervisor)
        assert supervisor.views()[0].restarts == 1
        assert supervisor.failure is None


@pytest.mark.parametrize("in_run", [True, False])
async def test_a_killed_process_leaves_no_folder_of_its_sockets(tmp_path: Path, in_run: bool) -> None:
    note = tmp_path / "note"
    made = command("voice", "sockets", str(note), "ready", "sleep")
    with tempfile.TemporaryDirectory() as run:  # short: a socket's path in it has room
        environment = {**made.env, "TMPDIR": str(tmp_path), **({"OMNI_RUN": run} if in_run else {})}
        async with supervised() as supervisor:
            again = msgspec.structs.replace(made, env=environment)
            supervisor.add(msgspec.structs.replace(instance("voice"), commands=lambda: [again]), POLICY)
            await up(supervisor)
            left = Path(note.read_text().removeprefix("ipc://")).parent
            assert left.is_dir() and left.parent == (Path(run) if in_run else tmp_path)
            os.kill(supervisor.pids()[0], signal.SIGKILL)
            await eventually(lambda: not left.exists())
            await eventually(lambda: supervisor.views()[0].restarts == 1 and supervisor.views()[0].state == "ready")


async def test_the_reason_of_a_restart_is_the_death_and_not_the_last_line() -> None:
    async with supervised() as supervisor:
        lines = ("print", "ERROR: a request could not be served")
        supervisor.add(instance("voice", *lines, "ready", "sleep"), POLICY)
        await up(supervisor)
        (first,) = supervisor.pids()
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: any(view.state == "restarting" for view in supervisor.changes))
    [reason] = {view.message for view in supervisor.changes if view.state == "restarting"}
    assert reason == "ended before its time (killed by SIGKILL)"


def test_what_was_printed_long_before_the_end_explains_nothing() -> None:
    lines, printed_at = ["ERROR: an old one", "ERROR: no disk"], [100.0, 1100.0]
    assert recent(lines, printed_at, until=1101.0) == ["ERROR: no disk"]
    assert recent(lines, printed_at, until=101.0) == lines


async def test_repeated_deaths_are_answered_ever_later(tmp_path: Path) -> None:
    stamps = tmp_path / "stamps"
    async with supervised() as supervisor:
        one = supervisor.add(instance("voice", "stamp", str(stamps), "ready", "exit", "3"), POLICY)
        one.fragile = False
        await eventually(lambda: stamps.exists() and stamps.read_text().count("\n") == 4)
    starts = [float(line.split()[0]) for line in stamps.read_text().splitlines()]
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert pauses[1] >= 0.5
    assert pauses[2] >= 1.0


async def test_a_factory_failure_gives_the_childs_traceback_and_names_the_stage() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("voice", "loading", "fail"), POLICY)
        with pytest.raises(StartupFailed) as caught:
            await supervisor.started()
    assert (caught.value.process, caught.value.stage) == ("voice", "s")
    assert caught.value.problem == "ValueError: no such voice: 'bob'"
    assert "in broken_factory" in caught.value.traceback


@pytest.mark.proves("threads-left-at-exit")
async def test_a_process_that_reports_a_failure_is_not_ready_and_is_ended_when_it_does_not_exit(tmp_path: Path) -> None:
    order = tmp_path / "order"
    async with supervised() as supervisor:
        script = ("ready", "await", str(order), "broken", "sleep")
        one = supervisor.add(instance("voice", *script), msgspec.structs.replace(POLICY, exit_s=SHORT_S))
        await up(supervisor)
        (first,) = supervisor.pids()
        order.touch()
        await eventually(lambda: not one.ready)
        assert not gone(first), "it is not ready from its report on"
        assert supervisor.views()[0].state == "ending"
        await eventually(lambda: gone(first))
        await eventually(lambda: supervisor.views()[0].message == "RuntimeError: the engine is broken")
        assert supervisor.failure is None


async def test_a_start_that_reports_a_failure_and_does_not_exit_fails_with_what_was_reported() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("voice", "broken", "sleep"), msgspec.structs.replace(POLICY, exit_s=0.1))
        with pytest.raises(StartupFailed, match="voice: RuntimeError: the engine is broken"):
            await supervisor.started()


async def test_a_death_before_ready_without_a_report_shows_exit_and_last_output() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("voice", "print", "half of the weights", "kill"), POLICY)
        with pytest.raises(StartupFailed, match="killed by SIGKILL") as caught:
            await up(supervisor)
    assert caught.value.tail == ("half of the weights",)
    assert str(caught.value).endswith(": half of the weights")


async def test_an_author_who_writes_into_the_pipe_of_events_does_not_hide_the_end_of_a_process() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("voice", "scribble", "exit", "3"), POLICY)
        with pytest.raises(StartupFailed, match="exit code 3"):
            await up(supervisor)


async def test_closing_after_a_failed_start_ends_the_siblings() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("front", "ready", "sleep"), POLICY)
        await eventually(lambda: supervisor.views()[0].state == "ready")
        (sibling,) = supervisor.pids()
        supervisor.add(instance("voice", "fail"), POLICY)
        with pytest.raises(StartupFailed):
            await up(supervisor)
        assert not gone(sibling)
    assert gone(sibling)


async def test_a_ready_sibling_that_dies_while_others_load_fails_the_start() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("slow", "loading", "sleep"), POLICY)
        supervisor.add(instance("front", "ready", "nap", "0.2", "exit", "7"), POLICY)
        with pytest.raises(StartupFailed, match=r"front: .*exit code 7"):
            await up(supervisor)


async def test_a_process_that_registers_while_it_loads_is_shown_as_loading() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("voice", "loading", "registered", "ready", "sleep"), POLICY)
        await up(supervisor)
        assert [view.state for view in supervisor.changes] == ["starting", "loading", "ready"]


async def test_a_loader_that_does_nothing_is_ended_and_shows_where_it_hangs() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("voice", "trace", "loading", "sleep"), IMPATIENT)
        with pytest.raises(StartupFailed, match=r"no progress for \d+ s while starting \(s: weights 1/2\)") as caught:
            await up(supervisor)
    assert "acting_child.py" in caught.value.explanation()


@pytest.mark.long
async def test_a_loader_that_computes_in_silence_is_left_alone() -> None:
    async with supervised() as supervisor:
        supervisor.add(
            instance("voice", "spin", str(2 * SHORT_S), "ready", "sleep"),
            IMPATIENT,
        )
        await up(supervisor)


@pytest.mark.proves("tp-rank-dies")
async def test_a_death_of_one_rank_restarts_all_ranks_of_that_instance_only() -> None:
    async with supervised() as supervisor:
        both = ("ready", "sleep")
        supervisor.add(ranks("talker", both, both), POLICY)
        supervisor.add(instance("front", *both), POLICY)
        await up(supervisor)
        *before, front = supervisor.pids()
        os.kill(before[1], signal.SIGKILL)
        await eventually(lambda: len(supervisor.pids()) == 3 and not set(before) & set(supervisor.pids()))
        await up(supervisor)
        assert all(gone(pid) for pid in before)
        assert supervisor.pids()[2] == front


@pytest.mark.proves("drain")
async def test_sigterm_lets_a_process_drain_and_the_rest_wait_for_it() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("voice", "polite", "ready", "sleep"), POLICY)
        await up(supervisor)
        supervisor.ask_all_to_stop()
        await supervisor.gone()
        assert ("voice", "drained") in supervisor.lines
        assert supervisor.views()[0].state == "stopped"
        assert supervisor.failure is None


async def test_a_process_deaf_to_sigterm_is_killed_when_its_grace_is_over() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("voice", "deaf", "ready", "sleep"), RestartPolicy(startup_s=PATIENCE_S, grace_s=0.5))
        await up(supervisor)
        (pid,) = supervisor.pids()
        await supervisor.stop("voice")
        assert gone(pid)
        assert supervisor.instances() == []


async def test_a_second_request_to_stop_cuts_the_grace_short() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("voice", "deaf", "ready", "sleep"), RestartPolicy(startup_s=PATIENCE_S, grace_s=86_400))
        await up(supervisor)
        supervisor.ask_all_to_stop()
        supervisor.ask_all_to_stop()
        await asyncio.wait_for(supervisor.gone(), PATIENCE_S)


class Joined:
    """An instance; another one is added by the event loop while the thread of a live table looks at it."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def views(self) -> list[ProcessView]:
        instances: dict[str, Any] = self._supervisor._instances
        instances[f"voice.{len(instances)}"] = self
        return [ProcessView(process="voice", instance="voice", stages=(), state="ready")]


def test_processes_are_shown_while_others_are_added() -> None:
    supervisor = Watched()
    instances: dict[str, Any] = supervisor._instances
    instances["voice"] = Joined(supervisor)
    assert [len(supervisor.views()) for _ in range(2)] == [1, 2]


@pytest.mark.proves("drain")
async def test_an_instance_that_drains_is_not_cut_short_when_all_begin_to_drain(tmp_path: Path) -> None:
    """A ^C while `omni scale` ends an instance is the first request to stop, also for that instance."""
    ended = tmp_path / "ended"
    async with supervised() as supervisor:
        supervisor.add(instance("voice", "drains", str(ended), "ready", "sleep"), POLICY)
        await up(supervisor)
        scaled = asyncio.create_task(supervisor.stop("voice"))
        await eventually(lambda: ("voice", "draining") in supervisor.lines)
        supervisor.ask_all_to_stop()
        for _ in range(20):  # a second SIGTERM would be sent meanwhile
            await asyncio.sleep(0)
        ended.touch()
        await scaled
        assert supervisor.lines[-1] == ("voice", "drained")


async def test_what_a_dead_child_had_started_is_ended_with_it(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    async with supervised() as supervisor:
        one = supervisor.add(instance("voice", "spawn", str(noted), "ready", "sleep"), POLICY)
        await up(supervisor)
        grandchild = int(noted.read_text())
        assert not gone(grandchild)
        os.kill(one.children[0].pid, signal.SIGKILL)
        await eventually(lambda: gone(grandchild))


async def test_a_command_that_does_not_exist_is_a_failed_start() -> None:
    async with supervised() as supervisor:
        missing = Command(name="voice", argv=("/nowhere/at/all",), env={})
        spec = InstanceSpec(
            name="voice", group="voice", replica=0, stages=(), processes=("voice",), commands=lambda: [missing]
        )
        supervisor.add(spec, POLICY)
        with pytest.raises(StartupFailed, match="voice"):
            await up(supervisor)


@pytest.mark.parametrize("second", ["hangs", "cannot be started"])
async def test_a_second_life_that_does_not_come_about_is_followed_by_a_third(second: str) -> None:
    lives = itertools.count(1)

    def commands() -> list[Command]:
        match next(lives):
            case 2 if second == "hangs":
                return [command("voice", "loading", "sleep")]
            case 2:
                raise BlockingIOError(11, "Resource temporarily unavailable")  # fork's word for: too many processes
            case _:
                return [command("voice", "ready", "sleep")]

    async with supervised() as supervisor:
        spec = InstanceSpec(
            name="voice", group="voice", replica=0, stages=("s",), processes=("voice",), commands=commands
        )
        supervisor.add(spec, IMPATIENT)
        await up(supervisor)
        (first,) = supervisor.pids()
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: supervisor.views()[0].restarts == 2 and supervisor.views()[0].state == "ready")
        assert supervisor.failure is None
        messages = [view.message for view in supervisor.changes if view.state == "restarting"]
        assert any("no progress for" in one or "temporarily unavailable" in one for one in messages)


async def test_what_is_waited_for_is_what_was_named_and_a_failure_goes_with_its_instance() -> None:
    async with supervised() as supervisor:
        supervisor.add(instance("front", "ready", "sleep"), POLICY)
        await up(supervisor)
        supervisor.add(instance("voice", "fail"), POLICY)
        supervisor.add(instance("slow", "loading", "sleep"), POLICY)
        with pytest.raises(StartupFailed, match="voice"):
            await supervisor.ready(["voice"])
        await supervisor.ready(["front"])  # of which nothing failed
        assert supervisor.failure is not None
        await supervisor.take_back("voice")
        assert supervisor.failure is None
        waiting = asyncio.create_task(supervisor.ready(["slow"]))
        await supervisor.take_back("slow")
        with pytest.raises(StartupFailed, match="slow: was stopped before it was ready"):
            await waiting
        assert [one.spec.name for one in supervisor.instances()] == ["front"]


@pytest.mark.parametrize(
    ("line", "cause"), [("12:30:59 INFO    stage_runtime: ready: a", ""), ("no licence", ": no licence")]
)
async def test_a_record_of_what_went_well_is_not_the_reason_of_a_restart(tmp_path: Path, line: str, cause: str) -> None:
    leave = tmp_path / "leave"
    async with supervised() as supervisor:
        supervisor.add(instance("voice", "ready", "await", str(leave), "print", line, "exit", "3"), POLICY)
        await up(supervisor)
        leave.touch()
        await eventually(lambda: any(view.state == "restarting" for view in supervisor.changes))
    reason = next(view.message for view in supervisor.changes if view.state == "restarting")
    assert reason == f"ended before its time (exit code 3){cause}"


def lives(flag: Path, later: Command) -> InstanceSpec:
    """One whose first life is ready for a moment, and leaves ``flag``; each later one is ``later``."""
    first = command("voice", "stamp", str(flag), "ready", "nap", "0.2", "exit", "1")
    return msgspec.structs.replace(instance("voice"), commands=lambda: [later if flag.exists() else first])


GIVES_UP = RestartPolicy(startup_s=PATIENCE_S, grace_s=PATIENCE_S, give_up_after=2)


async def test_a_restart_that_never_gets_ready_again_is_given_up_on_request(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        never_ready = Command(name="voice", argv=(sys.executable, "-c", "raise SystemExit(9)"), env=dict(os.environ))
        supervisor.add(lives(tmp_path / "first", never_ready), GIVES_UP)
        await up(supervisor)
        await eventually(lambda: supervisor.failure is not None)
        assert str(supervisor.failure) == "voice: ended before its time (exit code 9)"


async def test_a_life_that_fails_as_soon_as_it_is_ready_was_ready_and_is_not_given_up(tmp_path: Path) -> None:
    async with supervised() as supervisor:
        supervisor.add(lives(tmp_path / "first", command("voice", "ready", "broken", "exit", "1")), GIVES_UP)
        await up(supervisor)
        await eventually(lambda: supervisor.failure is not None or supervisor.views()[0].restarts == 4)
        assert supervisor.failure is None


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(ACTOR.parent)!r})
from test_supervisor import POLICY, Supervisor, instance
async def main():
    supervisor = Supervisor(on_change=lambda view: None, on_line=lambda name, line: None)
    one = supervisor.add(instance("voice", "deaf", "ready", "sleep"), POLICY)
    await supervisor.started()
    open({str(noted)!r}, "w").write(str(one.children[0].pid))
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        child = int(noted.read_text())
        assert not gone(child)
        parent.kill()
    end = time.monotonic() + PATIENCE_S
    while not gone(child):
        assert time.monotonic() < end, "it outlived its supervisor"
        time.sleep(0.01)


def test_a_child_whose_parent_is_dead_already_never_starts() -> None:
    from stage_runtime.processes.supervision import parent_death

    someone_else = 1  # not the process that starts it here
    done = subprocess.run(
        [sys.executable, "-I", "-S", parent_death.__file__, str(someone_else), "echo", "started"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
