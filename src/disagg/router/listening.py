"""The listening socket of the HTTP server."""

import socket
from typing import Final

from disagg.core.endpoints import join_address
from disagg.core.errors import ConfigurationError

_BACKLOG: Final = 2048
_VANISHED: Final = (
    (socket.TCP_KEEPIDLE, 30),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 60_000),  # milliseconds
)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ConfigurationError in one plain line.

    Accepted connections inherit the options. A client that vanished without a word is found out: it answers neither
    what was sent to it nor the kernel's own questions. Without TCP_NODELAY a small answer sent as headers and body
    waits some 40 ms for the client's acknowledgement, and servers that are handed a bare socket do not set it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"the host {host!r} cannot be listened on: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _VANISHED:
            listener.setsockopt(socket.IPPROTO_TCP, option, seconds)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        where = join_address(host, port)
        raise ConfigurationError(
            f"cannot listen on {where}: {error.strerror}; stop what uses the port or choose another one"
        ) from error
    listener.setblocking(False)
    return listener
