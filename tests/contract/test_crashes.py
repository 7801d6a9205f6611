"""Termination messages, and the cause of a crash in what a program has printed last."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_spec import crashes

CHAINED = """
def load():
    open("/models/weights")
try:
    load()
except OSError as error:
    raise RuntimeError("the model cannot be loaded") from error
"""
HANDLING = """
try:
    {}["first"]
except KeyError:
    raise ValueError("no stage is called first")
"""
MANY_LINES = """
class RepositoryNotFoundError(Exception): pass
raise RepositoryNotFoundError('''401 Client Error. (Request ID: Root=1-2)

Repository Not Found for url: https://hub/api/models/x.
Please make sure you specified the correct `repo_id`, an error is likely.
If this is a private repository, make sure to pass a token''')
"""
GROUP = """
raise ExceptionGroup("unhandled errors in a TaskGroup", [OSError("no weights")])
"""
DESTRUCTOR = """
class Late:
    def __del__(self): raise RuntimeError("too late")
kept = Late()
raise ValueError("no weights")
"""
THREADS = """
import faulthandler, threading, ctypes
import msgspec
faulthandler.enable()
def crash():
    ctypes.string_at(0)
threading.Thread(target=threading.Event().wait, daemon=True).start()
crash()
"""
ABORTED = """
import faulthandler, os, sys
faulthandler.enable()
print("terminate called after throwing an instance of 'c10::Error'", file=sys.stderr)
print("  what():  CUDA error: no kernel image is available for execution on the device", file=sys.stderr)
print("Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43", file=sys.stderr, flush=True)
os.abort()
"""
NOISE_AFTER = """
import sys
try:
    raise ValueError("no weights")
finally:
    print("leaked semaphore objects to clean up at shutdown", file=sys.stderr)
