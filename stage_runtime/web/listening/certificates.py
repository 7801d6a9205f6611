"""The certificate that the HTTP server shows, which may be replaced while it serves.

Here: reading a pair of files, the TLS context made of it. Not here: handshakes (`accepting`), who notices that the
files have changed (`processes.coordinator_process`).

Each new pair becomes a context of its own, for the connections that are made from then on. Loading it into the context
that is used would keep the old certificate beside the new one where their keys are of different kinds, and a pair that
does not fit together would break what serves.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from cryptography import x509

from stage_runtime.errors import ConfigurationError

MAX_FILE: Final = 1 << 20  # of a chain; a Secret is not larger
PROTOCOLS: Final = ["http/1.1"]  # a client that offers HTTP/2 chooses this one


class CertificatePair(msgspec.Struct, frozen=True):
    """The certificate with its chain, and its private key, both as PEM."""

    chain: bytes
    key: bytes


class Life(NamedTuple):
    """A certificate's life: seconds since 1970."""

    begins: float
    ends: float


class Certificates:
    """The TLS context of the next connection."""

    def __init__(
        self, pair: CertificatePair, *, changing: Callable[[Sequence[ssl.SSLContext]], None] | None = None
    ) -> None:
        """changing: is given the contexts of the next connections, before the first of them is used.

        Raises: ConfigurationError: as `replace`.
        """
        self.pair = pair
        self.context = context(pair)
        self.life = life(pair.chain)
        self._changing = changing
        if changing is not None:
            changing([self.context])
        self.refused = False  #: The files hold something else, which cannot be served. Set by the watch of the files.

    def replace(self, pair: CertificatePair) -> None:
        """Show another certificate to clients that connect from now on.

        Raises: ConfigurationError: it is not one, or the key is not its key; the present one stays.
        """
        fresh = context(pair)
        if self._changing is not None:
            self._changing([fresh, self.context])
        self.context = fresh
        self.pair, self.life = pair, life(pair.chain)


def life(chain: bytes) -> Life | None:
    """The life of the first certificate of a chain; None: OpenSSL serves it, and cryptography cannot read it."""
    try:
        found = x509.load_pem_x509_certificate(chain)
        return Life(found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp())
    except (ValueError, x509.InvalidVersion):
        return None


def _content(file: Path) -> bytes:
    with file.open("rb") as opened:
        content = opened.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise ConfigurationError(f"{file}: larger than {MAX_FILE} bytes")
    return content


def read(chain: Path, key: Path, *, content: Callable[[Path], bytes] = _content) -> CertificatePair:
    """Both files, of one version: a kubelet replaces them together, by one symbolic link.

    Raises: OSError; ConfigurationError: a file is larger than a certificate.
    """
    while True:
        first = content(chain)
        pair = CertificatePair(first, content(key))
        if content(chain) == first:
            return pair


def context(pair: CertificatePair) -> ssl.SSLContext:
    """Raises: ConfigurationError: it is not a certificate with its key."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.set_alpn_protocols(PROTOCOLS)
    with ExitStack() as stack:
        chain, key = (_file_of(part, stack) for part in (pair.chain, pair.key))
        try:
            made.load_cert_chain(chain, key, password=_refuse_password)
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"not a certificate and its private key, as PEM: {_reason(error, pair)}"
            ) from error
        except ValueError:
            raise ConfigurationError(
                "the private key is protected by a password: it must be readable as it is"
            ) from None
    return made


def _file_of(content: bytes, stack: ExitStack) -> str:
    """`ssl` takes names of files alone. This one is memory of the process: what was compared is what is loaded."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as opened:
        opened.write(content)
    return f"/proc/self/fd/{descriptor}"


def _refuse_password() -> str:
    """Refuses a key with a password: by default, OpenSSL would ask for it at the terminal."""
    raise ValueError("protected by a password")


def _reason(error: ssl.SSLError, pair: CertificatePair) -> str:
    if error.reason:
        return error.reason.lower().replace("_", " ")
    # OpenSSL gives no reason where a file is not PEM, and does not tell which of the two it is.
    for name, part, mark in (
        ("certificate", pair.chain, b"CERTIFICATE-----"),
        ("private key", pair.key, b"PRIVATE KEY-----"),
    ):
        if mark not in part:
            return f"the {name} is {'not PEM' if part.strip() else 'empty'}"
    return "it cannot be read"
