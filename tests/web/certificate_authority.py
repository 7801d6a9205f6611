"""Certificates for tests: real ones, of an authority that a test trusts."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from stage_runtime.web.listening.certificates import CertificatePair

_DAY = datetime.timedelta(days=1)
_PEM = serialization.Encoding.PEM


class Authority:
    """Signs certificates for ``localhost`` and the loopback's addresses."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority of tests")])
        made = self._builder(self._name, self._key.public_key())
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self._certificate = made.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())
        self.pem = self._certificate.public_bytes(_PEM)

    def issue(
        self,
        name: str,
        *,
        kind: str = "ec",
        password: bytes | None = None,
        days: tuple[float, float] = (-1, 1),
        use: x509.ObjectIdentifier | None = None,
    ) -> CertificatePair:
        """name: the subject, by which tests tell certificates apart. kind: ``ec`` or ``rsa``.

        days: of its begin and its end, from now. use: the only one that it is meant for.
        """
        made = rsa.generate_private_key(65537, 2048) if kind == "rsa" else ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        addresses = [x509.IPAddress(ipaddress.ip_address(one)) for one in ("127.0.0.1", "::1")]
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), *addresses])
        leaf = self._builder(subject, made.public_key(), days).add_extension(names, critical=False)
        if use is not None:
            leaf = leaf.add_extension(x509.ExtendedKeyUsage([use]), critical=True)
        hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        return CertificatePair(
            chain=leaf.sign(self._key, hashes.SHA256()).public_bytes(_PEM) + self.pem,
            key=made.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, hidden),
        )

    def trusted(self) -> ssl.SSLContext:
        """The context of a client that trusts this authority alone."""
        return ssl.create_default_context(cadata=self.pem.decode())

    def _builder(
        self,
        subject: x509.Name,
        key: rsa.RSAPublicKey | ec.EllipticCurvePublicKey,
        days: tuple[float, float] = (-1, 1),
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + days[0] * _DAY)
            .not_valid_after(now + days[1] * _DAY)
        )


def write(pair: CertificatePair, folder: Path) -> tuple[Path, Path]:
    """Write as a kubelet writes a Secret: both files are replaced at once, by one symbolic link."""
    folder.mkdir(exist_ok=True)
    version = folder / f"..{len(list(folder.iterdir()))}"
    version.mkdir()
    for name, content in (("tls.crt", pair.chain), ("tls.key", pair.key)):
        (version / name).write_bytes(content)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    (folder / "..next").symlink_to(version.name)
    (folder / "..next").replace(folder / "..data")
    return folder / "tls.crt", folder / "tls.key"


def shown(transport: object) -> str:
    """The subject of the certificate that a client's connection was shown. transport: has ``get_extra_info``."""
    facts = transport.get_extra_info("peercert")  # type: ignore[attr-defined]
    return str(dict(one for part in facts["subject"] for one in part)["commonName"])
