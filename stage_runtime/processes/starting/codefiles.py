"""``spec.code.inline`` as files that Python can import.

Here: writing them where no other user can write, and putting that folder on the path. Not here: checking their names
(the contract does). Called by `children`, which does it once for all processes, and by `__main__` in a process that
was started without a supervisor.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from stage_runtime.errors import naming


def write(code: Mapping[str, str], folder: Path) -> None:
    """Write the files into ``folder``, which is made, 0700, when it is not there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in code.items():
        target = folder / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with naming(target):
            target.write_text(text, encoding="utf-8")


def put_on_path(code: Mapping[str, str], written: Path | None) -> None:
    """Make ``code`` importable in this process; a no-op when ``written``: a supervisor did it."""
    if written is not None or not code:
        return
    folder = tempfile.mkdtemp(prefix="omni-code-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write(code, Path(folder))
    sys.path.insert(0, folder)
