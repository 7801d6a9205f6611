"""The adapters of one engine by their names: loaded, found for requests, and dropped when none needs them any more.

All calls on the engine's thread, but for `Adapters.find`. Weights are the model runner's, by the adapter's number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

import msgspec

from stage_runtime.engines.autoregressive.lora.settings import LoRASettings, name_problem, path_problem
from stage_runtime.errors import InvalidRequest, RequestError

log = logging.getLogger(__name__)

Post: TypeAlias = Callable[[Callable[[], None]], object]
SALT_MARK: Final = b"\xff"  # in no text: no client's ``cache_salt`` is an adapter's


class Adapter(msgspec.Struct, frozen=True, eq=False):
    """One that is loaded. number: never another one's. digest: of its files; equal ones give equal keys and values."""

    number: int
    name: str
    path: str
    digest: bytes
    nbytes: int

    def salt(self, client: str) -> bytes:
        """Salt the hashes of blocks: they are this adapter's, and those of the client's ``cache_salt``."""
        return SALT_MARK + self.digest + client.encode()


class Adapters:
    def __init__(self, settings: LoRASettings, call: Callable[[Callable[[Any], Any]], Future[Any]]) -> None:
        """call: a function with the model runner, after the steps that were given before."""
        self._settings = settings
        self._call = call
        self._last = 0  #: The number given last.
        self._named: Mapping[str, Adapter] = {}  #: Replaced whole: `find` reads it in any thread.
        self._reading: dict[str, int] = {}  #: Numbers of those that are being loaded; none of them is in ``requests``.
        self._retired: dict[int, Adapter] = {}  #: Unloaded, and computed for requests that came before.
        self.requests: dict[int, int] = {}  #: How many have come, by number.

    @property
    def names(self) -> list[str]:
        return sorted(self._named)

    @property
    def paths(self) -> dict[str, str]:
        """Their folders, by name."""
        return {name: self._named[name].path for name in self.names}

    @property
    def retired(self) -> bool:
        """Some wait for the end of their requests."""
        return bool(self._retired)

    def find(self, name: str, digest: bytes = b"") -> Adapter:
        """Find one by its name, in any thread. digest: it must be of these files; empty: of any.

        Raises: RequestError: not_found.
        """
        found = self._named.get(name)
        if found is None:
            if name in self._reading:
                raise _not_found(f"the adapter {name!r} is being loaded")
            there = ", ".join(self.names) or "none"
            raise _not_found(f"no adapter {name!r:.150} is loaded here; loaded: {there:.1000}")
        if digest and digest != found.digest:
            raise _not_found(f"the adapter {name!r} that is loaded here has other files")
        return found

    def enter(self, adapter: Adapter) -> None:
        """A request of it is to be computed. Raises: RequestError: not_found: it was dropped meanwhile."""
        if adapter.number not in self.requests:
            raise _not_found(f"the adapter {adapter.name!r} was unloaded")
        self.requests[adapter.number] += 1

    def load(self, name: object, path: object) -> list[str]:
        """Waits until it is read. Returns: the names of all.

        Raises: InvalidRequest: it cannot be loaded; nothing is changed then.
        """
        posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        done = self.begin(name, path, posted.put)
        posted.get()()
        return done.result()

    def begin(self, name: object, path: object, post: Post) -> Future[list[str]]:
        """Load one while steps go on. post: has a function called between two steps, from any thread.

        Returns: to come, the names of all, or InvalidRequest: it cannot be loaded; nothing is changed then.
        Raises: InvalidRequest: the same, where it is known at once.
        """
        name, path = self._fitting(name, path)
        self._last += 1
        number, done = self._last, Future[list[str]]()
        try:
            reading = self._call(lambda runner: runner.read_adapter(number, path)).result()
        except ValueError as error:
            raise InvalidRequest(f"load_adapter: {error}") from error
        self._reading[name] = number
        reading.add_done_callback(lambda _: post(partial(self._keep, name, path, number, done)))
        return done

    def _fitting(self, name: object, path: object) -> tuple[str, str]:
        """Raises: InvalidRequest: it cannot be loaded now."""
        problem = name_problem(name) or path_problem(path)
        if problem is not None or not isinstance(name, str) or not isinstance(path, str):
            raise InvalidRequest(f"load_adapter: {problem}")
        if path != self._settings.modules.get(name) and (problem := self._settings.outside(path)) is not None:
            raise InvalidRequest(f"load_adapter: {problem}")
        if name in self._named:
            raise InvalidRequest(f"load_adapter: an adapter {name!r} is loaded: unload it first")
        if name in self._reading:
            raise InvalidRequest(f"load_adapter: an adapter {name!r} is being loaded")
        if len(self.requests) + len(self._reading) >= self._settings.most:
            waits = f", {len(self._retired)} of them until their requests end" if self._retired else ""
            raise InvalidRequest(f"load_adapter: max_loras={self._settings.most} are loaded{waits}")
        return name, path

    def _keep(self, name: str, path: str, number: int, done: Future[list[str]]) -> None:
        """It is read, or could not be."""
        del self._reading[name]
        try:
            facts = self._call(lambda runner: runner.keep_adapter(number)).result()
        except Exception as error:
            self._call(partial(_drop, number))
            done.set_exception(InvalidRequest(f"load_adapter: {error}") if isinstance(error, ValueError) else error)
            return
        self.requests[number] = 0
        self._named = {**self._named, name: Adapter(number, name, path, facts.digest, facts.nbytes)}
        log.info("adapter %s is loaded from %s: %d bytes", name, path, facts.nbytes)
        done.set_result(self.names)

    def unload(self, name: object, in_use: Iterable[int]) -> list[str]:
        """No new request gets it; those that are being computed keep it. in_use: as of `drop_unused`.

        Returns: the names of the others. Raises: InvalidRequest: no adapter has this name.
        """
        if isinstance(name, str) and name in self._reading:
            raise InvalidRequest(f"unload_adapter: the adapter {name!r} is being loaded")
        if not isinstance(name, str) or name not in self._named:
            raise InvalidRequest(f"unload_adapter: no adapter {name!r:.150}; loaded: {', '.join(self.names) or 'none'}")
        gone = self._named[name]
        self._named = {other: one for other, one in self._named.items() if other != name}
        self._retired[gone.number] = gone
        self.drop_unused(in_use)
        log.info("adapter %s is unloaded", name)
        return self.names

    def drop_unused(self, in_use: Iterable[int]) -> None:
        """Free the weights of those that are unloaded. in_use: numbers of the adapters of unfinished requests."""
        for number in self._retired.keys() - set(in_use):
            del self._retired[number], self.requests[number]
            self._call(partial(_drop, number))

    def gauges(self) -> dict[str, int]:
        """The numbers for `/metrics`, in any thread."""
        named, requests = self._named, self.requests
        return {
            "adapters": len(requests),
            "adapter_bytes": sum(one.nbytes for one in (*named.values(), *list(self._retired.values()))),
            **{f"adapter_requests_total.{name}": requests.get(one.number, 0) for name, one in named.items()},
        }


def _drop(number: int, runner: Any) -> None:
    runner.drop_adapter(number)


def _not_found(problem: str) -> RequestError:
    return RequestError("not_found", f"model: {problem}", param="model")
