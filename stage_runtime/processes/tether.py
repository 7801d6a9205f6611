"""Runs a command that dies with the process that started it: ``python -I -S tether.py PARENT COMMAND…``.

Here: the few lines between fork and the real program. They stand in a program of their own, not in a `preexec_fn`:
after a fork of a process with threads only exec is safe. Not here: anything that needs an import beyond the standard
library (this file is run without site-packages, in about 10 ms). Called by `children`.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept across exec of a program without set-uid


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above could tell the kernel
        os._exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
