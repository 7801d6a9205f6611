"""The output of a run's processes, kept in its folder for `omni logs`: the last few MiB.

Here: both ends. The writer is `local`, the reader `cli.running.logs`. The folder is 0700 and gone with the run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

OUTPUT: Final = "output.log"
EARLIER: Final = "output.log.1"
MOST: Final = 8 << 20  # bytes of each of the two files
LINE: Final = 16 << 10  # characters of a line; a longer one is cut


class KeptOutput:
    """Takes lines as long as it is open. A disk that is full costs them, and nothing else."""

    def __init__(self, folder: Path, *, most: int = MOST) -> None:
        """most: bytes after which the next file is begun."""
        self._folder = folder
        self._most = most
        self._file: BinaryIO | None = None
        self._size = 0
        self._open()

    def add(self, process: str, line: str) -> None:
        if self._file is None:
            return
        data = f"{process}\t{line[:LINE]}\n".encode(errors="replace")
        with contextlib.suppress(OSError):
            self._file.write(data)
            self._size += len(data)
            if self._size > self._most:
                self.close()
                os.replace(self._folder / OUTPUT, self._folder / EARLIER)
                self._open()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _open(self) -> None:
        self._size = 0
        with contextlib.suppress(OSError):
            self._file = open(self._folder / OUTPUT, "wb", buffering=0)  # closed by `close`


class Reader:
    """Reads a run's lines, from the earliest that is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rest = b""
        self._file: BinaryIO | None = None

    def all(self) -> Iterator[tuple[str, str]]:
        """(process, line) of all that is kept. Raises: OSError: the run is gone."""
        with contextlib.suppress(FileNotFoundError):
            yield from self._split((self._folder / EARLIER).read_bytes())
        self._rest = b""
        self._file = open(self._folder / OUTPUT, "rb")  # closed by `close`
        yield from self._split(self._file.read())

    def new(self) -> Iterator[tuple[str, str]]:
        """The output since it was last asked. Raises: OSError: the run is gone."""
        assert self._file is not None, "`all` comes first"
        yield from self._split(self._file.read())
        there = os.stat(self._folder / OUTPUT)
        if there.st_ino != os.fstat(self._file.fileno()).st_ino:  # a new file was begun
            yield from self._split(self._file.read())
            self._file.close()
            self._rest = b""
            self._file = open(self._folder / OUTPUT, "rb")  # closed by `close`
            yield from self._split(self._file.read())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _split(self, data: bytes) -> Iterator[tuple[str, str]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            process, _tab, text = line.decode(errors="replace").partition("\t")
            yield process, text
