"""LoRA adapters that operators have loaded or dropped at run time: remembered, and given to instances that come later.

Here: the changes by stage, those that went through this coordinator and those that instances report: they know what
they hold, so a coordinator that starts again learns it from them. Not here: what an adapter is; the engine that takes
the operation knows. This runs on the I/O thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from stage_runtime.coordinator.questions.stage_operations import Late, OperationResults, Operations
from stage_runtime.errors import ENGINE_AWAY, NO_FOLDER, OmniError, RequestError, describe
from stage_runtime.rules.members.adapters import LIST, LOAD, MOST_CHANGES, UNLOAD

log = logging.getLogger(__name__)

GIVEN_WITHIN_S: Final = 60.0  # of all adapters together: an instance takes requests then, whatever it lacks


#: Stage -> adapter -> the folder from which it was loaded; None: it was dropped. The form is that of
#: `wire.messages.Ready`.
Reported: TypeAlias = Mapping[str, Mapping[str, str | None]]


class _Engine(NamedTuple):
    """All ranks of a stage of one instance."""

    instance: str
    stage: str


class AdapterChanges:
    def __init__(
        self, operations: Operations, *, within_s: float = GIVEN_WITHIN_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._operations = operations
        self._clock = clock
        self._within_s = within_s
        #: Stage -> adapter -> the arguments by which it was loaded; None: it was dropped. Oldest first.
        self._changes: dict[str, dict[str, Mapping[str, Any] | None]] = {}
        #: Instance -> its latest report.
        self._reports: dict[str, Reported] = {}
        self._under_way: set[str] = set()  #: Names that `load` or `unload` is at work on.
        #: Engines that have loaded one of these after an earlier `load` of it had failed for want of their answers.
        self._too_late: dict[str, list[_Engine]] = {}
        operations.on_done = self.note

    def note(self, results: OperationResults, arguments: Mapping[str, Any]) -> None:
        """Remember an operation that a stage's engine has carried out somewhere."""
        name = arguments.get("name")
        if results.operation not in (LOAD, UNLOAD) or not isinstance(name, str):
            return
        stages = {one.stage for one in results.results if one.error is None}
        self._remember(stages, name, dict(arguments) if results.operation == LOAD else None)

    async def load(self, name: str, path: str, *, timeout_s: float) -> None:
        """Have all stages that take adapters load one, in all of their instances or in none.

        Raises: RequestError: not_found: no stage takes any, or an instance does not find the folder;
            duplicate_request: all have one of this name, or it is being loaded or unloaded; invalid_request: an engine
            refuses it; unavailable: one has just ended.
        """
        async with self._change(name, timeout_s) as held:
            lacking = [one for one, names in held.items() if name not in names]
            if not lacking:
                raise RequestError("duplicate_request", f"the adapter {name!r} is loaded already", param="lora_name")
            arguments = {"name": name, "path": path}
            problems = await self._ask_each(lacking, LOAD, arguments, timeout_s, late=partial(self._late, name))
            failed = next((one for one in problems if one is not None), None)
            if failed is not None:
                loaded = [one for one, problem in zip(lacking, problems, strict=True) if problem is None]
                await self._ask_each(loaded, UNLOAD, {"name": name}, timeout_s)
                if _is_away(failed):
                    raise RequestError("unavailable", failed)
                code = "not_found" if NO_FOLDER in failed else "invalid_request"
                raise RequestError(code, failed, param="lora_path" if path in failed else "lora_name")
            self._too_late.pop(name, None)
            self._remember({one.stage for one in held}, name, arguments)

    async def unload(self, name: str, *, timeout_s: float) -> None:
        """Have all stages drop an adapter. Requests under way keep it to their ends.

        Raises: RequestError: not_found: no instance has it; invalid_request; the others as of `load`.
        """
        async with self._change(name, timeout_s) as held:
            having = [one for one, names in held.items() if name in names]
            if not having:
                raise RequestError("not_found", f"no adapter {name!r} is loaded", param="lora_name")
            problems = await self._ask_each(having, UNLOAD, {"name": name}, timeout_s)
            failed = next((one for one in problems if one is not None), None)
            if failed is not None and _is_away(failed):
                raise RequestError("unavailable", failed)
            if failed is not None:
                raise RequestError("invalid_request", failed, param="lora_name")
            self._remember({one.stage for one in having}, name, None)

    @contextlib.asynccontextmanager
    async def _change(self, name: str, timeout_s: float) -> AsyncIterator[dict[_Engine, Mapping[str, Any]]]:
        """Gives the adapters of each instance of each stage that takes any, while ``name`` is nobody else's."""
        if name in self._under_way:
            raise RequestError(
                "duplicate_request", f"the adapter {name!r} is being loaded or unloaded", param="lora_name"
            )
        self._under_way.add(name)
        try:
            yield await self._held(timeout_s)
        finally:
            self._under_way.discard(name)
            for one in self._too_late.pop(name, ()):
                self._late(name, *one)

    def _late(self, name: str, instance: str, stage: str) -> None:
        """An engine has loaded an adapter of which its client was told that it is not loaded."""
        if name in self._under_way:
            self._too_late.setdefault(name, []).append(_Engine(instance, stage))
            return
        log.warning("%s has loaded the adapter %s too late: it is dropped", instance, name)
        self._operations.tell(instance, stage, UNLOAD, {"name": name})

    async def _held(self, timeout_s: float) -> dict[_Engine, Mapping[str, Any]]:
        stages = self._operations.served()
        if not stages:
            raise RequestError("unavailable", "no stage has an instance now")
        answer = await self._operations.ask(LIST, stages, {}, timeout_s=timeout_s, noted=False)
        for one in answer.results:
            if one.error is not None and _is_away(one.error):  # it may take adapters, and have some
                raise RequestError("unavailable", f"stage {one.stage}: {one.error}")
        found: dict[_Engine, Mapping[str, Any]] = {
            _Engine(one.instance, one.stage): one.value
            for one in answer.results
            if one.error is None and not one.rank and isinstance(one.value, dict)
        }
        if not found:
            raise RequestError("not_found", "no stage takes adapters: set max_loras or lora_modules")
        return found

    async def _ask_each(
        self,
        engines: Sequence[_Engine],
        operation: str,
        arguments: Mapping[str, Any],
        timeout_s: float,
        late: Late | None = None,
    ) -> list[str | None]:
        """The first error of each."""
        calls = (self._ask(one.instance, one.stage, operation, arguments, timeout_s, late) for one in engines)
        return await asyncio.gather(*calls)

    def _remember(self, stages: Iterable[str], name: str, arguments: Mapping[str, Any] | None) -> None:
        for stage in stages:
            changes = self._changes.setdefault(stage, {})
            changes.pop(name, None)
            changes[name] = arguments
            if len(changes) > MOST_CHANGES:
                del changes[next(iter(changes))]

    def learn(self, instance: str, stages: Sequence[str], report: Reported) -> set[str]:
        """An instance of these stages reports what it has loaded and dropped since its start.

        Its first report adds adapters that this coordinator does not know: those that others had it load, or that were
        loaded before this coordinator started. Later ones are changes, which another coordinator has asked for.
        Returns: the stages of which a first report has brought news; instances of them may lack it.
        """
        before = self._reports.get(instance)
        report = {stage: report[stage] for stage in stages if stage in report}
        self._reports[instance] = report
        news = set()
        for stage, changes in report.items():
            known = self._changes.get(stage, {})
            for name, path in changes.items():
                arguments = None if path is None else {"name": name, "path": path}
                if before is None and name not in known:
                    news |= {stage} if path is not None else set()
                elif before is None or before.get(stage, {}).get(name, "") == path:
                    continue
                self._remember([stage], name, arguments)
        return news

    def lost(self, instance: str) -> None:
        """The instance is gone; what it had loaded is remembered for those that come after it."""
        self._reports.pop(instance, None)

    def due(self, stages: Iterable[str]) -> bool:
        """Whether an instance of these stages must be given something before it takes requests."""
        return any(self._changes.get(stage) for stage in stages)

    async def give(self, instance: str, stages: Iterable[str]) -> None:
        """Have one instance carry out what others have; the log names what it lacks afterwards.

        An adapter for which no time is left is asked for, too, and its answer not waited for.
        """
        until = self._clock() + self._within_s
        for stage in stages:
            for name, loaded in list(self._changes.get(stage, {}).items()):
                held = self._reports.get(instance, {}).get(stage, {})
                if name in held and held[name] == (None if loaded is None else loaded.get("path")):
                    continue
                operation, arguments = (UNLOAD, {"name": name}) if loaded is None else (LOAD, loaded)
                left_s = max(until - self._clock(), 0.0)
                problem = await self._ask(instance, stage, operation, arguments, left_s)
                if problem is not None:  # it may list the adapter itself, or not have it, as of its own revision
                    log.warning("%s, which has come later: %s of %s: %s", instance, operation, name, problem)

    async def _ask(
        self,
        instance: str,
        stage: str,
        operation: str,
        arguments: Mapping[str, Any],
        within_s: float,
        late: Late | None = None,
    ) -> str | None:
        """Returns: the first error."""
        try:
            answer = await self._operations.ask(
                operation, [stage], arguments, timeout_s=within_s, only=instance, noted=False, late=late
            )
        except OmniError as error:
            return describe(error)
        return next((one.error for one in answer.results if one.error is not None), None)


def _is_away(error: str) -> bool:
    """Whether the engine, or the next one in its place, may carry the operation out later."""
    return any(words in error for words in ENGINE_AWAY)
