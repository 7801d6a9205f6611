"""The API keys that clients of a local run must send. Called by `local`."""

from __future__ import annotations

from pathlib import Path

from omnipipeline_spec.cluster import KeyReference
from stage_runtime.errors import ConfigurationError
from stage_runtime.settings import api_keys

MAX_KEY = 4096  # bytes of a key's file


def resolve(
    reference: KeyReference | None, *, file: Path | None, no_auth: bool, found: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The keys of which clients must send one, and a line when the spec asks for one that they need not send.

    found: of the Secret that the spec names, when the file holds it.
    Raises: ConfigurationError: the file of the key cannot be read, or holds none.
    """
    if no_auth or (file is None and not found):
        why = "--no-auth" if no_auth else f"Secret {reference.name!r} is missing here" if reference else ""
        cure = "" if no_auth else ": put it into the pipeline's file, or use --api-key-file"
        line = f"coordinator.http.apiKeySecretRef: no key is required, {why}{cure}"
        return (), (line,) if reference is not None else ()
    if file is None:
        return found, ()
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_KEY + 1)
    except OSError as error:
        raise ConfigurationError(f"--api-key-file {file}: {error.strerror}") from error
    if len(content) > MAX_KEY:
        raise ConfigurationError(f"--api-key-file {file}: holds more than {MAX_KEY} bytes, no key is so long")
    return api_keys(content, f"--api-key-file {file}"), ()
