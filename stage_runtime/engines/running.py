"""Running one function for one request inside its error boundary: results, generators, chunks. Used by all engines."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator
from typing import Any

from stage_runtime.engines.base import Gate, Outbox, Work
from stage_runtime.errors import RequestError
from stage_runtime.wire.values import Chunk, Result, detached


class BadYield(TypeError):
    """A generator yielded what it may not."""


class Yields:
    """The values of one generator so far: any number of chunks, at most one result, yielded last or returned."""

    def __init__(self, work: Work, outbox: Outbox) -> None:
        self._work = work
        self._outbox = outbox
        self._result: Result | None = None

    def take(self, item: Any) -> Gate | None:
        """Raises: BadYield: no Chunk and no Result, or something after the Result."""
        if self._result is not None:
            raise BadYield(f"yielded {type(item).__name__} after its Result; the Result is the last")
        if isinstance(item, Result):
            self._result = Result(detached(item.data))  # as it is now: the generator goes on, and may write into it
            return None
        if not isinstance(item, Chunk):
            raise BadYield(f"yielded {type(item).__name__}; wrap it: omni.Chunk(…) or omni.Result(…)")
        return self._outbox.emit(self._work, item)

    def through(self, generator: Generator[Any, Any, Any]) -> Iterator[Any]:
        """The values that a sync generator yields; what it returns, unless that is None, is its result.

        Raises: BadYield: it has yielded one already, or returned a Chunk.
        """
        returned = yield from generator
        if returned is None:
            return
        if self._result is not None:
            raise BadYield(f"yielded its Result and returned {type(returned).__name__}; use one of the two")
        self._result = Result(returned_data(returned))

    def end(self) -> None:
        result = self._result
        self._outbox.done(self._work, result.data if result else None, has_data=result is not None)


def no_payload() -> RequestError:
    """The error of a function that waits for the request's payload in vain. A new one each time: it is raised."""
    return RequestError("stage_failed", "no payload can arrive: every upstream stage sent its result to other stages")


def never_awaited(made: Any) -> None:
    """Close a coroutine that will not be awaited: Python would warn of it, beside the reported error."""
    if inspect.iscoroutine(made):
        made.close()


def may_be_lazy(value: object) -> bool:
    """Whether it may be a generator or something to await, by its type; `inspect` then says which."""
    return _is_lazy(type(value))  # type: ignore[arg-type]  # a class is Hashable; the stubs of `type` do not say so


@functools.lru_cache(maxsize=256)  # types that authors make are few, but they may make them as they go
def _is_lazy(kind: type) -> bool:
    return issubclass(kind, (Generator, Awaitable, AsyncIterator))


def finish(work: Work, outbox: Outbox, returned: Any) -> None:
    """A plain function has returned."""
    outbox.done(work, returned_data(returned))


def drain(work: Work, outbox: Outbox, generator: Generator[Any, Any, Any]) -> None:
    """Run a sync generator to its end. A lagging consumer makes this thread wait: that bounds the memory."""
    yields = Yields(work, outbox)
    try:
        for item in yields.through(generator):
            gate = yields.take(item)
            outbox.settle()
            if gate is not None:
                gate.result()
            if work.cancelled:
                return
        yields.end()
    finally:
        generator.close()


async def drain_async(work: Work, outbox: Outbox, generator: AsyncIterator[Any], waiting: Any) -> None:
    """Run an async generator to its end. ``waiting(gate)`` awaits a gate of another thread."""
    yields = Yields(work, outbox)
    try:
        async for item in generator:
            gate = yields.take(item)
            outbox.settle()
            if gate is not None:
                await waiting(gate)
            if work.cancelled:
                return
        yields.end()
    finally:
        close = getattr(generator, "aclose", None)
        if close is not None:
            await close()


def returned_data(returned: Any) -> Any:
    """The data that a function or generator has returned, in `Result` or not. Raises: BadYield: a Chunk."""
    if isinstance(returned, Chunk):
        raise BadYield("returned a Chunk; a function returns data, a generator yields chunks")
    return returned.data if isinstance(returned, Result) else returned
