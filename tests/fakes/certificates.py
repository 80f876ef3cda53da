"""Certificates that sign themselves, for servers and clients of tests."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from baton.config.schema.security import TlsConfig


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate for 127.0.0.1 that signs itself, and its key."""

    cert: Path
    key: Path

    def tls(self, **options: object) -> TlsConfig:
        return TlsConfig(cert_file=str(self.cert), key_file=str(self.key), **options)  # type: ignore[arg-type]

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.cert))


def make_key_pair(
    folder: Path,
    name: str,
    *,
    address: str = "127.0.0.1",
    valid_for: datetime.timedelta = datetime.timedelta(hours=1),
) -> KeyPair:
    """A pair for an address of this machine; with a negative time, one that has expired."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    alternative_name = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + valid_for) - datetime.timedelta(hours=3))
        .not_valid_after(now + valid_for)
        .add_extension(alternative_name, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pair = KeyPair(folder / f"{name}.crt", folder / f"{name}.pem")
    pair.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return pair


def serial_at(port: int) -> int:
    """The number of the certificate that is shown at a port of this machine."""
    pem = ssl.get_server_certificate(("127.0.0.1", port), timeout=5)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number
