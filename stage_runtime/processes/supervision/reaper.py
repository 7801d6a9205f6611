"""Ends what processes of a run have left behind: ``python -I -S reaper.py FD RUN`` waits until the run is over.

A process dies with its parent if it asked the kernel for that (`parent_death`), and then its own children go on: a
loader's workers, ffmpeg, whatever an author has started, perhaps in a session of its own. All of them have the
environment that they began with. So each process of ours is given ``OMNI_RUN`` (the run's folder) and ``OMNI_LIFE``
(new for every process), and a process that has one of these is ended with the run, or with that process.

Here: finding and ending them, and the program that does it when `omni up` is gone. Not here: anything that needs an
import beyond the standard library (it is run without site-packages). Called by `local`, `children` and `rundir`. Linux.
"""

import contextlib
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping

RUN, LIFE = "OMNI_RUN", "OMNI_LIFE"
AGAIN_S = 0.02


def end(name: str, value: str, *, looks: int = 2, within_s: float = 10.0) -> None:
    """Kill every process of this user whose environment began with ``name=value``, but this one.

    It repeats until none was found so many times: a killed process may have started another one just before.
    """
    marker = f"{name}={value}".encode()
    until, quiet = time.monotonic() + within_s, 0
    while True:
        quiet = 0 if _kill(marker) else quiet + 1
        if quiet == looks or time.monotonic() > until:
            return
        time.sleep(AGAIN_S)


def remove_sockets(environ: Mapping[str, str], life: str) -> None:
    """Delete the folders for sockets that a process of this environment has left (`settings.socket_folders`)."""
    for where in {environ.get(RUN) or tempfile.gettempdir(), environ.get("TMPDIR") or tempfile.gettempdir()}:
        for folder in glob.glob(os.path.join(glob.escape(where), f"sockets-{life}-*")):
            shutil.rmtree(folder, ignore_errors=True)


def start(run: str) -> "tuple[subprocess.Popen[bytes], int]":
    """Have a process wait for the end of this one. Returns it and a descriptor: closing that ends the run."""
    theirs, ours = os.pipe()
    try:
        command = [sys.executable, "-I", "-S", __file__, str(theirs), run]
        # Nothing of the environment: it must not find itself.
        process = subprocess.Popen(
            command, env={}, pass_fds=(theirs,), stdin=subprocess.DEVNULL, start_new_session=True
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return process, ours


def main() -> None:
    descriptor, run = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(descriptor, 1):  # nothing is written: it returns when the last holder of the other end is gone
        pass
    end(RUN, run)


def _kill(marker: bytes) -> bool:
    """Look once. True if a process was killed."""
    found = False
    for pid in _pids():
        with contextlib.suppress(OSError):  # it is gone, or not ours
            descriptor = os.pidfd_open(pid)
            try:
                if _has(pid, marker):  # looked at after the descriptor was opened: it is the same process
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    found = True
            finally:
                os.close(descriptor)
    return found


def _pids() -> Iterator[int]:
    own = os.getpid()
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != own:
            yield int(entry)


def _has(pid: int, marker: bytes) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return marker in file.read().split(b"\0")


if __name__ == "__main__":
    main()
