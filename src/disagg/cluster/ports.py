"""A port for a server that is not there yet, or not any more."""

import contextlib
import socket

from disagg.core.errors import ConfigurationError


def reserve_port(host: str) -> socket.socket:
    """A free TCP port of that host that stays ours while the socket is open, also while who listens on it starts again.

    The socket never listens: with SO_REUSEADDR on both, another one may, and the kernel gives the port to nobody else.
    Raises ConfigurationError where no port can be had.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with contextlib.ExitStack() as undo:
            reserved = undo.enter_context(socket.socket(family, kind, protocol))
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(address)
            undo.pop_all()
    except OSError as error:
        raise ConfigurationError(f"no port can be had on {host}: {error.strerror or error}") from None
    return reserved
