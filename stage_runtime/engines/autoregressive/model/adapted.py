"""Passes with rows of adapters: what the parts of a model must know of them. Adapters themselves are `lora`'s."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from stage_runtime.errors import describe

#: Tokens of a pass by their adapter's number, as places on the device. None: all of the pass.
AdapterTokens: TypeAlias = Sequence[tuple[int, Tensor | None]]


class AdapterFacts(NamedTuple):
    """digest: of the files that were read. nbytes: of the weights that this process keeps."""

    digest: bytes
    nbytes: int


class AdapterRead(NamedTuple):
    """weights: on the device, in the form of the layers that have read them."""

    facts: AdapterFacts
    weights: Any


class AdapterLayers(Protocol):
    """Adapters that a model's layers can compute, by number."""

    def read(self, path: str) -> AdapterRead:
        """Read one beside passes, in any thread. Raises: AdapterRefused: it cannot be read, or does not fit."""

    def keep(self, number: int, read: AdapterRead) -> None:
        """Let passes that begin from now on compute it."""

    def drop(self, number: int) -> None:
        """Idempotent."""

    def applied(self, tokens: AdapterTokens, count: int) -> contextlib.AbstractContextManager[None]:
        """A pass of ``count`` tokens within it, in this thread, adds what the adapters give."""


class AdapterRefused(ValueError):
    """An adapter cannot be read, or the model cannot compute it. The message names the file and the place in it."""


class _Pass(threading.local):
    """The pass with adapters that this thread is in."""

    token: object | None = None


_pass = _Pass()


def current() -> object | None:
    """The pass with adapters that this thread is in. Parts that cannot add to a layer's output stand aside in it."""
    return _pass.token


@contextlib.contextmanager
def within(token: object) -> Iterator[None]:
    """Let `current` be ``token`` in this thread within it."""
    _pass.token = token
    try:
        yield
    finally:
        _pass.token = None


class AdapterReads:
    """The adapters that are read beside a model's passes, each in a thread of its own."""

    def __init__(self, layers: Callable[[], AdapterLayers | None]) -> None:
        """layers: those of the model; None: it takes none."""
        self._layers = layers
        self._reads: dict[int, Future[AdapterRead]] = {}

    def begin(self, number: int, path: str) -> Future[AdapterRead]:
        """Raises: AdapterRefused: the model takes none."""
        layers = self._layers()
        if layers is None:
            raise AdapterRefused("this engine takes no adapters")
        future: Future[AdapterRead] = Future()
        self._reads[number] = future

        def read() -> None:
            try:
                found = layers.read(path)
            except BaseException as error:  # whoever waits for the future raises it
                future.set_exception(error)
            else:
                future.set_result(found)

        try:
            threading.Thread(target=read, name="adapter", daemon=True).start()
        except RuntimeError as error:  # the limit of threads
            future.set_exception(AdapterRefused(f"{path}: {describe(error)}"))
        return future

    def keep(self, number: int) -> AdapterFacts:
        """Waits until it is read. It is called between two passes. Raises: AdapterRefused: it could not be read."""
        found = self._reads.pop(number).result()
        if (layers := self._layers()) is not None:
            layers.keep(number, found)
        return found.facts

    def drop(self, number: int) -> None:
        """Idempotent."""
        self._reads.pop(number, None)
        if (layers := self._layers()) is not None:
            layers.drop(number)