"""


@pytest.mark.proves("failed-start")
@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("raise ValueError('no weights')", "ValueError: no weights"),
        ("raise ValueError", "ValueError"),
        ("raise ValueError('\\nthe weights are of another model')", "ValueError: the weights are of another model"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f(:\n    pass", "SyntaxError: invalid syntax"),
        (CHAINED, "RuntimeError: the model cannot be loaded (because of FileNotFoundError: [Errno 2] No such file"),
        (HANDLING, "ValueError: no stage is called first"),
        (MANY_LINES, "RepositoryNotFoundError: 401 Client Error. (Request ID: Root=1-2)"),
        (GROUP, "OSError: no weights"),
        (DESTRUCTOR, "ValueError: no weights"),
        (NOISE_AFTER, "ValueError: no weights"),
        (THREADS, "Fatal Python error: Segmentation fault in string_at (__init__.py:"),
        (ABORTED, "c10::Error: CUDA error: no kernel image is available for execution on the device"),
        ("import sys; sys.exit('cannot bind port 8000')", "cannot bind port 8000"),
        ("import faulthandler, os; faulthandler.enable(); os.abort()", "Fatal Python error: Aborted in <module>"),
    ],
)
def test_the_cause_of_a_real_program_s_end_is_found(program: str, cause: str) -> None:
    stderr = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stderr
    assert crashes.cause(stderr).startswith(cause), stderr
    tail = stderr.encode()[-2048:].decode(errors="replace")  # what the kubelet keeps of a log
    assert crashes.cause(tail).startswith(cause)
    ranks = "\n".join(f"[rank1]: {line}" for line in stderr.splitlines())
    assert crashes.cause(ranks).startswith(cause)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", ""),
        ("\n \n", ""),
        (
            "a.out: main.cpp:7: int main(): Assertion `n > 0' failed.\nFatal Python error: Aborted\n",
            "Assertion `n > 0'",
        ),
        (
            "double free or corruption (out)\nFatal Python error: Aborted\n\nExtension modules: m (total: 1)",
            "double free",
        ),
        (
            "thread 'main' (7) panicked at src/lib.rs:4:5:\nno weights\nnote: run with `RUST_BACKTRACE=1`",
            "panicked: no",
        ),
        ("panic: no weights\n\ngoroutine 1 [running]:\nmain.main()\n\t/x.go:4 +0x1d", "panic: no weights"),
        ("loading\npython: can't open file '/app/run.py': [Errno 2] No such file or directory", "python: can't open"),
        ("/entrypoint.sh: line 3: modprobe: command not found\nbye", "/entrypoint.sh: line 3: modprobe: command not"),
        ("exec /usr/bin/python3: exec format error", "exec /usr/bin/python3: exec format error"),
        ("usage: serve [-h]\nserve: error: unrecognized arguments: supervisor", "serve: error: unrecognized"),
        (
            '{"level":"info","logger":"uvicorn.error","message":"up"}\n{"level":"error","message":"port in use"}',
            "port in",
        ),
        (
            '{"level":"error","message":"stage a","traceback":"Traceback (most recent call last):\\n'
            '  File \\"x\\", line 1, in f\\nOSError: gone"}\n{"level":"info","message":"bye"}',
            "OSError: gone",
        ),
        (
            "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create "
            "failed: unable to start container process: error during container init: "
            'exec: "python": executable file not found in $PATH: unknown',
            'exec: "python": executable file not found in $PATH',
        ),
        ("\x1b[31mValueError: no weights\x1b[0m\n", "ValueError: no weights"),
        ("10%\r50%\rkilled while loading", "killed while loading"),
    ],
)
def test_the_cause_is_found_in_what_other_programs_say(text: str, cause: str) -> None:
    assert cause in crashes.cause(text)
    assert bool(crashes.cause(text)) == bool(text.strip())


def test_the_first_line_of_a_message_of_ours_is_its_cause_whatever_stands_below() -> None:
    stacks = "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n" + "  File x\n" * 2000
    message = crashes.message("a: no progress for 60 s", stacks + "Extension modules: msgspec._core")
    assert len(message) <= crashes.MAX_BYTES
    assert crashes.cause(message.decode()) == "a: no progress for 60 s"
    assert message.decode().endswith("Extension modules: msgspec._core")


@given(cause=st.text(), details=st.text())
def test_any_message_is_bounded_utf8_and_keeps_its_cause(cause: str, details: str) -> None:
    message = crashes.message(cause, details * 200)
    assert len(message) <= crashes.MAX_BYTES
    kept = crashes.cause(message.decode())
    whole = crashes.one_line(cause)
    if whole:
        assert kept == whole or (kept.endswith("…") and whole.startswith(kept[:-1]))


@given(
    st.lists(st.sampled_from([*"aF: \n\t{}[]|+-\"'.\\0", "Traceback (most recent call last):\n", "Error: "])).map(
        "".join
    )
)
def test_any_output_has_a_cause_of_one_line(text: str) -> None:
    found = crashes.cause(text)
    assert "\n" not in found and len(found) <= 2 * crashes.MAX_LINE


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def test_an_exception_is_said_in_one_line_with_where_it_began() -> None:
    def made(kind: type[BaseException], text: str, cause: BaseException | None = None) -> BaseException:
        error = kind(text)
        error.__cause__ = cause
        return error

    disk = made(OSError, "no space left\non device")
    assert crashes.raised(disk) == "OSError: no space left"
    between = made(ValueError, "broken file", disk)
    assert (
        crashes.raised(made(RuntimeError, "no model", between))
        == "RuntimeError: no model (because of OSError: no space left)"
    )
    assert crashes.raised(made(RuntimeError, "failed: no space left", disk)) == "RuntimeError: failed: no space left"
    assert crashes.raised(ExceptionGroup("2 errors", [ExceptionGroup("1", [KeyError("a")])])) == "KeyError: 'a'"
    assert crashes.raised(Unspeakable()) == "Unspeakable: (its message cannot be shown)"
    assert crashes.raised(ValueError()) == "ValueError"
    circle = ValueError("round")
    circle.__cause__ = circle
    assert crashes.raised(circle) == "ValueError: round"
