"""Authorities and certificates for the tests of TLS, made while they run."""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in two files."""

    certificate: Path
    key: Path


class Authority:
    """A CA that signs whatever a test asks for."""

    def __init__(self, folder: Path, name: str = "authority", valid_days: int = 10) -> None:
        """:param folder: takes the CA's certificate and everything issued."""
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self._name, self._name, self._key.public_key(), valid_days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.certificate = folder / f"{name}.pem"
        self.certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def issue(
        self,
        name: str,
        *identities: str,
        common_name: str = "nobody",
        valid_days: int = 1,
        from_days: int = -2,
        curve: ec.EllipticCurve | None = None,
        usages: Sequence[x509.ObjectIdentifier] = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
    ) -> Pair:
        """A certificate, by default for servers and clients alike, overwriting an older one of this name.

        :param identities: addresses, URIs or DNS names.
        :param valid_days: from now; below 0 it has expired.
        :param from_days: from now; above 0 it does not hold yet.
        :param curve: of the key; P-256 by default.
        """
        key = ec.generate_private_key(curve or ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        builder = _builder(subject, self._name, key.public_key(), valid_days, from_days)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if identities:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_name(identity) for identity in identities]), critical=False
            )
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid_days: int, from_days: int = -2
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + from_days * _DAY)
        .not_valid_after(now + valid_days * _DAY)
    )


def _name(identity: str) -> x509.GeneralName:
    if "://" in identity:
        return x509.UniformResourceIdentifier(identity)
    try:
        return x509.IPAddress(ipaddress.ip_address(identity))
    except ValueError:
        return x509.DNSName(identity)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
