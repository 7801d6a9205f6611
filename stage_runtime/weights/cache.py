"""A model's folder in a cache that processes share: one of them fetches, and nobody sees half a model.

Here: the lock, the parts of files that are not whole yet, what is fetched again, and the step that makes a model
visible. Not here: requests (`source`), hashes (`checking`), the manifest (`folders`).

The layout below ``ROOT/s3`` is this: ``NAME`` is a symbolic link to ``NAME.VERSION``, a folder with all files and their
manifest. While a version is fetched its files lie in ``NAME.VERSION.parts``, each as long as what has come of it, so a
process that is killed loses nothing. ``NAME.lock`` is locked by who fetches; the kernel ends the lock with its process.
Its time of change is when the model was asked for last. It contains, while the model is fetched within a bound, how
many bytes all its folders will have.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from stage_runtime.errors import ConfigurationError
from stage_runtime.weights import checking, evicting, folders
from stage_runtime.weights.folders import FetchedFile, Manifest
from stage_runtime.weights.progress import Progress
from stage_runtime.weights.source import Interrupted, Source, StoredFile

FILES_AT_ONCE: Final = 8
RETRIES: Final = 5  # of a file, since its last byte came
PAUSE_S: Final = 1.0  # before the first of them; each next one is twice as long


class _Stopped(Interrupted):
    """Another file of the model has failed."""


class Fetch:
    """Brings one model into one cache."""

    def __init__(
        self,
        source: Source,
        root: Path,
        progress: Progress,
        *,
        say: Callable[[str], None] = print,
        pause_s: float = PAUSE_S,
        bound: int | None = None,
    ) -> None:
        """bound: bytes that all models of the folder may have; others are deleted for this one (`evicting`)."""
        self._source = source
        self._link = folders.link(root, source.url)
        self._progress = progress
        self._say = say
        self._pause_s = pause_s
        self._bound = bound
        self._failed = threading.Event()  #: One file failed: the others stop at their next chunk.

    def ensure(self, *, thorough: bool = True) -> Path:
        """The folder of the whole model, after whatever is missing or damaged has been fetched.

        thorough: hash each file that is there, also one whose size and time of change are as they were. A model that is
        whole is enough without it while the store does not answer.
        Raises:   ConfigurationError: it cannot be fetched: why.
                  Interrupted: the store did not answer often enough; what has come is kept.
        """
        self._link.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            try:
                files = self._source.files()
            except Interrupted as error:
                if thorough or not self._is_here():
                    raise
                self._say(f"{error}; the model that was fetched before is whole")
                return self._link.resolve()
            sums = self._sums(files)
            folder = self._link.with_name(f"{self._link.name}.{_version(files)}")
            if not (folder.is_dir() and self._repair(folder, files, sums, thorough=thorough)):
                self._bring(folder, files, sums)
            self._publish(folder)
            return folder

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(f"{self._link}.lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._say(f"waiting for another process that fetches {self._source.url}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock.fileno()).st_size:  # of a fetch that is over: see `evicting`
                lock.truncate(0)
            yield
            os.utime(lock.fileno())

    def _is_here(self) -> bool:
        try:
            folder = self._link.resolve(strict=True)
            return next(folders.damaged(folder, folders.read(folder)), None) is None
        except (OSError, ConfigurationError):
            return False

    def _sums(self, files: Sequence[StoredFile]) -> dict[str, str]:
        """Path -> SHA-256, from the list that lies beside the files, if one does."""
        nbytes = next((each.nbytes for each in files if each.path == checking.SUMS), 0)
        if not nbytes:
            return {}
        place = f"{self._source.url}/{checking.SUMS}"
        if nbytes > checking.MAX_SUMS_BYTES:
            raise ConfigurationError(f"{place} has {nbytes} bytes, more than {checking.MAX_SUMS_BYTES}")
        sums = checking.read_sums(self._source.text(checking.SUMS, checking.MAX_SUMS_BYTES), place)
        missing = sorted(sums.keys() - {each.path for each in files})
        if missing:
            raise ConfigurationError(f"{place} names {missing[0]}, which is not there")
        sums.pop(checking.SUMS, None)  # made again by ``sha256sum *``, it names itself, and cannot have its own hash
        return sums

    # --- a version that is not there yet ------------------------------------------------------------------------

    def _bring(self, folder: Path, files: Sequence[StoredFile], sums: Mapping[str, str]) -> None:
        parts = folder.with_name(f"{folder.name}.parts")
        self._drop_others(parts)  # parts of a content that the store has no more may have the room of this one
        fetched = self._fetch_all(parts, files, sums)
        _write_manifest(parts, Manifest(url=self._source.url, files=fetched))
        os.rename(parts, folder)

    def _repair(self, folder: Path, files: Sequence[StoredFile], sums: Mapping[str, str], *, thorough: bool) -> bool:
        """Fetch again what is not as it was fetched: a file is replaced in one step, the manifest is written last.

        Returns: False: the manifest cannot be read. The files are parts of the version then, to be checked anew.
        """
        try:
            manifest = folders.read(folder)
        except ConfigurationError as error:
            self._say(f"{error}: all files are checked with the store")
            parts = folder.with_name(f"{folder.name}.parts")
            shutil.rmtree(parts, ignore_errors=True)
            os.rename(folder, parts)
            return False
        total = sum(each.nbytes for each in files)
        self._progress.expect(total, done=total)
        bad = dict(folders.damaged(folder, manifest, thorough=thorough))
        if not bad:
            return True
        for path, why in bad.items():
            self._say(f"{path} {why}: it is fetched again")
        parts = folder.with_name(f"{folder.name}.parts")
        again = self._fetch_all(parts, [each for each in files if each.path in bad], sums)
        for path in again:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(parts / path, folder / path)
        _write_manifest(folder, msgspec.structs.replace(manifest, files={**manifest.files, **again}))
        shutil.rmtree(parts)
        return True

    def _fetch_all(self, parts: Path, files: Sequence[StoredFile], sums: Mapping[str, str]) -> dict[str, FetchedFile]:
        parts.mkdir(exist_ok=True)
        here = {each.path: _size(parts / each.path) for each in files}
        total, done = sum(each.nbytes for each in files), sum(here.values())
        if self._bound is not None:
            evicting.make_room(self._link, total - done, self._bound, now=time.time(), say=self._say)
        free = shutil.disk_usage(parts).free
        if total - done > free:
            raise ConfigurationError(
                f"{self._source.url}: {total - done} bytes must be fetched, and {parts.parent} has {free} bytes free"
            )
        self._progress.expect(total, done=done)
        self._say(f"fetching {self._source.url}: {len(files)} files, {total} bytes, {done} of them are here")
        try:
            with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="fetch") as pool:
                fetching = {each.path: pool.submit(self._fetch, each, parts / each.path, sums) for each in files}
        except RuntimeError as refused:  # the machine has no thread left
            raise Interrupted(f"{self._source.url}: {refused}") from refused
        errors = [error for one in fetching.values() if (error := one.exception()) is not None]
        for error in sorted(errors, key=lambda each: isinstance(each, _Stopped)):
            raise error
        return {path: one.result() for path, one in fetching.items()}

    def _fetch(self, file: StoredFile, path: Path, sums: Mapping[str, str]) -> FetchedFile:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            digest = self._complete(file, path)
            if not self._is_whole(file, path, digest, sums):
                is_unchecked = _is_unchecked(file, sums)
                why = "has no hash in its store" if is_unchecked else "is not what its store says"
                self._say(f"{file.path} {why}: it is fetched again")
                self._discard(path)
                second = self._complete(file, path)
                if not (self._is_whole(file, path, second, sums) or (is_unchecked and second == digest)):
                    self._discard(path)
                    raise ConfigurationError(self._why(file, second, sums))
                digest = second
            found = path.stat()
            return FetchedFile(nbytes=found.st_size, sha256=digest, etag=file.etag, mtime_ns=found.st_mtime_ns)
        except BaseException as error:
            self._failed.set()
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(path)  # a write to a full disk names no file
            raise

    def _complete(self, file: StoredFile, path: Path) -> str:
        """Fetch what is missing of a file, beginning where it stopped; returns its SHA-256."""
        if _size(path) > file.nbytes:
            self._discard(path)
        hashed, tries = hashlib.sha256(), 0
        with path.open("a+b") as part:
            part.seek(0)
            while chunk := part.read(folders.READ_BYTES):
                hashed.update(chunk)
            while part.tell() < file.nbytes:
                try:
                    for chunk in self._source.chunks(file, part.tell()):
                        if self._failed.is_set():
                            raise _Stopped
                        part.write(chunk)
                        part.flush()
                        hashed.update(chunk)
                        self._progress.add(len(chunk))
                        tries = 0
                except Interrupted as error:
                    tries += 1
                    if tries > RETRIES or self._failed.is_set():
                        raise
                    self._say(f"{error}; try {tries} of {RETRIES} follows")
                    self._failed.wait(self._pause_s * 2 ** (tries - 1))
            os.fsync(part.fileno())
        return hashed.hexdigest()

    def _is_whole(self, file: StoredFile, path: Path, digest: str, sums: Mapping[str, str]) -> bool:
        if file.path in sums:
            return digest == sums[file.path]
        if checking.is_md5(file.etag):
            return checking.md5(path) == file.etag
        return bool(file.etag) and checking.matches_parts(path, file.etag)

    def _why(self, file: StoredFile, digest: str, sums: Mapping[str, str]) -> str:
        place = f"{self._source.url}/{file.path}"
        if file.path in sums:
            return f"{place}: its SHA-256 is {digest} twice, and {checking.SUMS} says {sums[file.path]}"
        cure = f"where an ETag is not a hash (SSE-KMS), put {checking.SUMS} beside the files"
        return f"{place} is not of its ETag {file.etag}, fetched twice; {cure}"

    def _discard(self, path: Path) -> None:
        self._progress.add(-_size(path))
        path.unlink(missing_ok=True)

    # --- making it visible --------------------------------------------------------------------------------------

    def _publish(self, folder: Path) -> None:
        """Have the link show this version, in one step; versions before the last are deleted."""
        before = self._shown()
        if before != folder.name:
            fresh = self._link.with_name(f"{self._link.name}.link")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(folder.name)
            os.replace(fresh, self._link)
        self._drop_others(folder, before)

    def _shown(self) -> str | None:
        """The name of the version that the link shows."""
        return Path(os.readlink(self._link)).name if self._link.is_symlink() else None

    def _drop_others(self, own: Path, before: str | None = None) -> None:
        """Delete all versions and parts but ``own``, ``before``, the one that is shown, and those that are read."""
        kept = (own.name, before, self._shown())
        for each in self._link.parent.glob(f"{self._link.name}.*"):
            if each.is_dir() and not each.is_symlink() and each.name not in kept:
                evicting.delete_unread(each)


def _is_unchecked(file: StoredFile, sums: Mapping[str, str]) -> bool:
    """Whether nothing says what the content is: then two transfers that agree are believed."""
    return file.path not in sums and not checking.is_md5(file.etag)


def _version(files: Sequence[StoredFile]) -> str:
    """A hash of what lies below the prefix: another list of paths, sizes and ETags is another version."""
    listed = [{"path": each.path, "nbytes": each.nbytes, "etag": each.etag} for each in files]
    return hashlib.sha256(msgspec.json.encode(listed)).hexdigest()[:12]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    fresh = folder / f"{folders.MANIFEST}.new"
    with fresh.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)))
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, folder / folders.MANIFEST)
