"""Where and how a worker's arena can be written to."""

import enum
import ipaddress

import msgspec


class TransportKind(enum.StrEnum):
    """In order of preference, best last."""

    TCP = "tcp"
    IN_PROCESS = "in_process"


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """One way to write to a worker's arena."""

    kind: TransportKind
    address: str  # "host:port" for tcp, a name for in_process
    token: bytes = b""  # proves the pairing of one peer; only that peer is told


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a socket bound to this host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether it stands for every address of this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return not host
