"""Pipelines that are declared in Python: a module's `PipelineConfig(...)`, a class that carries defaults.

Here: finding and importing them. Not here: what is in them (`shapes`, `topology`). Loading one runs its code: the
author's own, on the author's machine. Called by `loading`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import operator
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from omnipipeline_spec.pipeline import PipelineConfig, class_name
from omnipipeline_spec.types.errors import UnreadableSpec
from omnipipeline_spec.validation import shapes

CLASS_NAME: Final = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.([^\W\d]\w*|<locals>))*"  # package.module:Outer.Class
MAX_SUGGESTION_BYTES: Final = 1 << 20  # larger files are not searched for a suggestion


class PythonSource(msgspec.Struct, frozen=True, kw_only=True):
    """A module, and perhaps the name in it."""

    text: str  #: The text as it was given.
    module: str  #: Path of a file, or dotted name.
    attribute: str | None

    @property
    def stem(self) -> str:
        """The name of a pipeline that has none of its own."""
        return Path(self.module).stem if self.module.endswith(".py") else self.module.rpartition(".")[2]

    def load(self) -> PipelineConfig:
        """The pipeline in the module.

        Raises: UnreadableSpec: the module cannot be imported, or has no pipeline, or several and none is named.
        """
        module = _module(self)
        if self.attribute is not None:
            value = getattr(module, self.attribute, None)
            if not isinstance(value, PipelineConfig):
                raise UnreadableSpec(f"{self.text}: {_misnamed(self.attribute, module)}")
            return value
        found = {name: value for name, value in vars(module).items() if isinstance(value, PipelineConfig)}
        distinct = {id(value): value for value in found.values()}
        if len(distinct) == 1:
            return next(iter(distinct.values()))
        if not found:
            own = [name for name, value in vars(module).items() if _is_pipeline_class(value)]
            cure = f"; write pipeline = {own[-1]}(...)" if own else ""
            raise UnreadableSpec(f"{self.text}: has no PipelineConfig(...) at module level{cure}")
        names = ", ".join(sorted(found))
        raise UnreadableSpec(f"{self.text}: has several pipelines ({names}); write {self.module}:{sorted(found)[0]}")


def _misnamed(attribute: str, module: ModuleType) -> str:
    """Why a name of a module is not a pipeline, with the cure."""
    if not hasattr(module, attribute):
        near = shapes.nearest(
            attribute, [name for name, one in vars(module).items() if isinstance(one, PipelineConfig)]
        )
        return f"has no {attribute}" + (f"; did you mean {near}?" if near else "")
    is_class = _is_pipeline_class(getattr(module, attribute))
    cure = f"; it is a class: write pipeline = {attribute}(...)" if is_class else ""
    return f"{attribute} is not a PipelineConfig{cure}"


def locate(text: str) -> PythonSource | None:
    """The Python source that an argument names; None for another file."""
    module, colon, attribute = text.rpartition(":")
    if colon and attribute.isidentifier() and (module.endswith(".py") or _dotted(module)):
        return PythonSource(text=text, module=module, attribute=attribute)
    return PythonSource(text=text, module=text, attribute=None) if text.endswith(".py") else None


def defaults(name: str, folder: Path) -> PipelineConfig:
    """A value of the class that a plain file names as ``pkg.mod:Class``, with nothing set.

    folder: of that file; modules in it are found before all others.
    Raises: UnreadableSpec: the class does not exist, or its defaults make no instance.
    """
    cls = _config_class(name, folder)
    unset: dict[str, Any] = dict.fromkeys(_required(cls))
    try:
        return cls(**unset)
    except (Exception, SystemExit) as error:
        raise _raised(f"config_cls {name}", error) from error


def _required(cls: type[PipelineConfig]) -> Iterator[str]:
    """Fields without a default. (``structs.fields`` would resolve annotations, which only the module itself can.)"""
    names, given = cls.__struct_fields__, cls.__struct_defaults__
    defaults = (msgspec.NODEFAULT,) * (len(names) - len(given)) + given
    return (name for name, default in zip(names, defaults, strict=True) if default is msgspec.NODEFAULT)


def _config_class(name: str, folder: Path) -> type[PipelineConfig]:
    text = f"config_cls {name}"
    module_name, _, path = name.partition(":")
    if not (_dotted(module_name) and _dotted(path)):
        named = {each.rpartition(":")[2]: each for each in reversed(_classes_beside(folder))}
        near = shapes.nearest(name.rpartition(":")[2], named)
        raise UnreadableSpec(
            f"{text}: write it as package.module:Class" + (f"; did you mean {named[near]}?" if near else "")
        )
    module = _module_near(module_name, text, folder)
    try:
        value: Any = operator.attrgetter(path)(module)
    except AttributeError:
        known = [each for each, held in vars(module).items() if _is_pipeline_class(held)]
        near = shapes.nearest(path, known)
        cure = f"; did you mean {module_name}:{near}?" if near else ""
        raise UnreadableSpec(f"{text}: {module_name} has no class {path}{cure}") from None
    if isinstance(value, type) and issubclass(value, PipelineConfig):
        return value
    raise UnreadableSpec(f"{text}: {path} is not a subclass of PipelineConfig")


def _is_pipeline_class(value: Any) -> bool:
    """Whether it is a class of pipelines of the author's own."""
    return isinstance(value, type) and issubclass(value, PipelineConfig) and value is not PipelineConfig


