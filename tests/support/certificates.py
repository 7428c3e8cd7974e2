"""An authority of a test's own, and certificates that it signs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Files:
    """PEM files: the authority's certificate, one that it signed, and the key of that one."""

    cacertfile: Path
    certfile: Path
    keyfile: Path


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(name)
        self._certificate = (
            _builder(subject, subject, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.cacertfile = _write(folder / f"{name}.pem", self._certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *, passphrase: bytes | None = None) -> Files:
        """Make a key and a certificate for a name, which is a client's user name or a server's host name."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(_subject(name), self._certificate.subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        locked = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
        stem = f"{self._name}-{name}{'-locked' if passphrase else ''}"
        return Files(
            self.cacertfile,
            _write(self._folder / f"{stem}.pem", certificate.public_bytes(serialization.Encoding.PEM)),
            _write(self._folder / f"{stem}.key", secret),
        )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
