"""Machine code of compiled loops, kept in files, so that a process need not compile what another one has compiled.

The folder is ``$NUMBA_CACHE_DIR``, else ``$OMNI_CACHE/loops``, else that of `omnipipeline` in the user's cache. Loops
are compiled each time, without a log line, where it cannot be read or written. A file appears whole or not at all, so
any number of processes share a folder. Its name stands for all that the code depends on: source, arguments, processor,
versions. Code is run only from files of this user or root.

numba's own ``cache=True`` keeps nothing of such loops: their closures hold functions, which it identifies anew in
every process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

log = logging.getLogger(__name__)

_DIGEST: Final = hashlib.sha256().digest_size


class CompiledCode(NamedTuple):
    """A loop's machine code, as numba serializes a library. symbol: of the function in it."""

    symbol: str
    library: str
    kind: str
    machine: bytes
    bitcode: bytes


class Compiled(NamedTuple):
    address: int
    keeps: Any  #: The owner of the machine code: while it lives, so does the code.


def folder() -> Path | None:
    """None: no folder can keep it."""
    if own := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(own)
    if shared := os.environ.get("OMNI_CACHE"):
        return Path(shared) / "loops"
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "omnipipeline" / "loops"
    except RuntimeError:  # no home
        return None


def compiled(name: str, source: bytes, compile_: Callable[[], Any], *, kept: Path | None) -> Compiled:
    """The loop ``name``, of a file in ``kept`` or compiled now.

    name: of the loop with its arguments; unique in ``source``, the text of all that it is made of. compile_: returns
    numba's `CFunc`.
    """
    path = None if kept is None else kept / f"{_key(name, source)}.loop"
    if path is not None and (code := read(path)) is not None:
        try:
            return _linked(code)
        except Exception as error:  # of LLVM: an object that it does not take
            log.debug("%s: %s", path, error)
    made = compile_()
    if path is not None:
        try:
            write(path, _code_of(made))
        except Exception as error:  # a folder that cannot be written, or another numba's internals
            log.debug("%s is not kept: %s", name, error)
    return Compiled(made.address, made)


def _key(name: str, source: bytes) -> str:
    import llvmlite
    import numba

    facts = (name, numba.__version__, llvmlite.__version__, platform.python_version(), *_codegen().magic_tuple())
    return hashlib.sha256("\0".join(map(str, facts)).encode() + source).hexdigest()[:32]


def features() -> str:
    """The features of the processor that code is made for, as LLVM lists them."""
    _triple, _name, found = _codegen().magic_tuple()
    return str(found)


def _codegen() -> Any:
    from numba.core.registry import cpu_target

    context = cpu_target.target_context
    context.refresh()  # once: else functions that machine code calls, such as memset, are not found, and have address 0
    return context.codegen()


def _code_of(made: Any) -> CompiledCode:
    library, kind, (machine, bitcode) = made._library.serialize_using_object_code()
    return CompiledCode(made._wrapper_name, library, kind, machine, bitcode)


def _linked(code: CompiledCode) -> Compiled:
    library = _codegen().unserialize_library((code.library, code.kind, (code.machine, code.bitcode)))
    address = int(library.get_pointer_to_function(code.symbol))
    if not address:
        raise ValueError(f"it has no function {code.symbol}")
    return Compiled(address, library)


def read(path: Path) -> CompiledCode | None:
    """None: it is not there, is another user's, or is not whole."""
    try:
        with path.open("rb") as file:
            owner, found = os.fstat(file.fileno()).st_uid, file.read()
    except OSError:
        return None
    if owner not in (0, os.geteuid()) or hashlib.sha256(found[_DIGEST:]).digest() != found[:_DIGEST]:
        return None
    try:
        return msgspec.msgpack.decode(found[_DIGEST:], type=CompiledCode)
    except msgspec.MsgspecError:
        return None


def write(path: Path, code: CompiledCode) -> None:
    """Raises: OSError: it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.msgpack.encode(code)
    descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(hashlib.sha256(encoded).digest() + encoded)
        os.replace(made, path)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise
