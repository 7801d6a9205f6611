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
        self._closed = False
        with contextlib.suppress(OSError):
            self._open()

    def add(self, process: str, line: str) -> None:
        if self._closed:
            return
        data = f"{process}\t{line[:LINE]}\n".encode(errors="replace")
        with contextlib.suppress(OSError):
            file = self._file or self._open()
            file.write(data)
            self._size += len(data)
            if self._size > self._most:
                self._end_file()
                os.replace(self._folder / OUTPUT, self._folder / EARLIER)
                self._open()

    def close(self) -> None:
        self._closed = True
        self._end_file()

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _open(self) -> BinaryIO:
        """Raises: OSError: the next line tries again."""
        made = self._file = open(self._folder / OUTPUT, "wb", buffering=0)  # closed by `_end_file`
        self._size = 0
        return made


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
        yield from self._begun()

    def new(self) -> Iterator[tuple[str, str]]:
        """The output since it was last asked, after `all`. Raises: OSError: the run is gone."""
        if self._file is None:
            yield from self._begun()
            return
        yield from self._split(self._file.read())
        if self._has_ended(self._file):
            yield from self._split(self._file.read())
            self._file.close()
            yield from self._begun()

    def _begun(self) -> Iterator[tuple[str, str]]:
        """The lines of the file that is being written; none before it is there. Raises: OSError: the run is gone."""
        self._rest = b""
        try:
            self._file = open(self._folder / OUTPUT, "rb")  # closed by `close`
        except FileNotFoundError:
            self._file = None
            os.stat(self._folder)
            return
        yield from self._split(self._file.read())

    def _has_ended(self, file: BinaryIO) -> bool:
        """Whether a new file was begun, or is about to be. Raises: OSError: the run is gone."""
        try:
            return os.stat(self._folder / OUTPUT).st_ino != os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            os.stat(self._folder)
            return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _split(self, data: bytes) -> Iterator[tuple[str, str]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            process, _tab, text = line.decode(errors="replace").partition("\t")
            yield process, text
