"""Machine code of loops in files: kept by one process, run by another; files that are not as written are not run."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from stage_runtime.engines.autoregressive.kernels import loop_cache
from stage_runtime.engines.autoregressive.kernels.loop_cache import CompiledCode

CODE = CompiledCode("symbol", "library", "object", b"machine" * 1000, b"bitcode" * 1000)

#: Compiles one loop, and keeps it. Both processes compile theirs first, so numba numbers both alike.
COMPILING = """
import sys
from pathlib import Path
from numba import cfunc, types
from stage_runtime.engines.autoregressive.kernels import loop_cache

def make(constant):
    def loop(value):
        return value + constant
    loop.__name__ = loop.__qualname__ = f"adding_{constant}"
    return cfunc(types.int64(types.int64))(loop)

constant = int(sys.argv[1])
loop_cache.compiled(f"adding_{constant}", b"source", lambda: make(constant), kept=Path(sys.argv[2]))
"""


def never() -> NoReturn:
    raise AssertionError("it was compiled again")


def call(found: loop_cache.Compiled, value: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(found.address)(value))


def test_loops_of_other_processes_are_run_without_being_compiled(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    started = [
        subprocess.Popen([sys.executable, "-c", COMPILING, str(constant), str(tmp_path)]) for constant in (1, 20)
    ]
    assert [one.wait() for one in started] == [0, 0]
    found = [loop_cache.compiled(f"adding_{constant}", b"source", never, kept=tmp_path) for constant in (1, 20)]
    assert [call(one, 300) for one in found] == [301, 320]
    with pytest.raises(AssertionError, match="compiled again"):
        loop_cache.compiled("adding_1", b"another source", never, kept=tmp_path)


#: A loop that fills memory, which LLVM makes a call of `memset`. "never": in a process that compiles nothing.
FILLING = """
import ctypes, sys
from pathlib import Path
from stage_runtime.engines.autoregressive.kernels import loop_cache

def compile_():
    if sys.argv[1] == "never":
        raise AssertionError("it was compiled again")
    from numba import cfunc, types
    from stage_runtime.engines.autoregressive.kernels.loops import f32_at

    def fill(address):
        values = f32_at(address)
        for at in range(1000):
            values[at] = 0
    return cfunc(types.void(types.int64))(fill)

found = loop_cache.compiled("filling", b"source", compile_, kept=Path(sys.argv[2]))
memory = (ctypes.c_float * 1000)(*range(1000))
ctypes.CFUNCTYPE(None, ctypes.c_int64)(found.address)(ctypes.addressof(memory))
print(sum(memory))
"""


def test_a_process_that_compiles_nothing_runs_loops_that_call_functions(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    for compiles in ("once", "never"):
        ran = subprocess.run(
            [sys.executable, "-c", FILLING, compiles, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert (ran.returncode, ran.stdout) == (0, "0.0\n"), ran.stderr


def test_a_loop_is_compiled_where_its_file_is_damaged_or_cannot_be_written(tmp_path: Path) -> None:
    numba = pytest.importorskip("numba")

    def adding_7(value: int) -> int:
        return value + 7

    def compile_() -> Any:
        made.append(1)
        return numba.cfunc(numba.types.int64(numba.types.int64))(adding_7)

    made: list[int] = []
    for damage in (None, b"", b"garbage" * 10, bytes(64)):
        assert call(loop_cache.compiled("adding_7", b"source", compile_, kept=tmp_path), 1) == 8
        (kept,) = tmp_path.iterdir()
        if damage is not None:
            kept.write_bytes(damage)
    assert len(made) == 3  # the second of the four found the file whole
    in_the_way = tmp_path / "file"
    in_the_way.write_bytes(b"")
    for place in (None, in_the_way, in_the_way / "below"):
        assert call(loop_cache.compiled("adding_7", b"source", compile_, kept=place), 1) == 8
    assert len(made) == 6


def test_a_file_is_read_whole_or_not_at_all_while_others_write_it(tmp_path: Path) -> None:
    path = tmp_path / "one.loop"
    with ThreadPoolExecutor(4) as threads:
        writing = [threads.submit(loop_cache.write, path, CODE) for _ in range(50)]
        found = [loop_cache.read(path) for _ in range(200)]
        for one in writing:
            one.result()
    assert set(found) <= {None, CODE}
    assert loop_cache.read(path) == CODE
    assert [one.name for one in tmp_path.iterdir()] == ["one.loop"]


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 33, 5000, -1])
def test_a_file_that_is_cut_or_changed_is_not_read(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "one.loop"
    loop_cache.write(path, CODE)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    assert loop_cache.read(path) is None
    path.write_bytes(whole[:cut] + bytes([whole[cut] ^ 1]) + (whole[cut:][1:] if cut >= 0 else b""))
    assert loop_cache.read(path) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_a_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "one.loop"
    loop_cache.write(path, CODE)
    os.chown(path, 12345, 12345)
    assert loop_cache.read(path) is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NUMBA_CACHE_DIR": "/n", "OMNI_CACHE": "/o", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/n"),
        ({"OMNI_CACHE": "/o", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/o/loops"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/omnipipeline/loops"),
        ({"HOME": "/h"}, "/h/.cache/omnipipeline/loops"),
    ],
)
def test_the_folder_is_the_first_that_the_environment_names(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NUMBA_CACHE_DIR", "OMNI_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert loop_cache.folder() == Path(expected)
