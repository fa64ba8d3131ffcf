"""Certificates for a deployment that has none: an authority of its own, and what it signs.

A certificate is for servers and for clients alike, as the services of a deployment are both to one another. Keys are
on the curve P-256, which everything that speaks TLS takes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hearth.files import write_whole
from hearth.tls import Pair, TlsError, read_pair

AUTHORITY_VALID = timedelta(days=3650)
# Clocks of other machines may be behind.
_BEFORE = timedelta(hours=1)


class Authority:
    """What signs certificates: a root certificate and its key."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, name: str, now: datetime) -> Self:
        """A new one, valid for `AUTHORITY_VALID`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        built = (
            _builder(subject, subject, key.public_key(), now, now + AUTHORITY_VALID)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(built.sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, certificate_file: Path, key_file: Path) -> Self:
        """The one that `write` left; raises `TlsError`."""
        chain, private = read_pair(certificate_file, key_file)
        key = load_pem_private_key(private, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TlsError(key_file, "is of another kind than the keys that are made here")
        return cls(x509.load_pem_x509_certificate(chain), key)

    def write(self, certificate_file: Path, key_file: Path) -> None:
        """Keep it; only its owner may read the key."""
        write_whole(key_file, _pem_of(self._key), 0o600)
        write_whole(certificate_file, self.certificate, 0o644)

    @property
    def certificate(self) -> bytes:
        """What those who shall believe it need, PEM."""
        return self._certificate.public_bytes(Encoding.PEM)

    @property
    def ends(self) -> datetime:
        """When nothing that it signed counts any more."""
        return self._certificate.not_valid_after_utc

    def issue(self, name: str, hosts: Sequence[str], now: datetime, valid: timedelta) -> Pair:
        """A certificate for servers at `hosts`, names or IP addresses, and for a client called `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(
            digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=False, crl_sign=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        ends = min(now + valid, self.ends)
        built = (
            _builder(_name(name), self._certificate.subject, key.public_key(), now, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            built = built.add_extension(names, critical=False)
        return Pair(built.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM), _pem_of(key))

    def signed(self, pair: Pair) -> bool:
        """Whether a certificate is one of its own."""
        certificate = x509.load_pem_x509_certificate(pair.certificate_chain)
        try:
            certificate.verify_directly_issued_by(self._certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True


def ends_at(pair: Pair) -> datetime:
    """When a certificate stops to count."""
    return x509.load_pem_x509_certificate(pair.certificate_chain).not_valid_after_utc


def write_pair(pair: Pair, certificate_file: Path, key_file: Path, *, key_mode: int = 0o600) -> None:
    """Keep a certificate and its key. A process that watches them takes them once both are there."""
    write_whole(key_file, pair.private_key, key_mode)
    write_whole(certificate_file, pair.certificate_chain, 0o644)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins - _BEFORE)
        .not_valid_after(ends)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
