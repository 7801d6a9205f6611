"""A folder of files, one for each block of keys and values: reading, writing, and which are the oldest. No engine here.

A file's name is the hash of its prompt up to the block's end, in a folder of the layout's digest. Its bytes are a
header, a checksum and what `model.paged_attention.block_pages.BlockPages.export` gives for one block. It is written
under another name and then renamed, so several processes may share a folder; each keeps it below its own bound. Calls
in threads of the connector.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from stage_runtime.errors import ProtocolError

log = logging.getLogger(__name__)

MAGIC: Final = b"OMNIKV01"
ROOM: Final = 0.9  #: The share of the bound that a clean-up leaves: or each written block would cause one.
OLD_S: Final = 3600.0  # an unfinished file of this age is of a process that has ended
NAME: Final = re.compile(r"[0-9a-f]{32}\.kv")
LAYOUT: Final = re.compile(r"[0-9a-f]{16}")


class _Found(NamedTuple):
    used: float
    nbytes: int
    path: str


class BlockFiles:
    """The blocks of one layout. The bound is of all layouts in the folder."""

    def __init__(self, folder: str, layout: bytes, block_nbytes: int, most_nbytes: int) -> None:
        """Raises: OSError: the folder cannot be made."""
        self._root = Path(folder)
        self._folder = self._root / layout.hex()
        self._layout = layout
        self._block_nbytes = block_nbytes
        self._most = most_nbytes
        self._used = 0  #: Bytes at the last look, and those written since.
        self._own = secrets.token_hex(8)  #: Ends the names of its unfinished files; containers share process ids.
        self._make()

    def _make(self) -> None:
        """Also where somebody has deleted it. Raises: OSError."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)  # whoever reads it can tell the prompts
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def known(self) -> set[bytes]:
        """The hashes of all blocks of this layout. The least recently used files beyond the bound are deleted first.

        Raises: OSError.
        """
        self._make()
        self._clean()
        names = (one.name for one in os.scandir(self._folder))
        return {bytes.fromhex(name[:-3]) for name in names if NAME.fullmatch(name)}

    def read(self, content: bytes) -> Tensor:
        """Its bytes. Raises: FileNotFoundError: it is gone. ProtocolError: it holds something else, and is deleted."""
        path = self._path(content)
        whole = self._header(content)
        with open(path, "rb") as file:
            head = file.read(len(whole) + 4)
            body = bytearray(file.read(self._block_nbytes + 1))
        same = head[:-4] == whole and len(body) == self._block_nbytes
        if not same or zlib.crc32(body, zlib.crc32(whole)) != int.from_bytes(head[-4:], "little"):
            path.unlink(missing_ok=True)
            raise ProtocolError(f"{path} is damaged, or of something else, and was deleted")
        with contextlib.suppress(OSError):  # deleted meanwhile, or a folder that is only read
            os.utime(path)
        return torch.frombuffer(body, dtype=torch.uint8)

    def write(self, content: bytes, flat: Tensor) -> bool:
        """Whether a clean-up is due: `known`. Raises: OSError."""
        body = flat.numpy().data
        whole = self._header(content)
        check = zlib.crc32(body, zlib.crc32(whole)).to_bytes(4, "little")
        try:
            self._put(self._path(content), (whole, check, body))
        except FileNotFoundError:  # somebody has deleted the folder
            self._make()
            self._put(self._path(content), (whole, check, body))
        self._used += len(whole) + 4 + len(body)
        return self._used > self._most

    def _put(self, path: Path, parts: Iterable[Any]) -> None:
        """A file appears whole or not at all. Raises: OSError."""
        unfinished = path.with_name(f"{path.name}.{self._own}")
        try:
            with open(unfinished, "wb") as file:
                for part in parts:
                    file.write(part)
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def _path(self, content: bytes) -> Path:
        return self._folder / f"{content.hex()}.kv"

    def _header(self, content: bytes) -> bytes:
        return MAGIC + self._layout + content

    def _clean(self) -> None:
        """Delete what exceeds the bound, and what processes that have ended left unfinished."""
        found = list(self._files())
        total = sum(one.nbytes for one in found)
        if total > self._most:
            for one in sorted(found):
                if total <= self._most * ROOM:
                    break
                with contextlib.suppress(FileNotFoundError):  # another process cleans up, too
                    os.unlink(one.path)
                total -= one.nbytes
        self._used = total

    def _files(self) -> Iterator[_Found]:
        now = time.time()
        folders = [one for one in os.scandir(self._root) if LAYOUT.fullmatch(one.name)]
        for folder in [one for one in folders if one.is_dir(follow_symlinks=False)]:
            for one in _entries(folder.path):
                with contextlib.suppress(FileNotFoundError):
                    facts = one.stat(follow_symlinks=False)
                    if NAME.fullmatch(one.name):
                        yield _Found(facts.st_mtime, facts.st_size, one.path)
                    elif NAME.match(one.name) and facts.st_mtime < now - OLD_S:
                        os.unlink(one.path)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Those of a layout's folder; of one that is gone meanwhile, or is another user's, none."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return list(os.scandir(folder))
    return []
