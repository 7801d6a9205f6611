"""The garbage collector of a coordinator's process, in a process of its own: its settings are the interpreter's."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from stage_runtime.processes import collecting

class Cycle:
    def __init__(self):
        self.own = self

before = Cycle()
collecting.settle()
assert gc.get_freeze_count() > 1000
later = Cycle()
died = weakref.ref(later)
del later
kept = []
while died() is not None:
    kept.append([])
    assert len(kept) <= 2 * collecting.YOUNG, "nothing collects it"
print("collected")
"""


def test_cycles_made_while_it_serves_are_collected() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "collected\n"), ran.stderr
