"""Where and how a worker's arena can be written to."""

import enum

import msgspec


class TransportKind(enum.StrEnum):
    """In order of preference, best last."""

    TCP = "tcp"
    IN_PROCESS = "in_process"


# Whose receiver commits what has landed, so that it can decode a compressed wire.
COMMITS_LANDINGS: frozenset[TransportKind] = frozenset({TransportKind.TCP, TransportKind.IN_PROCESS})


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """One way to write to the arena of one rank of a worker."""

    kind: TransportKind
    address: str  # "host:port" for tcp, a name for in_process
    rank: int = 0
