"""The address of a model in an S3-like object store: ``s3://BUCKET/PREFIX``.

Here: what is one. Not here: reaching the store (the runtime's `weights`). Called by validation, the operator and the
runtime, so that all three take the same addresses.
"""

from __future__ import annotations

import re
from typing import Final

SCHEME: Final = "s3://"
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")  # with what other stores than AWS' allow
_SEGMENT: Final = re.compile(r"[^/?#\s\x00-\x1f\x7f]+")


def is_address(model_path: str | None) -> bool:
    """Whether a model must be fetched from an object store."""
    return model_path is not None and model_path.startswith(SCHEME)


def split(address: str) -> tuple[str, str] | None:
    """(bucket, prefix) of an address; None where it is not ``s3://BUCKET/PREFIX``.

    The prefix may be empty. It has no ``.`` or ``..``, and neither ``?``, ``#``, blanks nor empty segments.
    """
    bucket, _, rest = address.removeprefix(SCHEME).partition("/")
    prefix = rest.removesuffix("/")
    segments = prefix.split("/") if prefix else []
    sound = all(_SEGMENT.fullmatch(each) and each not in (".", "..") for each in segments)
    return (bucket, prefix) if is_address(address) and _BUCKET.fullmatch(bucket) and sound else None
