"""An S3-like object store: the files below one prefix, and reading ranges of them.

Here: obstore, its settings and its errors. Not here: where bytes go (`cache`), endpoint and credentials (`access`).
Answers of the store are bounded before they are kept: the number of files, and the bytes of each range.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from omnipipeline_spec.types import stores
from stage_runtime.errors import ConfigurationError
from stage_runtime.weights import checking, folders
from stage_runtime.weights.access import Access

RANGE_BYTES: Final = 256 << 20  # of one request: its time is bounded
RANGE_S: Final = 600.0  # for a range: 0.4 MB/s at the least
CHUNK_BYTES: Final = 1 << 20
MAX_FILES: Final = 10_000  # the largest models have hundreds; a bucket by mistake has millions

_REPLACED: Final = "replaced while it was fetched; fetch it again"


class Interrupted(Exception):
    """A request failed that may succeed when it is repeated."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """One object, by its path below the prefix."""

    path: str
    nbytes: int
    etag: str  #: The ETag without quotes, in small letters: a hash is compared with it.
    condition: str = ""  #: The ETag as the store knows it, for requests that want this content; empty: not possible.


class Source:
    """The objects below one ``s3://bucket/prefix``."""

    def __init__(self, url: str, environ: Mapping[str, str]) -> None:
        split = stores.split(url)
        if split is None:
            raise ConfigurationError(f"{url!r} is not s3://BUCKET/PREFIX")
        bucket, prefix = split
        self.url = url.rstrip("/")
        self._access = Access(environ)
        try:
            from obstore.store import S3Store
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"{url}: the package obstore is not installed: pip install obstore") from error
        config: Any = self._access.config
        self._store: Any = S3Store(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options={
                "timeout": datetime.timedelta(seconds=RANGE_S),
                "connect_timeout": datetime.timedelta(seconds=10),
                "allow_http": (self._access.endpoint or "").startswith("http://"),
            },
            retry_config={"max_retries": 5, "retry_timeout": datetime.timedelta(seconds=60)},
        )

    def files(self, *, at_most: int = MAX_FILES) -> list[StoredFile]:
        """All objects below the prefix, by path; markers of folders are not among them.

        Raises: ConfigurationError: it has none or too many, or a path would lead out of the model's folder.
                Interrupted.
        """
        import obstore

        listed: list[Any] = []
        with _explained(self.url, self._access):
            for page in obstore.list(self._store):
                listed += page
                if len(listed) > at_most:
                    raise ConfigurationError(f"{self.url}: more than {at_most} objects lie below it; name one model")
        found = [
            StoredFile(
                path=each["path"],
                nbytes=each["size"],
                etag=checking.bare(each["e_tag"]),
                condition=checking.condition(each["e_tag"]),
            )
            for each in listed
        ]
        parents = {path.rpartition("/")[0] for path in _with_parents(each.path for each in found)}
        files = sorted((each for each in found if each.nbytes or each.path not in parents), key=lambda each: each.path)
        if not files:
            raise ConfigurationError(f"{self.url}: no object lies below it")
        for each in files:
            own = each.path.startswith(folders.MANIFEST)
            if each.path in parents:
                raise ConfigurationError(f"{self.url}: {each.path!r} is an object, and others lie below it as a folder")
            if own or set(each.path.split("/")) & {"", ".", ".."} or "\0" in each.path:
                raise ConfigurationError(f"{self.url}: the object {each.path!r} cannot be a file of a model")
        return files

    def text(self, path: str, limit: int) -> str:
        """A small object as text. Raises: ConfigurationError, Interrupted."""
        import obstore

        with _explained(f"{self.url}/{path}", self._access):
            body = bytes(obstore.get(self._store, path, options={"range": (0, limit)}).bytes())
        try:
            return body.decode()
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{self.url}/{path} is not UTF-8: {error}") from error

    def chunks(self, file: StoredFile, offset: int) -> Iterator[bytes]:
        """The bytes of an object from an offset on, in pieces of about a mebibyte.

        Raises: ConfigurationError: it is not there any more, or another one is.
                Interrupted: what has been yielded is right, and the rest may be asked for again.
        """
        import obstore

        options: Any = {"if_match": file.condition} if file.condition else {}
        while offset < file.nbytes:
            end = min(offset + RANGE_BYTES, file.nbytes)
            with _explained(f"{self.url}/{file.path}", self._access):
                asked = obstore.get(self._store, file.path, options=options | {"range": (offset, end)})
                shown = checking.bare(asked.meta["e_tag"])
                if not file.condition and file.etag and shown and shown != file.etag:
                    raise ConfigurationError(f"{self.url}/{file.path} was {_REPLACED}")
                for chunk in asked.stream(min_chunk_size=CHUNK_BYTES):
                    if offset + len(chunk) > end:
                        raise Interrupted(f"{self.url}/{file.path}: more came than bytes {offset} to {end}")
                    offset += len(chunk)
                    yield bytes(chunk)
            if offset != end:
                raise Interrupted(f"{self.url}/{file.path}: the range ended at byte {offset}, not {end}")


def _with_parents(paths: Iterator[str]) -> Iterator[str]:
    for path in paths:
        while path:
            yield path
            path = path.rpartition("/")[0]


class _explained:
    """Turns obstore's errors into ours: those that a retry may heal, and those that it cannot."""

    def __init__(self, place: str, access: Access) -> None:
        self._place = place
        self._access = access

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from obstore import exceptions

        if not isinstance(error, (exceptions.BaseError, OSError)):
            return
        if isinstance(error, exceptions.PreconditionError):
            raise ConfigurationError(f"{self._place} was {_REPLACED}") from error
        lasting = (
            ((exceptions.NotFoundError, FileNotFoundError), "does not exist"),  # the library raises Python's own
            (exceptions.PermissionDeniedError, "may not be read with these credentials"),
            (exceptions.UnauthenticatedError, "needs other credentials"),
        )
        for known, why in lasting:
            if isinstance(error, known) or (why == "does not exist" and "<Code>NoSuchBucket</Code>" in str(error)):
                raise ConfigurationError(f"{self._place} {why}") from error
        raise Interrupted(f"{self._place}: {self._access.line(error)}") from error
