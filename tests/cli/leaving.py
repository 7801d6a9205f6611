"""A stage that starts processes and leaves them behind, in every way that there is."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from typing import Any

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
#: A child of its own that ends at once: what it has started is nobody's child any more.
TWICE = [sys.executable, "-I", "-S", "-c", f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)"]


def nap() -> None:
    time.sleep(600)


def create() -> Any:
    subprocess.Popen(SLEEP)
    subprocess.Popen(SLEEP, start_new_session=True)
    subprocess.Popen(TWICE).wait()
    multiprocessing.get_context("spawn").Process(target=nap, daemon=True).start()
    if os.fork() == 0:
        os.setsid()
        nap()
    return lambda payload: os.getpid()
