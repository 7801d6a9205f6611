"""Modules that a test has imported from a folder of its own."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["forget_modules_of"]


def forget_modules_of(folder: Path) -> None:
    """Drop the folder's modules, so that the next test imports its own. All others stay: a second copy of a library has
    classes that the first one's ``except`` does not know.
    """
    for name, module in list(sys.modules.items()):
        places = [getattr(module, "__file__", None), *list(getattr(module, "__path__", ()))]
        if any(place is not None and Path(place).is_relative_to(folder) for place in places):
            del sys.modules[name]
