"""An operator that exits without cleaning up before its n-th write: ``python crashing_operator.py N``."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from omnipipeline_operator import cli, settings

CRASH_EXIT_CODE = 7


class CrashAfterWrites:
    """Lets ``limit`` writes pass."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    async def take(self) -> None:
        if self._left == 0:
            os._exit(CRASH_EXIT_CODE)
        self._left -= 1


async def main() -> int:
    return await cli.serve(settings.read(os.environ, hostname=socket.gethostname()), CrashAfterWrites(int(sys.argv[1])))


if __name__ == "__main__":
    cli.configure_logging("text")
    sys.exit(asyncio.run(main()))
