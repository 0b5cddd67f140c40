"""The listening socket of the HTTP server."""

import socket
from typing import Final

from disagg.core.errors import ConfigurationError

_BACKLOG: Final = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ConfigurationError in one plain line.

    Accepted connections inherit TCP_NODELAY. Without it a small answer sent as headers and body waits some 40 ms for
    the client's acknowledgement, and servers that are handed a bare socket do not set it themselves.
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
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop what uses the port or choose another one"
        ) from error
    listener.setblocking(False)
    return listener
