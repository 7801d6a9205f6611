"""Programs of `test_rundir`: ``python rundir_stress.py PROGRAM BASE …``."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from stage_runtime.processes.starting import rundir

#: Beginnings of the events that an audit hook gets for steps of making and of sweeping up a run.
STEPS = ("os.", "open", "fcntl.", "tempfile.", "shutil.", "pathlib.")


def whole(run: rundir.RunDir) -> bool:
    """Nobody has deleted anything of a run."""
    return (run.path / "lock").exists() and (run.path / "facts").read_bytes() == b"ours"


def every_step(base: str) -> None:
    """Make a run again and again; in the n-th one a sweep comes before the n-th system call. Prints what was lost."""
    step = wanted = 0
    sweeping = False
    swept: list[str] = []

    def before(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal step, sweeping
        if sweeping or not event.startswith(STEPS):
            return
        step += 1
        if step == wanted:
            sweeping = True
            rundir.sweep(base)
            swept.append(event)
            sweeping = False

    sys.addaudithook(before)
    lost = []
    while len(swept) == wanted:  # until the making of a run has no such step any more
        wanted, step = wanted + 1, 0
        run = rundir.RunDir(base)
        at = swept[-1] if len(swept) == wanted else ""
        step = sys.maxsize
        if not (run.path / "lock").exists():
            lost.append(f"{wanted}: {at}")
        run.remove()
    print(f"{len(swept)} steps, lost {lost}")


def make_and_sweep(base: str, count: int) -> None:
    """Do as runs that start at the same time. Prints how many of ours were deleted."""
    lost = 0
    for _ in range(count):
        rundir.sweep(base)
        run = rundir.RunDir(base)
        try:
            run.write("facts", b"ours")
            lost += not whole(run)
            rundir.sweep(base)
            lost += not whole(run)
        except OSError:
            lost += 1
        run.remove()
    print(lost)


def die_sweeping(base: str) -> None:
    """Fork a sweeper for each number n that is read: it is killed before its n-th step. Prints its exit code."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sweep_and_die(base, int(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def sweep_and_die(base: str, at: int) -> NoReturn:
    """A sweeper that is killed before its n-th step. Exit code 0: it was through before that.

    A look at what ``/proc`` says of each process of the machine is not a step: it changes nothing.
    """
    step = 0

    def before(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal step
        step += event.startswith(STEPS) and not str(arguments[0]).startswith("/proc/")
        if step == at:
            os._exit(9)

    sys.addaudithook(before)
    rundir.sweep(base)
    os._exit(0)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["every-step", base]:
            every_step(base)
        case ["make-and-sweep", base, count]:
            make_and_sweep(base, int(count))
        case ["die-sweeping", base]:
            die_sweeping(base)
        case ["make", base]:
            print(rundir.RunDir(base).path, flush=True)
            sys.stdin.read()
