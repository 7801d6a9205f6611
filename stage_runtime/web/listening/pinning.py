"""The certificate by which programs of this machine know a local run's server, whoever signed it and however old it is.

Here: which certificate a context shows, the file that says so, and a client's context that compares. Not here: who
writes the file (`processes.coordinator_process`) and where it lies (`one_machine.launcher`). Called by `omni up` and by
the commands that ask it.

Nothing but the certificate itself is compared. An authority's rules would turn these programs away from one that has
expired or is meant for other uses, which the server shows all the same; and the author's file may hold another one than
the server, which keeps its own while that file is wrong.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_FLIGHTS: Final = 4  # of a handshake, from either side


def shown(context: ssl.SSLContext) -> bytes:
    """The certificate that clients of a server with this context see, as PEM: they shake hands in memory."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = _trusting().wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_FLIGHTS):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    found = client.getpeercert(binary_form=True)
    assert found is not None, "a server always shows one"
    return ssl.DER_cert_to_PEM_cert(found).encode()


def listed(certificates: Iterable[bytes]) -> bytes:
    """The content of the file: what `pinned` accepts."""
    return b"".join(dict.fromkeys(certificates))


def pinned(file: Path) -> ssl.SSLContext:
    """A client's context for a server of this machine: it takes the certificates in ``file``, and no other one.

    Raises: OSError: the file cannot be read.
    """
    known = {ssl.PEM_cert_to_DER_cert(one.decode()) for one in _PEM.findall(file.read_bytes())}

    def compare(found: bytes | None) -> None:
        if found not in known:
            raise ssl.SSLCertVerificationError(f"the server's certificate is not in {file}")

    class Socket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            compare(self.getpeercert(binary_form=True))

    class Object(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            compare(self.getpeercert(binary_form=True))

    made = _trusting()
    made.sslsocket_class, made.sslobject_class = Socket, Object
    return made


def _trusting() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False  # a certificate has the public name; the address is the loopback's
    made.verify_mode = ssl.CERT_NONE
    return made
