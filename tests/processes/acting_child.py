"""A child process that does what its arguments say, in order; the supervisor's tests start it.

``loading`` | ``registered`` | ``ready`` | ``fail`` | ``print TEXT`` | ``exit CODE`` | ``kill`` (itself) |
``spin SECONDS`` | ``sleep`` |
``deaf`` (ignores SIGTERM) | ``polite`` (drains on SIGTERM for 0.3 s, ends with 0) | ``spawn FILE`` (a grandchild; its
pid goes to FILE) | ``drains FILE`` (drains on SIGTERM until FILE is there, ends with 0; a second one kills it) |
``stamp FILE`` (adds a line with the time and pid) |
``nap SECONDS`` | ``trace`` (prints stacks on SIGABRT) | ``await FILE`` (until it is there) |
``sockets FILE`` (makes a folder for sockets; an endpoint in it goes to FILE) |
``broken`` (reports a failure, and goes on) | ``scribble`` (writes half a line of bytes that are not text to the pipe)
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from stage_runtime.processes.supervision import statuspipe
from stage_runtime.sockets import multipart

FD = int(os.environ["OMNI_STATUS_FD"])


def drain(_number: int, _frame: object) -> None:
    statuspipe.report(FD, statuspipe.Draining())
    time.sleep(0.3)
    print("drained", flush=True)
    os._exit(0)


def drain_until(ended: Path, _number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("draining", flush=True)
    while not ended.exists():
        time.sleep(0.01)
    print("drained", flush=True)
    os._exit(0)


def broken_factory() -> None:
    raise ValueError("no such voice: 'bob'")


def main(script: list[str]) -> None:
    while script:
        match script.pop(0):
            case "loading":
                statuspipe.report(FD, statuspipe.Loading(stage="s", message="weights 1/2"))
            case "registered":
                statuspipe.report(FD, statuspipe.Registered())
            case "ready":
                statuspipe.report(FD, statuspipe.Loaded())
            case "fail":
                try:
                    broken_factory()
                except ValueError as error:
                    statuspipe.report(FD, statuspipe.failed(error, stage="s"))
                sys.exit(1)
            case "broken":
                statuspipe.report(FD, statuspipe.failed(RuntimeError("the engine is broken"), stage="s"))
            case "scribble":
                os.write(FD, b'{"event":"loading","stage":"\xff"}')
            case "await":
                wanted = Path(script.pop(0))
                while not wanted.exists():
                    time.sleep(0.01)
            case "print":
                print(script.pop(0), flush=True)
            case "exit":
                sys.exit(int(script.pop(0)))
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "spin":
                end = time.monotonic() + float(script.pop(0))
                while time.monotonic() < end:
                    pass
            case "nap":
                time.sleep(float(script.pop(0)))
            case "sleep":
                time.sleep(600)
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "polite":
                signal.signal(signal.SIGTERM, drain)
            case "drains":
                signal.signal(signal.SIGTERM, functools.partial(drain_until, Path(script.pop(0))))
            case "trace":
                faulthandler.enable()
            case "spawn":
                grandchild = subprocess.Popen(["sleep", "600"])
                Path(script.pop(0)).write_text(str(grandchild.pid))
            case "sockets":
                Path(script.pop(0)).write_text(multipart.Folder().endpoint())
            case "stamp":
                with open(script.pop(0), "a") as stamps:
                    stamps.write(f"{time.monotonic()} {os.getpid()}\n")
            case unknown:
                raise SystemExit(f"unknown order {unknown}")


main(sys.argv[1:])
