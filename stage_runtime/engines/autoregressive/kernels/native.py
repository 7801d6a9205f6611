"""Loops compiled by numba for this processor, run by the caller and by threads that help it (`helpers`).

A loop is divided into parts. Each thread takes the next part until none is left, so a thread that another process
delays holds up one part, not the whole loop, and a helper that has no processor nothing.

numba is an optional dependency (extra ``numba``): `available` says whether it is there.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from stage_runtime.engines.autoregressive.kernels.helpers import Team

log = logging.getLogger(__name__)

DTYPES: Final = (torch.float32, torch.bfloat16)
PARTS: Final = 4  # for each thread: more balance better, fewer cost less
NativeCall = Callable[[int, int], None]


@functools.cache
def available() -> bool:
    """Whether numba is installed and compiles on this machine."""
    try:
        import numba

        numba.cfunc(numba.types.void(numba.types.voidptr))(_nothing)
    except ImportError:
        return False
    except Exception as error:  # of LLVM, or of a broken installation: torch's operators do instead
        log.warning("numba %s cannot compile here: %s", numba.__version__, error)
        return False
    log.debug("loops are compiled by numba %s", numba.__version__)
    return True


def _nothing(data: int) -> None:
    return


class Loop:
    """A compiled loop: ``kernel(data)``, where data are 64-bit words: next part, number of parts, then arguments."""

    def __init__(self, address: int, keeps: Any) -> None:
        """keeps: what holds the machine code."""
        self._keeps = keeps
        self.address = address
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __call__(self, parts: int, *arguments: int) -> None:
        data = (ctypes.c_int64 * (len(arguments) + 2))(0, parts, *arguments)
        threads = min(parts, torch.get_num_threads())
        team = helpers_of(torch.get_num_threads() - 1) if threads > 1 else None
        if team is None or not team.run(self.address, ctypes.addressof(data)):
            self._alone(ctypes.addressof(data))


class Program:
    """Loops that run one after another by one call: what lies between two of them costs no Python."""

    def __init__(self, loops: Sequence[tuple[Loop, Sequence[int]]]) -> None:
        """loops: each with its parts, and its arguments."""
        self._keeps = [loop for loop, _words in loops]
        sizes = [len(words) + 1 for _loop, words in loops]  # the first word: the next part
        self.words = torch.tensor([word for _loop, words in loops for word in (0, *words)], dtype=torch.int64)
        first = self.words.data_ptr()
        #: The places where the words of each loop begin.
        self.places = [0, *itertools.accumulate(sizes)][:-1]
        pairs = [(loop.address, first + place * 8) for (loop, _words), place in zip(loops, self.places, strict=True)]
        self._loops = torch.tensor(pairs, dtype=torch.int64)

    def run(self) -> None:
        from stage_runtime.engines.autoregressive.kernels import helpers

        threads = torch.get_num_threads()
        team = helpers_of(threads - 1) if threads > 1 else None
        given = self._loops.data_ptr(), len(self._loops)
        if team is None or not team.run_all(*given):
            helpers.alone(*given)


#: An argument of a loop, or its number of parts: the same in every run; or a run's, by its name.
Word: TypeAlias = int | str
Entry: TypeAlias = tuple[Loop, Sequence[Word]]


class NamedProgram:
    """A `Program` with words that each run gives by their names."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._program = Program(
            [(loop, [0 if isinstance(one, str) else one for one in words]) for loop, words in entries]
        )
        places: dict[str, list[int]] = {}
        for (_loop, words), begin in zip(entries, self._program.places, strict=True):
            for place, word in enumerate(words, begin + 1):
                if isinstance(word, str):
                    places.setdefault(word, []).append(place)
        self._places = [(name, np.array(found)) for name, found in places.items()]
        self._words = self._program.words.numpy()

    def run(self, given: Mapping[str, int]) -> None:
        """given: each named word. Not for two threads at once."""
        for name, places in self._places:
            self._words[places] = given[name]
        self._program.run()


def helpers_of(count: int) -> Team | None:
    from stage_runtime.engines.autoregressive.kernels import helpers

    return helpers.team(count)


def bits(value: float) -> int:
    """A float as an argument of a loop."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def parts_for(work: int, least: int) -> int:
    """How many parts ``work`` is divided into, when a part of less than ``least`` is not worth a thread."""
    return max(1, min(work // least, PARTS * torch.get_num_threads()))
