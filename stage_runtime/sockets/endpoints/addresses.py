"""Endpoints and who may use them: Unix sockets on one machine, CURVE on TCP.

CURVE proves membership of the pipeline, not who a member is: both key pairs follow from the pipeline's 32 secret
bytes. The server's public key is as secret as they are: it is never sent, and whoever does not know it cannot write
the first message of CURVE's handshake, which is encrypted to it. `guard` checks the client's key as well.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from stage_runtime.errors import ConfigurationError
from stage_runtime.sockets.endpoints import hosts

KEY_NBYTES: Final = 32
SOCKET_PATH_LIMIT: Final = 107  # sun_path holds 108 bytes, the last one is NUL
#: The domain of ZAP. A socket that has one refuses ZMTP 1.0 and 2.0, which have no handshake: libzmq takes any bytes
#: that do not begin as a newer version's for 1.0, and such a connection would stay for ever. Nobody without a `guard`
#: is asked.
DOMAIN: Final = b"omnipipeline"


class CurveSecurity:
    """The pipeline's CURVE keys. One for all sockets of a process."""

    def __init__(self, secret: bytes) -> None:
        """Raises: ConfigurationError: not 32 bytes."""
        if len(secret) != KEY_NBYTES:
            raise ConfigurationError(f"the control key has {len(secret)} bytes; expected {KEY_NBYTES}")
        self._server_public, self._server_secret = _pair(secret, b"omnipipeline server")
        self._client_public, self._client_secret = _pair(secret, b"omnipipeline client")

    @classmethod
    def read(cls, path: str | Path) -> CurveSecurity:
        try:
            return cls(Path(path).read_bytes())
        except OSError as error:
            raise ConfigurationError(f"control key {path}: {error.strerror}") from error

    def server(self, socket: zmq.Socket[bytes], *, guarded: bool = True) -> None:
        """Must be called before ``bind``. guarded: a `guard` of its context admits peers."""
        socket.curve_server = True
        socket.curve_secretkey = self._server_secret
        if guarded:
            socket.zap_domain = DOMAIN

    def client(self, socket: zmq.Socket[bytes]) -> None:
        """Must be called before ``connect``."""
        socket.curve_serverkey = self._server_public
        socket.curve_publickey = self._client_public
        socket.curve_secretkey = self._client_secret

    def guard(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Start admitting members to ``context``'s server sockets, and no others. Stop it before the context ends."""
        authenticator = ThreadAuthenticator(context)
        try:
            authenticator.start()
        except RuntimeError:  # the machine has no thread left
            authenticator.stop()
            raise
        authenticator.configure_curve_callback(domain=DOMAIN.decode(), credentials_provider=self)
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """pyzmq's credentials provider: is this client key (in Z85) a member's?"""
        return key == self._client_public


def _pair(secret: bytes, label: bytes) -> tuple[bytes, bytes]:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derived = HKDF(algorithm=SHA256(), length=KEY_NBYTES, salt=None, info=label).derive(secret)
    secret_z85 = z85.encode(derived)
    return zmq.curve_public(secret_z85), secret_z85


def is_local(endpoint: str) -> bool:
    return endpoint.startswith(("ipc://", "inproc://"))


def check(endpoint: str) -> str:
    """Refuse an endpoint that cannot be bound or connected, before libzmq does so less clearly.

    Raises: ConfigurationError: unknown scheme, or a socket path over the kernel's limit.
    """
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if len(path.encode()) > SOCKET_PATH_LIMIT:
            raise ConfigurationError(
                f"socket path of {len(path.encode())} bytes, over {SOCKET_PATH_LIMIT}: {path}: "
                "set a shorter endpoints.basePath"
            )
    elif not endpoint.startswith("tcp://"):
        raise ConfigurationError(f"endpoint {endpoint!r}: expected ipc:// or tcp://")
    return endpoint


def is_resolved(endpoint: str) -> bool:
    """Whether its host is not a name: `resolve` returns it as it is, without a question to anyone."""
    if not endpoint.startswith("tcp://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def resolve(endpoint: str) -> list[str]:
    """All addresses behind a TCP endpoint whose host is a name (a headless Service has one per pod). Blocks.

    Returns: endpoints with numeric hosts, sorted; empty while the name is unknown. Others come back as they are.
    """
    if is_resolved(endpoint):
        return [endpoint]
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted(f"tcp://{one}:{port}" for one in {hosts.bracketed(str(item[4][0])) for item in found})
