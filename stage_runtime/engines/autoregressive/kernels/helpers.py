"""Threads that help with compiled loops: those that have a processor take parts, the caller does the rest.

A team of an operator library ends each loop when all of its threads have arrived. One of them often waits for a
processor on a machine that others use, and the loop with it, though its parts are done. Here a helper enters a loop by
itself, while parts are left; the caller waits only for helpers that are inside. A helper that nothing is given to spins
for a moment, then sleeps.

Imported only when `native.available`. Linux on x86-64 and ARM64; elsewhere `team` gives None, and loops run alone.
"""

# numba has no types for mypy, and compiles functions by their source.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from stage_runtime.engines.autoregressive.kernels import loop_cache

log = logging.getLogger(__name__)


class _Machine(NamedTuple):
    """Numbers of system calls, and what tells the processor that a loop only waits."""

    futex: int
    sched_yield: int
    relax: str
    relax_with: tuple[int, ...] = ()


_MACHINES: Final = {
    "x86_64": _Machine(202, 24, "llvm.x86.sse2.pause"),
    "aarch64": _Machine(98, 124, "llvm.aarch64.hint", (1,)),
}
_MACHINE: Final = _MACHINES.get(platform.machine()) if sys.platform == "linux" else None
_NUMBERS: Final = _MACHINE or _MACHINES["x86_64"]

SPINS: Final = 2000  # about as long as Python takes between two loops, so a helper is awake for the next one

# The state of a team: words in cache lines of their own. GATE: helpers inside in the lowest 8 bits; above them a count
# that is odd while a loop is open. SIGNAL: changes when sleepers are woken.
GATE, SIGNAL, SLEEPERS, STOPPED, LOOP, DATA, SYSCALL, END = 0, 64, 128, 192, 256, 264, 320, 384
MOST_HELPERS: Final = 200
_OPENED_OR_CLOSED: Final = 1 << 8
_INSIDE: Final = _OPENED_OR_CLOSED - 1
_WAIT: Final = 128  # FUTEX_WAIT | FUTEX_PRIVATE_FLAG
_WAKE: Final = 129
_FUTEX: Final = _NUMBERS.futex
_YIELD: Final = _NUMBERS.sched_yield

_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)


def _i32_at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I32.as_pointer())


@intrinsic
def _add(typing_context, address, value):
    """Returns what was there."""

    def build(context, builder, signature, values):
        return builder.atomic_rmw("add", _i32_at(builder, values[0]), values[1], "seq_cst")

    return types.int32(types.int64, types.int32), build


@intrinsic
def _read(typing_context, address):
    def build(context, builder, signature, values):
        return builder.load_atomic(_i32_at(builder, values[0]), "seq_cst", 4)

    return types.int32(types.int64), build


