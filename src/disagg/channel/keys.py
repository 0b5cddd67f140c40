"""TLS for control and data connections: both ends show a certificate that the same authority has signed.

A directory of keys, as `disagg keys` makes it, holds ca.pem, node.pem and node.key.
"""

import ssl
from pathlib import Path
from typing import NamedTuple

from disagg.core.endpoints import is_loopback
from disagg.core.errors import ConfigurationError

CA_FILE = "ca.pem"
CERTIFICATE_FILE = "node.pem"
KEY_FILE = "node.key"
OPEN_TO_OTHERS = 0o077


class Keys(NamedTuple):
    """TLS 1.3 for either end of a connection; neither talks to who has no certificate of the authority."""

    dialling: ssl.SSLContext
    accepting: ssl.SSLContext


def load_keys(directory: str) -> Keys | None:
    """None for "", which stands for no TLS. Raises ConfigurationError, naming the file."""
    if not directory:
        return None
    folder = Path(directory)
    for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE):
        if not (folder / name).is_file():
            raise ConfigurationError(
                f"--keys {directory}: there is no {name}; make it with: disagg keys DIR --host HOST"
            )
    if (folder / KEY_FILE).stat().st_mode & OPEN_TO_OTHERS:
        raise ConfigurationError(f"--keys {directory}: others can read {KEY_FILE}; chmod 600 {folder / KEY_FILE}")
    return Keys(_context(folder, ssl.PROTOCOL_TLS_CLIENT), _context(folder, ssl.PROTOCOL_TLS_SERVER))


def check_exposure(flag: str, host: str, keys: str) -> None:
    """Raises ConfigurationError where others could reach a socket that asks nobody who they are."""
    if not keys and not is_loopback(host):
        text = f"{flag} {host} can be reached from other machines, and nothing there asks who is calling"
        raise ConfigurationError(f"{text}: add --keys DIR (made by: disagg keys DIR --host {host}) or use 127.0.0.1")


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED  # the accepting end too
    try:
        context.load_verify_locations(folder / CA_FILE)
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE, password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(f"--keys {folder}: {error}; make them anew with disagg keys") from None
    return context
