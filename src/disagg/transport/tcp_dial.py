"""How a sender opens a connection: connect, TLS where there are keys, prove the pairing, be welcomed."""

import socket
import ssl

import msgspec

from disagg.core.endpoints import Endpoint, split_address
from disagg.core.errors import PeerLost
from disagg.core.ids import Incarnation, WorkerId
from disagg.transport.capability import hello_proof
from disagg.transport.stream import Stream
from disagg.transport.tls_stream import TlsStream
from disagg.transport.wire import Challenge, Hello, Item, Welcome, decode_body


class Introduction(msgspec.Struct, frozen=True):
    """What a sender says of itself to one receiver."""

    sender: WorkerId
    sender_incarnation: Incarnation
    destination_incarnation: Incarnation
    checksums: bool


def open_stream(
    endpoint: Endpoint, *, connect_timeout_s: float, stall_timeout_s: float, tls: ssl.SSLContext | None
) -> Stream:
    """A connection on which nothing was said yet. Raises PeerLost, OSError."""
    try:
        host, port = split_address(endpoint.address)
        sock = socket.create_connection((host, port), connect_timeout_s)
    except ValueError as error:  # also of what no host can be called
        raise PeerLost(f"nobody can be there: {error}") from error
    try:
        if tls is None:
            return Stream(sock, stall_timeout_s)
        return TlsStream(sock, stall_timeout_s, tls, server_name=host)
    except BaseException:  # reset already
        sock.close()
        raise


def introduce(stream: Stream, who: Introduction, token: bytes, lane: int) -> bytes:
    """Be welcomed; returns the nonce of this connection. The caller bounds the time, by shut(). Raises PeerFault."""
    stream.handshake()
    prefix = stream.receive_prefix(Item.CHALLENGE)
    nonce = decode_body(stream.receive_bytes(prefix.num_bytes), prefix, Challenge).nonce
    proof = hello_proof(token, nonce, lane)
    hello = Hello(who.sender, who.sender_incarnation, who.destination_incarnation, who.checksums, lane, proof)
    stream.send_item(Item.HELLO, hello)
    prefix = stream.receive_prefix(Item.WELCOME)
    welcome = decode_body(stream.receive_bytes(prefix.num_bytes), prefix, Welcome)
    if welcome.refusal is not None:
        raise PeerLost(f"it refuses: {welcome.refusal}")
    return nonce
