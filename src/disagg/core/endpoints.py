"""Where and how a worker's arena can be written to."""

import enum

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
