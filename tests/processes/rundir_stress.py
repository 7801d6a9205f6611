"""Programs of `test_rundir`: ``python rundir_stress.py PROGRAM BASE …``."""

from __future__ import annotations

import os
import sys
from typing import Any

from stage_runtime.processes import rundir

#: Of the events that Python tells an audit hook: steps of making and of sweeping up a run.
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
    """What runs that start at the same time do. Prints how many of ours were deleted."""
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


def sweep_and_die(base: str, at: int) -> None:
    """A sweeper that is killed before its n-th step. Exit code 0: it was through before that."""
    step = 0

    def before(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal step
        step += event.startswith(STEPS)
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
        case ["sweep-and-die", base, at]:
            sweep_and_die(base, int(at))
        case ["make", base]:
            print(rundir.RunDir(base).path, flush=True)
            sys.stdin.read()
