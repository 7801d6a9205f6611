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
        facts = getattr(module, "__dict__", {})  # some modules answer for every attribute
        places = [facts.get("__file__"), *(facts.get("__path__") or ())]
        if any(isinstance(place, str) and Path(place).is_relative_to(folder) for place in places):
            del sys.modules[name]
