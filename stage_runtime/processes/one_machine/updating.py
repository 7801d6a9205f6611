"""The meaning of a changed file for a run: which units get new instances, and when the files have changed. Used by
`local`.

Pure but for looking at files.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from omnipipeline_spec.types.plan import PipelinePlan
from stage_runtime.processes.one_machine.preparing import imports_beside

LOOK_S: Final = 0.5

State = Mapping[Path, tuple[int, int]]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between one plan and the next. Units by name."""

    begin: tuple[str, ...]  #: They get new instances: other ones, or other code.
    end: tuple[str, ...]  #: They are not in the next plan, or other ones.
    limits: tuple[str, ...]  #: Their replicas follow the load, by other limits than before or for the first time.
    at_start: bool  #: Something differs that is read at a start only.

    def told(self, scaled: Mapping[str, int]) -> str:
        """A sentence for people about what was done. scaled: groups with another number of instances."""
        gone = [name for name in self.end if name not in self.begin]
        parts = [f"restarted {', '.join(self.begin)}"] if self.begin else []
        parts += [f"ended {', '.join(gone)}"] if gone else []
        parts += [f"{name} has {count} instances" for name, count in scaled.items()]
        parts += [f"{name} follows its load" for name in self.limits]
        if self.at_start:
            parts.append("the name, serves, accepts and coordinator are read when `omni up` starts: start it again")
        return "; ".join(parts) or "nothing that runs has changed"


def change(
    old: PipelinePlan, new: PipelinePlan, changed: set[Path], folder: Path | None, *, renamed: bool = False
) -> Change:
    """changed: files of ``folder``, which is that of the pipeline's file. renamed: it has another name than before."""
    before = {unit.name: unit.revision for unit in old.units}
    after = {unit.name: unit.revision for unit in new.units}
    concerned = set() if folder is None else imports_beside.concerned(new.units, folder, changed)
    begin = [name for name in after if name in concerned or before.get(name) != after[name]]
    end = [name for name in before if name in begin or name not in after]
    limits = [name for name, one in new.autoscaling.items() if old.autoscaling.get(name) != one]
    return Change(
        begin=tuple(begin),
        end=tuple(end),
        limits=tuple(limits),
        at_start=renamed or _at_start(old) != _at_start(new),
    )


def scaled(old: PipelinePlan, new: PipelinePlan, wanted: Change) -> dict[str, int]:
    """Groups that go on with another number of instances."""
    return {
        group.name: new.replicas[unit.name]
        for unit in new.units
        if unit.name not in (*wanted.begin, *new.autoscaling)
        and (unit.name in old.autoscaling or new.replicas[unit.name] != old.replicas[unit.name])
        for group in unit.groups
    }


def _at_start(plan: PipelinePlan) -> object:
    """The fields that are read at a start only; not code, of which a coordinator uses that of its hook alone."""
    own = plan.coordinator
    return own if own.terminal_stages_fn else msgspec.structs.replace(own, code={})


def file_of(source: str) -> Path | None:
    """The file that ``pipeline.yaml`` and ``pipeline.py:name`` name; None: it is a module's name."""
    file = Path(source if os.path.exists(source) else source.rpartition(":")[0])
    return file.resolve() if file.is_file() else None


def state(file: Path) -> State:
    """Time of writing and size of a pipeline's file, and of each Python file beside it."""
    found = {}
    for one in {file, *imports_beside.files(file.parent)}:
        try:
            facts = one.stat()
        except OSError:
            continue
        found[one] = (facts.st_mtime_ns, facts.st_size)
    return found


def differing(old: State, new: State) -> set[Path]:
    return {one for one in old.keys() | new.keys() if old.get(one) != new.get(one)}


async def changed(file: Path, known: State, *, look_s: float = LOOK_S) -> State:
    """Wait until files have changed and stay as they are for one look of ``look_s``. Returns: the new state."""
    while True:
        await asyncio.sleep(look_s)
        found = await asyncio.to_thread(state, file)
        if not differing(known, found):
            continue
        while differing(found, again := await _later(file, look_s)):
            found = again
        return found


async def _later(file: Path, look_s: float) -> State:
    await asyncio.sleep(look_s)
    return await asyncio.to_thread(state, file)
