"""Progress bars that libraries draw by tqdm while a stage loads, as reports of its loading.

huggingface_hub (downloads), transformers (weights) and authors' own loops use tqdm. While `reported` is open, their
bars write nothing, also where no terminal would have shown them. Not here: where reports go (`StageContext.progress`).
Called by `loading` and by engine processes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, Final, Protocol

from omnipipeline_spec.types.errors import clipped, printable
from stage_runtime.errors import describe

MODULE: Final = "tqdm.std"
FINEST: Final = 0.01  # of the whole between two reports: no bar on a terminal shows less
BYTES: Final = "B"  # tqdm's unit of downloads
MOST_SHOWN: Final = 200  # characters of a bar's description
_FIRST_OPTION: Final = 4  # of tqdm's positional arguments, the first of how it writes


log = logging.getLogger(__name__)


class Report(Protocol):
    """total: 0 where it is not known. unit: ``B`` for bytes, else as a noun such as ``it``."""

    def __call__(self, message: str, done: float, total: float, unit: str) -> object: ...


class _Loading:
    """One load: its open bars, of which one is shown."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._lock = threading.RLock()  # a bar may be collected, and so closed, while another reports
        self._bars: dict[int, tuple[str, float, float, str]] = {}  #: The oldest first.
        self._last: tuple[str, float, float] = ("", 0.0, 0.0)

    def shown(self, bar: Any) -> None:
        """A bar would have drawn itself. Bytes say more than files, and an outer loop more than an inner one."""
        message = clipped(printable(str(bar.desc or "").rstrip(": ")), most=MOST_SHOWN)
        if bar.unit == BYTES:
            message = message.rpartition("/")[2]  # a path's end is the file's name
        now = (message, _number(bar.n), _number(bar.total or 0), clipped(printable(str(bar.unit)), most=MOST_SHOWN))
        with self._lock:
            self._bars[id(bar)] = now
            unfinished = [one for one in self._bars.values() if one is now or one[1] < one[2]]
            chosen = next((one for one in unfinished if one[3] == BYTES), unfinished[0])
            if now is chosen and self._is_news(now):
                self._last = now[:3]
                self._report(*now)

    def closed(self, bar: Any) -> None:
        with self._lock:
            self._bars.pop(id(bar), None)

    def passed_on(self, message: str, done: float, total: float, unit: str) -> None:
        self._report(message, done, total, unit)

    def _is_news(self, now: tuple[str, float, float, str]) -> bool:
        message, done, total, _unit = now
        was, had, of = self._last
        if message != was or total != of or done < had:
            return True
        return done - had >= FINEST * total if total else done > had


#: Thread that loads -> its load. Only `reported` changes it.
_loads: dict[int, _Loading] = {}


@contextlib.contextmanager
def reported(report: Report) -> Iterator[None]:
    """Bars of this thread, and of threads that it starts, go to ``report``, in any of them.

    A bar of a further thread counts for the only load at that time; where several stages load, it is not shown.
    """
    _observe()
    thread = threading.get_ident()
    before = _loads.get(thread)
    _loads[thread] = _Loading(report)
    try:
        yield
    finally:
        if before is None:
            del _loads[thread]
        else:
            _loads[thread] = before


def pass_on(message: str, done: float, total: float, unit: str) -> None:
    """Report a bar of another process for the load of this thread; nothing where none is."""
    loading = _loads.get(threading.get_ident())
    if loading is not None:
        loading.passed_on(clipped(printable(message), most=MOST_SHOWN), _number(done), _number(total), printable(unit))


def _number(value: Any) -> float:
    """A bar's count; 0: it is negative or not finite.

    Raises: TypeError, ValueError, OverflowError: it is not a number.
    """
    number = float(value)
    return max(number, 0.0) if math.isfinite(number) else 0.0


def _current() -> _Loading | None:
    found = _loads.get(threading.get_ident())
    if found is not None:
        return found
    every = list(_loads.values())
    return every[0] if len(every) == 1 else None


def _observe() -> None:
    """Now where tqdm is imported, else when it is: importing it takes longer than most stages take to load."""
    if MODULE in sys.modules:
        _install(sys.modules[MODULE])
    elif not any(isinstance(one, _WhenImported) for one in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Installing(spec.loader)
        return spec


class _Installing(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _install(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # `get_source` and its like, for tracebacks


class _Nowhere:
    """The file of a bar that is reported."""

    encoding = "utf-8"

    def write(self, _text: str) -> int:
        return 0

    def flush(self) -> None: ...


def _install(module: ModuleType) -> None:
    """Let the bars of a class, and of its subclasses, ask for the load that they belong to."""
    kind: Any = module.tqdm
    if getattr(kind.__init__, "reports_loading", False):
        return
    init, display, close = kind.__init__, kind.display, kind.close

    @functools.wraps(init)
    def reporting(self: Any, *args: Any, **options: Any) -> None:
        loading = _current() if options.get("disable") is not True and len(args) <= _FIRST_OPTION else None
        if loading is not None:
            self.omni_loading = loading
            options |= {"disable": False, "file": _Nowhere()}
        init(self, *args, **options)

    @functools.wraps(display)
    def displayed(self: Any, *args: Any, **options: Any) -> Any:
        loading = getattr(self, "omni_loading", None)
        if loading is None:
            return display(self, *args, **options)
        try:
            loading.shown(self)
        except Exception as error:  # an author's values may raise anything, and a bar is not worth a load
            log.debug("a bar is not shown: %s", describe(error))
        return True

    @functools.wraps(close)
    def closed(self: Any) -> None:
        close(self)
        loading = getattr(self, "omni_loading", None)
        if loading is not None:
            loading.closed(self)

    reporting.reports_loading = True  # type: ignore[attr-defined]
    kind.__init__, kind.display, kind.close = reporting, displayed, closed
