"""Python's debugger on descriptors of a terminal, for several threads. Called by `breakpoints`, which imports it when a
line stops: pdb is of no use to processes that nobody debugs.
"""

from __future__ import annotations

import os
import pdb
from threading import Lock
from typing import Any

_turn = Lock()


class Debugger(pdb.Pdb):
    """Requests of several threads that have stopped have the terminal one after the other."""

    def __init__(self, reads: int, writes: int) -> None:
        """reads, writes: descriptors; copies of them are closed with the debugger."""
        super().__init__(stdin=open(os.dup(reads)), stdout=open(os.dup(writes), "w"), nosigint=True)

    def interaction(self, *what: Any, **options: Any) -> None:
        with _turn:
            super().interaction(*what, **options)
