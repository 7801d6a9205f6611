"""The coordinator holds relays and must stay without torch."""

from __future__ import annotations

import subprocess
import sys


def test_relays_carry_values_in_a_process_that_never_imports_torch() -> None:
    program = """
import asyncio, sys
import numpy as np
from stage_runtime.payloads import encoding
from stage_runtime.relays.dispatch import Relays

async def main():
    relays = Relays(loop=asyncio.get_running_loop(), incarnation="x", on_release=print)
    extracted = encoding.extract({"a": np.ones(5), "b": b"x" * 20_000})
    encoding.restore(extracted.value_bytes, extracted.refs, extracted.flat(), torch=False)
    relays.close()

asyncio.run(main())
sys.exit(3 if "torch" in sys.modules else 0)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0
