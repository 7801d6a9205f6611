"""The ``aio`` half of the kubernetes package, imported without the other half, which is 9 MiB and 230 modules.

Here: only that. Called by `client`. The ``__init__`` of both packages above that half import everything that there is
(requests, oauthlib, websockets), so they are not run. A
module in them that somebody asks for later is imported then, and for a name of the ``__init__`` that is run.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any, Final

_ABOVE: Final = ("kubernetes", "kubernetes.aio")
_OF_INIT: Final = ("__version__", "__project__", "__all__")  # all that they have beside modules


def _on_demand(package: str) -> None:
    """Make a package known whose own ``__init__`` is not run; its parent is known."""
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None or spec.loader is None:
        return
    module, loader = importlib.util.module_from_spec(spec), spec.loader

    def find(name: str) -> Any:
        if importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        if name in _OF_INIT:
            loader.exec_module(module)
        if name in vars(module):
            return vars(module)[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = find
    sys.modules[package] = module
    parent, _, name = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)


for each in _ABOVE:
    _on_demand(each)

client: ModuleType = importlib.import_module("kubernetes.aio.client")
config: ModuleType = importlib.import_module("kubernetes.aio.config")
