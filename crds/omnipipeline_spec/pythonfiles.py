"""Pipelines that are declared in Python: a module's `PipelineConfig(...)`, a class that carries defaults.

Here: finding and importing them. Not here: what is in them (`shapes`, `topology`). Loading one runs its code: the
author's own, on the author's machine. Called by `loading`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import msgspec

from omnipipeline_spec.errors import UnreadableSpec
from omnipipeline_spec.pipeline import PipelineConfig


class PythonSource(msgspec.Struct, frozen=True, kw_only=True):
    """A module, and perhaps the name in it."""

    text: str  #: As it was given.
    module: str  #: Path of a file, or dotted name.
    attribute: str | None

    @property
    def stem(self) -> str:
        """What to call a pipeline that has no name of its own."""
        return Path(self.module).stem if self.module.endswith(".py") else self.module.rpartition(".")[2]

    def load(self) -> PipelineConfig:
        """The pipeline in the module.

        Raises: UnreadableSpec: the module cannot be imported, or has no pipeline, or several and none is named.
        """
        module = _module(self)
        if self.attribute is not None:
            value = getattr(module, self.attribute, None)
            if not isinstance(value, PipelineConfig):
                raise UnreadableSpec(f"{self.text}: {self.attribute} is no PipelineConfig")
            return value
        found = {name: value for name, value in vars(module).items() if isinstance(value, PipelineConfig)}
        distinct = {id(value): value for value in found.values()}
        if len(distinct) == 1:
            return next(iter(distinct.values()))
        if not found:
            raise UnreadableSpec(f"{self.text}: has no PipelineConfig(...) at module level")
        names = ", ".join(sorted(found))
        raise UnreadableSpec(f"{self.text}: has several pipelines ({names}); write {self.module}:{sorted(found)[0]}")


def locate(text: str) -> PythonSource | None:
    """The Python source that a command line means; None for a file that is none."""
    module, colon, attribute = text.rpartition(":")
    if colon and attribute.isidentifier() and (module.endswith(".py") or _dotted(module)):
        return PythonSource(text=text, module=module, attribute=attribute)
    return PythonSource(text=text, module=text, attribute=None) if text.endswith(".py") else None


def config_class(name: str) -> type[PipelineConfig]:
    """The class of pipelines that a saved file names, as ``pkg.mod:Class`` or, once imported, by its bare name.

    Raises: UnreadableSpec: there is none.
    """
    module, colon, attribute = name.rpartition(":")
    if colon:
        value = getattr(_import(module, f"config_cls {name}"), attribute, None)
        if isinstance(value, type) and issubclass(value, PipelineConfig):
            return value
        raise UnreadableSpec(f"config_cls {name}: {attribute} is no class of PipelineConfig")
    for cls in _subclasses(PipelineConfig):
        if cls.__qualname__ == name:
            return cls
    raise UnreadableSpec(f"config_cls {name}: no class of that name is imported; write it as package.module:{name}")


def _subclasses(cls: type[PipelineConfig]) -> Iterator[type[PipelineConfig]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


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
    with _importing(path.parent):
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise UnreadableSpec(f"{source.text}: {type(error).__name__}: {error}") from error
    return module


def _import(module: str, text: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise UnreadableSpec(f"{text}: {type(error).__name__}: {error}") from error


@contextmanager
def _importing(folder: Path) -> Iterator[None]:
    """The module's neighbours can be imported while it loads."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
