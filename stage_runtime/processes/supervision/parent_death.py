"""Ends a process with its parent: ``python -I -S parent_death.py PARENT COMMAND…`` runs a command that dies with its
starter.

Here: the two requests to Linux about it. A program of its own runs between fork and the real program, not in a
`preexec_fn`: after a fork of a process with threads only exec is safe. Not here: anything that needs an import beyond
the standard library (this file is run without site-packages, in about 10 ms). Called by `children` and `pod`.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept across exec of a program without set-uid
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends before them, as PID 1 of a container is."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel had that request
        os._exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
