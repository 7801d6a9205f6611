"""Whether the functions that a pipeline names can be imported, tried in a process of its own.

Here: both ends. The child imports the author's modules and calls nothing of them; it writes one line before and one
after each name, so that a module that ends the process is known by name. Not here: what a dotted name means
(`engines.making.resolving`). The parent's end is called by `cli.files.validate`, the child's by `__main__`.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from omnipipeline_spec.types.errors import Fault
from omnipipeline_spec.types.plan import PipelinePlan, StagePlan
from stage_runtime.engines.making import loading, resolving
from stage_runtime.errors import ConfigurationError, describe, raised_at
from stage_runtime.processes.one_machine.preparing.prepared import Prepared
from stage_runtime.processes.supervision.children import describe_exit


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the spec names, and where it does."""

    path: str
    name: str
    stage: StagePlan | None = None  #: The stage of a factory: its arguments must fit, too.
    hook: str = ""  #: The name of a hook, as `resolving.HOOKS` has it.


class _ImportOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the child. ``problem`` None: about to import it; empty: it is there."""

    at: int
    path: str = ""
    problem: str | None = None


def named(plan: PipelinePlan) -> tuple[NamedFunction, ...]:
    """Every function that a plan names, factories first."""
    stages = [stage for unit in plan.units for stage in unit.stages]
    found = [NamedFunction(path=f"stages.{stage.name}.factory", name=stage.factory, stage=stage) for stage in stages]
    for stage in stages:
        hooks = {
            "routeFn": stage.route_fn,
            "waitForFn": stage.wait_for_fn,
            "mergeFn": stage.merge_fn,
            "streamDoneToFn": stage.stream_done_to_fn,
            **{f"projectPayload.{target}": name for target, name in stage.project_payload.items()},
        }
        found += [
            NamedFunction(path=f"stages.{stage.name}.{hook}", name=name, hook=hook.partition(".")[0])
            for hook, name in hooks.items()
            if name
        ]
    if plan.coordinator.terminal_stages_fn:
        name = plan.coordinator.terminal_stages_fn
        found.append(NamedFunction(path="terminalStagesFn", name=name, hook="terminalStagesFn"))
    return tuple(found)


def faults(prepared: Prepared) -> tuple[Fault, ...]:
    """The names that cannot be imported as `omni up` would, each with its place. Author's code runs, in a child
    process.
    """
    wanted = named(prepared.plan)
    found: list[Fault] = []
    with tempfile.TemporaryDirectory(prefix="omni-imports-") as folder:
        environment = {**prepared.plan.coordinator.env_defaults, **prepared.environment(Path(folder) / "code")}
        while wanted:
            results, code = _run(wanted, environment, Path(folder) / "lines")
            found += [Fault(path=one.path, message=one.problem) for one in results if one.problem]
            tried = sum(one.problem is not None for one in results)
            if tried == len(wanted):
                break
            # It ended while it imported this one, whatever its exit code: the next child tries the rest.
            last = wanted[tried]
            message = f"importing {last.name!r} ends the process ({describe_exit(code)})"
            found.append(Fault(path=last.path, message=message))
            wanted = wanted[tried + 1 :]
    return tuple(found)


def _run(
    wanted: Sequence[NamedFunction], environment: Mapping[str, str], answers: Path
) -> tuple[list[_ImportOutcome], int]:
    answers.write_bytes(b"")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "stage_runtime", "imports", str(answers)],
        env=dict(environment),
        input=msgspec.json.encode(wanted),
        stdout=subprocess.DEVNULL if sys.stderr is None else sys.stderr.fileno(),  # modules print, we answer
        check=False,
    )
    return [
        msgspec.json.decode(line, type=_ImportOutcome) for line in answers.read_bytes().splitlines()
    ], done.returncode


def answer(answers: str) -> int:
    """The child's end: reads what is wanted from standard input, appends what it finds to the file ``answers``."""
    faulthandler.disable()  # the parent reports which import it was
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[NamedFunction, ...])
    for at, one in enumerate(wanted):
        _report(answers, _ImportOutcome(at=at))
        path, problem = _problem(one)
        _report(answers, _ImportOutcome(at=at, path=path, problem=problem))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and exit handlers of imported modules are not waited for


def _problem(one: NamedFunction) -> tuple[str, str]:
    """Its faults, each with the place; none when it can be imported."""
    try:
        if one.stage is None:
            resolving.resolve_hook(one.name, one.hook, field=one.path)
        else:
            loading.check_arguments(one.stage, resolving.resolve(one.name, field=one.path))
    except ConfigurationError as error:
        path, _, problem = str(error).partition(": ")
        return path, problem
    except BaseException as error:  # of the author's module, which may exit
        place = raised_at(error)
        return one.path, f"importing {one.name!r} raises {describe(error)}{f' ({place})' if place else ''}"
    return one.path, ""


def _report(answers: str, result: _ImportOutcome) -> None:
    with open(answers, "ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")
