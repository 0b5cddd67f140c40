"""`disagg keys`: a small authority, and keys for machines that it has signed. The one place that makes certificates.

DIR/ca.pem, ca.key     the authority; ca.key stays where it was made, and signs more machines later
DIR/HOST/              what goes to that machine, for --keys: ca.pem, node.pem, node.key
"""

import datetime
import ipaddress
import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from disagg.channel.keys import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from disagg.core.errors import ConfigurationError

CA_KEY_FILE = "ca.key"
MAX_DAYS = 3650
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # every machine may also talk to itself
CLOCK_SLACK = datetime.timedelta(hours=1)  # a machine whose clock is behind must not refuse a fresh certificate
PRIVATE = 0o600

_HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:_-]{0,252}")


def make_keys(directory: Path, hosts: tuple[str, ...], days: int) -> tuple[str, ...]:
    """Make the authority where there is none yet, and keys for each host; what was made, line by line.

    Raises ConfigurationError, with nothing written, for a host whose keys are there already or a time that cannot be.
    """
    if not 1 <= days <= MAX_DAYS:
        raise ConfigurationError(f"--days {days}: it must be 1 to {MAX_DAYS}")
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ConfigurationError(f"--host {host!r} is neither a host name nor an IP address")
        if (directory / host).exists():
            raise ConfigurationError(f"{directory / host} is there already: remove it to make new keys for {host}")
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = []
        if (directory / CA_KEY_FILE).exists():
            authority, authority_key = _read_authority(directory)
        else:
            authority, authority_key = _new_authority(directory, now, until)
            lines.append(f"made the authority {directory / CA_FILE}; keep {CA_KEY_FILE} to yourself")
        if authority.not_valid_after_utc < now:
            raise ConfigurationError(f"the authority in {directory} has expired: make another in a new directory")
        until = min(until, authority.not_valid_after_utc)
        for host in hosts:
            _new_node(directory / host, host, authority, authority_key, now, until)
            lines.append(f"made {directory / host} for --keys on {host}; it expires on {until:%Y-%m-%d}")
    except OSError as error:
        raise ConfigurationError(f"cannot write {error.filename or directory}: {error.strerror or error}") from None
    return tuple(lines)


def days_left(directory: Path, now: datetime.datetime) -> float:
    """Until the certificate in a machine's directory of keys expires; below 0 when it has."""
    certificate = x509.load_pem_x509_certificate((directory / CERTIFICATE_FILE).read_bytes())
    return (certificate.not_valid_after_utc - now) / datetime.timedelta(days=1)


def _read_authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((directory / CA_FILE).read_bytes())
        key = serialization.load_pem_private_key((directory / CA_KEY_FILE).read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"the authority in {directory} cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"{directory / CA_KEY_FILE} was not made by disagg keys; use another directory")
    return certificate, key


def _new_authority(
    directory: Path, now: datetime.datetime, until: datetime.datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    if (directory / CA_FILE).exists():
        raise ConfigurationError(f"{directory} has {CA_FILE} without {CA_KEY_FILE}: use a directory that has both")
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("disagg authority")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(directory / CA_KEY_FILE, _private(key))
    _write(directory / CA_FILE, certificate.public_bytes(serialization.Encoding.PEM))
    return certificate, key


def _new_node(
    folder: Path,
    host: str,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    until: datetime.datetime,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_alternative(each) for each in dict.fromkeys((host, *LOOPBACK))]
    both_ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(_name(host[:64]), authority.subject, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both_ends), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    folder.mkdir(mode=0o700)
    _write(folder / KEY_FILE, _private(key))
    _write(folder / CERTIFICATE_FILE, certificate.public_bytes(serialization.Encoding.PEM))
    _write(folder / CA_FILE, authority.public_bytes(serialization.Encoding.PEM))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    until: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(until)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes) -> None:
    """For the owner's eyes only, from its first byte. Raises OSError, also where something is there already."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
        file.write(data)
