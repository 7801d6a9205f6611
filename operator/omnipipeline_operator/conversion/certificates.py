"""The certificate of the conversion webhook and its authority: made, and renewed in time.

Here: what a Secret holds, and one pure rule of what it should hold now. Not here: the Secret (`publishing`), TLS
(`serving`). All replicas share the Secret. A new authority is published for a while before a certificate of it is
used, so every API server trusts it by then.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFE: Final = timedelta(days=3650)
LIFE: Final = timedelta(days=90)  # renewed at a third: an operator that is down for a month still finds it valid
SKEW: Final = timedelta(hours=1)  # clocks of API servers may be late
SETTLING: Final = timedelta(hours=1)  # of a new authority: until then certificates are of the one before
#: The errors of cryptography for entries of others: also for a key with a password, an unknown algorithm, or a
#: certificate that names no host.
UNREADABLE: Final = (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound)
_PEM: Final = serialization.Encoding.PEM


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of the Secret, all of them PEM."""

    authorities: bytes  #: Newest first; the API server trusts all of them.
    authority_key: bytes  #: The key of the newest.
    certificate: bytes
    key: bytes

    def data(self) -> dict[str, bytes]:
        """The Secret's entries."""
        return {field: getattr(self, name) for field, name in _FIELDS.items()}


_FIELDS: Final = {"ca.crt": "authorities", "ca.key": "authority_key", "tls.crt": "certificate", "tls.key": "key"}


def of(data: Mapping[str, bytes]) -> Held | None:
    """The entries of a Secret; None: not all of them are there."""
    return Held(**{name: data[field] for field, name in _FIELDS.items()}) if all(map(data.get, _FIELDS)) else None


def renewed(held: Held | None, host: str, now: datetime) -> Held:
    """The entries that the Secret should have now: ``held`` itself while nothing is due.

    host: the name or address that API servers connect to.
    """
    try:
        return _renewed(held, host, now) if held is not None else _made(host, now)
    except UNREADABLE:  # it is not ours, or damaged: nothing served with it
        return _made(host, now)


def _renewed(held: Held, host: str, now: datetime) -> Held:
    """Raises: one of `UNREADABLE`: a part cannot be read."""
    authorities = x509.load_pem_x509_certificates(held.authorities)
    signing = _key(held.authority_key)
    leaf = x509.load_pem_x509_certificate(held.certificate)
    if authorities[0].public_key() != signing.public_key() or leaf.public_key() != _key(held.key).public_key():
        raise ValueError("a key is not that of its certificate")
    valid = [each for each in authorities if each.not_valid_after_utc > now]
    if not valid:
        return _made(host, now)
    if valid[0].not_valid_after_utc - now < AUTHORITY_LIFE / 3:
        signing = ec.generate_private_key(ec.SECP256R1())
        valid = [_authority(signing, now), *valid]
    due = (
        leaf.not_valid_after_utc - now < LIFE / 3
        or leaf.issuer != valid[0].subject
        or leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value != _names(host)
    )
    settled = now - valid[0].not_valid_before_utc >= SKEW + SETTLING
    useless = leaf.not_valid_after_utc <= now or leaf.issuer not in [each.subject for each in valid]
    if due and (settled or useless or leaf.issuer == valid[0].subject):
        return _issued(valid, signing, host, now)
    if valid == authorities:
        return held
    return msgspec.structs.replace(held, authorities=_bundle(valid), authority_key=_private(signing))


def _made(host: str, now: datetime) -> Held:
    signing = ec.generate_private_key(ec.SECP256R1())
    return _issued([_authority(signing, now)], signing, host, now)


def _issued(authorities: list[x509.Certificate], signing: Any, host: str, now: datetime) -> Held:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "omnipipeline-conversion")])
    made = (
        _builder(subject, authorities[0].subject, key.public_key(), now, LIFE)
        .add_extension(_names(host), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(signing, hashes.SHA256())
    )
    return Held(
        authorities=_bundle(authorities),
        authority_key=_private(signing),
        certificate=made.public_bytes(_PEM),
        key=_private(key),
    )


def _authority(key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    # A name of its own, by which certificates of an older one are told apart.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"omnipipeline-conversion-{now:%Y%m%d%H%M%S}")])
    return (
        _builder(name, name, key.public_key(), now, AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + life)
    )


def _names(host: str) -> x509.SubjectAlternativeName:
    try:
        return x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    except ValueError:
        return x509.SubjectAlternativeName([x509.DNSName(host)])


def _key(pem: bytes) -> Any:
    return serialization.load_pem_private_key(pem, password=None)


def _private(key: Any) -> bytes:
    made: bytes = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return made


def _bundle(certificates: list[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(_PEM) for each in certificates)