@intrinsic
def _exchange(typing_context, address, expected, value):
    """Returns 1 if ``expected`` was there."""

    def build(context, builder, signature, values):
        found = builder.cmpxchg(_i32_at(builder, values[0]), values[1], values[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(found, 1), _I32)

    return types.int32(types.int64, types.int32, types.int32), build


@intrinsic
def _word(typing_context, address):
    def build(context, builder, signature, values):
        return builder.load(builder.inttoptr(values[0], _I64.as_pointer()), align=8)

    return types.int64(types.int64), build


@intrinsic
def _put(typing_context, address, value):
    def build(context, builder, signature, values):
        builder.store(values[1], builder.inttoptr(values[0], _I64.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def _run(typing_context, loop, data):
    def build(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [_I64])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def _system(typing_context, syscall, number, first, second, third):
    """libc's ``syscall``, with a fourth argument of 0: no timeout."""

    def build(context, builder, signature, values):
        kind = ir.FunctionType(_I64, [_I64], var_arg=True)
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), [*values[1:], ir.Constant(_I64, 0)])

    return types.int64(*[types.int64] * 5), build


@intrinsic
def _relax(typing_context):
    def build(context, builder, signature, values):
        module, name = builder.module, _NUMBERS.relax
        given = [ir.Constant(_I32, one) for one in _NUMBERS.relax_with]
        kind = ir.FunctionType(ir.VoidType(), [one.type for one in given])
        builder.call(module.globals[name] if name in module.globals else ir.Function(module, kind, name), given)
        return context.get_dummy_value()

    return types.void(), build


def help_(state):
    """A helper's whole life."""
    seen = -1
    spun = 0
    while _read(state + STOPPED) == 0:
        gate = _read(state + GATE)
        turn = gate >> 8
        if turn & 1 and turn != seen:
            if _exchange(state + GATE, gate, gate + 1):
                _run(_word(state + LOOP), _word(state + DATA))
                seen = turn
                spun = 0
                _add(state + GATE, -1)
            continue
        spun += 1
        if spun < SPINS:
            _relax()
            continue
        spun = 0
        _add(state + SLEEPERS, 1)
        signal = _read(state + SIGNAL)
        turn = _read(state + GATE) >> 8
        if (turn & 1 == 0 or turn == seen) and _read(state + STOPPED) == 0:
            _system(_word(state + SYSCALL), _FUTEX, state + SIGNAL, _WAIT, signal)
        _add(state + SLEEPERS, -1)


def lead(state, loop, data, helpers):
    """Run a loop, and return when all of its parts are done."""
    _put(state + LOOP, loop)
    _put(state + DATA, data)
    _add(state + GATE, _OPENED_OR_CLOSED)
    if _read(state + SLEEPERS) != 0:
        _add(state + SIGNAL, 1)
        _system(_word(state + SYSCALL), _FUTEX, state + SIGNAL, _WAKE, helpers)
    _run(loop, data)
    _add(state + GATE, _OPENED_OR_CLOSED)
    spun = 0
    while _read(state + GATE) & _INSIDE:
        spun += 1
        if spun < SPINS:
            _relax()
        else:
            _system(_word(state + SYSCALL), _YIELD, 0, 0, 0)


_lead = njit(lead)


def lead_all(state, loops, count, helpers):
    """Run loops one after another. loops: ``[count, 2]``: a loop, and its data, whose parts are taken from the first.

    A loop of one part is not worth a helper's entrance.
    """
    for index in range(count):
        loop, data = _word(loops + index * 16), _word(loops + index * 16 + 8)
        _put(data, 0)
        if _word(data + 8) > 1:
            _lead(state, loop, data, helpers)
        else:
            _run(loop, data)


def run_all(loops, count):
    """The same as `lead_all`, without helpers: the caller's thread runs all parts."""
    for index in range(count):
        loop, data = _word(loops + index * 16), _word(loops + index * 16 + 8)
        _put(data, 0)
        _run(loop, data)


def stop(state):
    _add(state + STOPPED, 1)
    _add(state + SIGNAL, 1)
    _system(_word(state + SYSCALL), _FUTEX, state + SIGNAL, _WAKE, MOST_HELPERS)


_machine_code: list[Any] = []  #: The code lives as long as the process: a helper runs in it.


@functools.cache
def _compiled(function: Any, words: int) -> Callable[..., None]:
    def compile_() -> Any:
        return cfunc(types.void(*[types.int64] * words), error_model="numpy")(function)

    found = loop_cache.compiled(function.__name__, Path(__file__).read_bytes(), compile_, kept=loop_cache.folder())
    _machine_code.append(found.keeps)
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * words)(found.address)


class Team:
    """Helpers of one caller at a time."""

    def __init__(self, helpers: int) -> None:
        """It has fewer helpers, or none, where no more threads can start: a loop needs none of them."""
        self._memory = ctypes.create_string_buffer(END + 64)
        self._state = -(-ctypes.addressof(self._memory) // 64) * 64
        syscall = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value
        ctypes.c_int64.from_address(self._state + SYSCALL).value = syscall or 0
        self._lead, self._lead_all = _compiled(lead, 4), _compiled(lead_all, 4)
        self._stop, helping = _compiled(stop, 1), _compiled(help_, 1)
        self._free = threading.Lock()
        self._threads: list[threading.Thread] = []
        for index in range(min(helpers, MOST_HELPERS)):
            thread = threading.Thread(target=helping, args=(self._state,), name=f"loop helper {index}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the limit of threads; those that run read this team's memory
                log.warning("%d of %d threads help with compiled loops: %s", index, helpers, error)
                break
            self._threads.append(thread)
        self._helpers = len(self._threads)
        atexit.register(self.close)

    def run(self, loop: int, data: int) -> bool:
        """Run ``loop(data)``. False: it was not run, because the team helps another thread."""
        if not self._free.acquire(blocking=False):
            return False
        try:
            self._lead(self._state, loop, data, self._helpers)
        finally:
            self._free.release()
        return True

    def run_all(self, loops: int, count: int) -> bool:
        """Call `lead_all`. False: it was not called, as in `run`."""
        if not self._free.acquire(blocking=False):
            return False
        try:
            self._lead_all(self._state, loops, count, self._helpers)
        finally:
            self._free.release()
        return True

    def close(self) -> None:
        """End the helpers. A call that runs goes on to its end; later calls run without help."""
        self._stop(self._state)
        for thread in self._threads:
            thread.join()
        atexit.unregister(self.close)


def alone(loops: int, count: int) -> None:
    """`run_all`."""
    _compiled(run_all, 2)(loops, count)


_teams: dict[int, Team] = {}
_making = threading.Lock()


def team(helpers: int) -> Team | None:
    """The process's team of so many helpers. None: this platform has none."""
    if _MACHINE is None:
        return None
    found = _teams.get(helpers)
    if found is None:
        with _making:
            found = _teams.get(helpers)
            if found is None:
                found = _teams[helpers] = Team(helpers)
    return found


def _forget() -> None:
    """Forgets all teams of helpers: a forked process has none of their threads."""
    global _making
    _making = threading.Lock()
    for one in _teams.values():
        atexit.unregister(one.close)
    _teams.clear()


os.register_at_fork(after_in_child=_forget)
