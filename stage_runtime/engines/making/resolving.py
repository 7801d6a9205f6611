"""Finds the function that a dotted name names. An error about a name gives the nearest one that exists.

A hook must also take the arguments that the runtime will call it with; it is not called here.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from omnipipeline_spec.validation import shapes
from stage_runtime import imports
from stage_runtime.engines.simple import is_async, is_generator
from stage_runtime.errors import ConfigurationError

NEAR_MODULE: Final = 0.75  # of names of modules, of which an environment has thousands
#: Hook, by its name in a pipeline's file -> what it is called with.
HOOKS: Final[Mapping[str, tuple[str, ...]]] = {
    "routeFn": ("request_id", "output"),
    "waitForFn": ("request_id", "from_stage", "payload"),
    "mergeFn": ("inputs",),
    "projectPayload": ("payload",),
    "streamDoneToFn": ("request_id", "output"),
    "terminalStagesFn": ("request",),
}


def resolve(name: str, *, field: str) -> Callable[..., Any]:
    """The function that ``pkg.mod:fn`` or ``pkg.mod.fn`` names.

    field: what the error names (``stages.thinker.factory``).
    Raises: ConfigurationError: no such module or attribute, or nothing callable. An error inside the module itself
        passes through, with its own traceback.
    """
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not module_name or module_name.startswith(".") or not attribute:
        raise ConfigurationError(f"{field}: {name!r} is not a pkg.mod:function")
    try:
        with imports.uncollected():
            found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigurationError(f"{field}: {_no_module(error.name, name)}") from error
        raise
    holder = ""
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = shapes.nearest(part, _functions_of(found))
            meant = f"; did you mean {holder}{near}?" if near else ""
            raise ConfigurationError(f"{field}: {module_name!r} has no {attribute!r}{meant}")
        holder += f"{part}."
        found = getattr(found, part)
    if not callable(found):
        raise ConfigurationError(f"{field}: {name!r} is not a function: it is of type {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def resolve_hook(name: str, hook: str, *, field: str) -> Callable[..., Any]:
    """The same as `resolve`, for a function that is called with the arguments that `HOOKS` lists.

    Raises: ConfigurationError: also where it cannot be called so, or is async or a generator.
    """
    function = resolve(name, field=field)
    wanted = f"{hook} is a plain function ({', '.join(HOOKS[hook])}) that returns"
    if is_async(function) or is_generator(function):
        raise ConfigurationError(f"{field}: {name!r} is async or a generator; {wanted}")
    problem = takes(function, len(HOOKS[hook]))
    if problem is not None:
        raise ConfigurationError(f"{field}: {name!r} cannot be called: {problem}; {wanted}") from problem
    return function


def takes(fn: Callable[..., Any], count: int) -> TypeError | None:
    """Why ``fn`` cannot be called with so many arguments; None: it can."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin: its call raises the error
        return None
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        return error
    return None


def _no_module(missing: str, name: str) -> str:
    """The message for a missing module: the nearest name that exists, or where the module is instead."""
    package, _, last = missing.rpartition(".")
    problem = f"no module named {missing!r} (in {name!r})"
    path = getattr(sys.modules.get(package), "__path__", ()) if package else None
    known = {module.name for module in pkgutil.iter_modules(path)} - {last}
    near = difflib.get_close_matches(last, known, n=1, cutoff=NEAR_MODULE)
    if near:
        return f"{problem}; did you mean {package}{'.' if package else ''}{near[0]}?"
    here = os.path.join(os.getcwd(), last)
    if not package and (os.path.isfile(f"{here}.py") or os.path.isdir(here)):
        return f"{problem}; it is in the working directory, and stages import from the pipeline file's folder"
    return problem


def _functions_of(holder: Any) -> Iterator[str]:
    """The names in a module or a class that could have been meant."""
    own = getattr(holder, "__name__", None)
    for name, value in getattr(holder, "__dict__", {}).items():
        if callable(value) and (not inspect.ismodule(holder) or getattr(value, "__module__", own) == own):
            yield name
