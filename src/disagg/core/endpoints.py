"""Where and how a worker's arena can be written to."""

import enum
import ipaddress

import msgspec

MAX_PORT = 65535


class TransportKind(enum.StrEnum):
    """The cheaper its fence, the later: of two that are as fast, the later one is taken."""

    TCP = "tcp"
    SHARED_MEMORY = "shared_memory"
    IN_PROCESS = "in_process"


class TransportChoice(enum.StrEnum):
    """What a worker offers."""

    AUTO = "auto"  # tcp; and shared memory to workers under the same supervisor, where what is faster is taken
    TCP = "tcp"  # tcp alone


# Whose receiver commits what has landed, so that it can decode a compressed wire.
COMMITS_LANDINGS: frozenset[TransportKind] = frozenset({TransportKind.TCP, TransportKind.IN_PROCESS})


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """One way to write to the arena of one rank of a worker."""

    kind: TransportKind
    address: str  # "host:port" for tcp, "domain/name" for shared_memory, a name for in_process
    token: bytes = b""  # proves the pairing of one peer; only that peer is told
    rank: int = 0

    @property
    def domain(self) -> str:
        """Within which processes this way exists at all; "" for everywhere."""
        return self.address.rpartition("/")[0] if self.kind is TransportKind.SHARED_MEMORY else ""

    def is_same_way(self, other: "Endpoint") -> bool:
        """Whether whoever offers the other can use this one."""
        return (self.kind, self.domain) == (other.kind, other.domain)


class TransportRate(msgspec.Struct, frozen=True, array_like=True):
    """How fast one kind carried bytes from a worker to a peer when it was last measured."""

    kind: TransportKind
    bytes_per_s: float = 0.0  # 0: not measured
    latency_s: float = 0.0  # there and back
    expected_bytes_per_s: float = 0.0  # what it should give; 0: nobody knows
    failure: str = ""  # why it could not be measured


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


def join_address(host: str, port: int) -> str:
    """As "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of "host:port". Raises ValueError."""
    host, _, text = address.rpartition(":")
    port = int(text)
    if not 0 <= port <= MAX_PORT:
        raise ValueError(f"port {port} is not 0 to {MAX_PORT}")
    return host.strip("[]"), port


def is_dialable(address: str) -> bool:
    """Whether it is "host:port" with a host and a port that can be there."""
    try:
        host, port = split_address(address)
    except ValueError:
        return False
    return bool(host) and port > 0
