"""Which processes may write into each other's memory: those that one supervisor has started.

The supervisor draws a secret and gives it to its workers in their environment. Endpoints name the domain (a digest of
the secret), so that workers under different supervisors, or on different machines, never take each other for
neighbours. A connection then proves the secret itself, between processes of one user.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import MutableMapping

SHARING_SECRET = "DISAGG_SHARING_SECRET"
SECRET_BYTES = 32


class SharingDomain:
    """The workers of one supervisor. Its secret is shown to none but them."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.name = hashlib.blake2b(secret, digest_size=8, person=b"disagg-domain").hexdigest()

    def environment(self) -> dict[str, str]:
        """What a worker's environment must contain."""
        return {SHARING_SECRET: self.secret.hex()}

    def admits(self, secret: bytes) -> bool:
        """Whether somebody knows the secret."""
        return hmac.compare_digest(self.secret, secret)


def draw_domain() -> SharingDomain:
    """A new domain; call once per supervisor."""
    return SharingDomain(secrets.token_bytes(SECRET_BYTES))


def take_domain(environ: MutableMapping[str, str] = os.environ) -> SharingDomain | None:
    """The domain this process was started in; None when no supervisor started it.

    The variable is taken out of `environ`: it is not for this process's own children.
    """
    text = environ.pop(SHARING_SECRET, "")
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        return None
    return SharingDomain(secret) if len(secret) == SECRET_BYTES else None