def _module_near(name: str, text: str, folder: Path) -> ModuleType:
    """The module in ``folder``, else the importable one. A file there is loaded by its path: another module may
    have its name."""
    file = folder / f"{name}.py"
    if file.is_file():
        return _module(PythonSource(text=text, module=str(file), attribute=None))
    with _importing(folder):
        try:
            return importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # importing a module may raise anything, also SystemExit
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{name}.".startswith(f"{missing}."):
                raise _raised(text, error) from error
    near = shapes.nearest(name, [file.stem for file in folder.glob("*.py")])
    raise UnreadableSpec(f"{text}: no module named {missing!r}" + (f"; did you mean {near}?" if near else ""))


def _classes_beside(folder: Path) -> list[str]:
    """Classes of the modules in a folder, as ``module:Class``, read and not imported."""
    found = [class_name(PipelineConfig)]
    for file in sorted(folder.glob("*.py")):
        try:
            text = file.read_text(encoding="utf-8") if file.stat().st_size <= MAX_SUGGESTION_BYTES else ""
            parsed = ast.parse(text)
        except (OSError, ValueError, SyntaxError):
            continue
        found += [f"{file.stem}:{node.name}" for node in parsed.body if isinstance(node, ast.ClassDef)]
    return found


def _dotted(text: str) -> bool:
    return bool(text) and all(part.isidentifier() for part in text.split("."))


def _module(source: PythonSource) -> ModuleType:
    if not source.module.endswith(".py"):
        return _import(source.module, source.text)
    path = Path(source.module).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UnreadableSpec(f"{source.text}: No such file or directory")
    module = importlib.util.module_from_spec(spec)
    with _importing(path.parent), _named(module):
        try:
            spec.loader.exec_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _raised(source.text, error) from error
    return module


def _import(module: str, text: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module and os.path.isfile(f"{module}.py"):
            attribute = text.removeprefix(module)
            raise UnreadableSpec(f"{text}: no module named {module!r}; the file is {module}.py{attribute}") from error
        raise _raised(text, error) from error


def _raised(text: str, error: BaseException) -> UnreadableSpec:
    """The error of importing a module, in one line, with the location in it. Its ``__str__`` may raise, too."""
    try:
        summary = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:
        summary = type(error).__name__
    machinery = (str(Path(__file__).parents[1]), os.path.dirname(importlib.__file__ or __file__), "<frozen")
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(machinery)]
    return UnreadableSpec(f"{text}: {summary}" + (f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""))


@contextmanager
def _importing(folder: Path) -> Iterator[None]:
    """The module's neighbours can be imported while it loads."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def _named(module: ModuleType) -> Iterator[None]:
    """The module is in ``sys.modules`` while it loads: dataclasses look there for the names in their annotations.

    Not afterwards, and not if another module has the name: a file may be called ``json.py``.
    """
    if module.__name__ in sys.modules:
        yield
        return
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        sys.modules.pop(module.__name__, None)
