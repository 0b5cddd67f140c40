"""What proves to a receiver that a sender may write: made once, recomputed at the other end, kept by nobody.

    token   the pairing: a function of the receiver's secret and of who the sender is; told over the control connection
    hello   a proof of the token for one connection, whose nonce the receiver has drawn
    frame   a proof of the grant's key for one frame of that connection; the key itself never travels here

Proofs are HMAC-SHA256. A proof recorded from one connection is worth nothing on another: its nonce differs.
"""

import hashlib
import hmac

from disagg.core.ids import Incarnation, WorkerId

NONCE_BYTES = 16
NAME_BYTES = 16
PROOF_BYTES = 32
SECRET_BYTES = 32

_DIGEST = "sha256"


def pairing_token(secret: bytes, sender: WorkerId, incarnation: Incarnation) -> bytes:
    """What the receiver with this secret gives a paired sender."""
    return _mac(secret, b"token", str(incarnation).encode(), sender.encode())


def hello_proof(token: bytes, nonce: bytes, lane: int) -> bytes:
    """Shows that the sender was paired, for one connection."""
    return _mac(token, b"hello", nonce, lane.to_bytes(4))


def grant_name(key: bytes) -> bytes:
    """Names a grant on the wire and in logs without giving its key away."""
    return hashlib.sha256(b"disagg grant" + key).digest()[:NAME_BYTES]


def shown(key: bytes) -> str:
    """A grant as messages and logs may name it."""
    return grant_name(key).hex()


def frame_proof(key: bytes, nonce: bytes, number: int) -> bytes:
    """Shows that the sender holds the grant, for one frame of one connection."""
    return _mac(key, b"frame", nonce, number.to_bytes(8))


def is_right(proof: bytes, expected: bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(proof, expected)


def _mac(key: bytes, kind: bytes, *parts: bytes) -> bytes:
    # Lengths are part of it, so that no two lists of parts make one message.
    return hmac.digest(key, kind + b"".join(len(part).to_bytes(4) + part for part in parts), _DIGEST)
