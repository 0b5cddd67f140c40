"""What a link is like, and what it does to packets. Pure: time is an argument."""

from collections import deque

import msgspec

from disagg.core.errors import ConfigurationError, InternalFault

BYTES_PER_MBIT = 125_000
BUFFER_S = 0.05  # of the link's rate, besides what is on its way; fuller than that, packets are dropped
MIN_BUFFER_BYTES = 256 << 10


class LinkShape(msgspec.Struct, frozen=True):
    """The same both ways. Raises ConfigurationError for what cannot be a link."""

    rate_mbit: float
    round_trip_s: float = 0.0  # what the link adds
    mtu: int = 9000  # bytes

    def __post_init__(self) -> None:
        if self.rate_mbit <= 0 or self.round_trip_s < 0:
            text = f"a link of {self.rate_mbit:g} Mbit/s and {self.round_trip_s:g} s"
            raise ConfigurationError(f"{text}: the rate must be above 0, the time at least 0")
        if not 1280 <= self.mtu <= 65535:
            raise ConfigurationError(f"mtu is {self.mtu}: it must be from 1280 to 65535")

    @property
    def bytes_per_s(self) -> float:
        return self.rate_mbit * BYTES_PER_MBIT

    @property
    def name(self) -> str:
        speed = f"{self.rate_mbit / 1000:g} Gbit/s" if self.rate_mbit >= 1000 else f"{self.rate_mbit:g} Mbit/s"
        return f"{speed} + {1e3 * self.round_trip_s:g} ms" if self.round_trip_s else speed


class OneWay:
    """Packets of one direction: each takes its time on the wire, one after the other, then the way."""

    def __init__(self, shape: LinkShape) -> None:
        self._shape = shape
        self._delay_s = shape.round_trip_s / 2
        self._max_bytes = max(MIN_BUFFER_BYTES, int(shape.bytes_per_s * BUFFER_S))
        self._max_bytes += int(shape.bytes_per_s * self._delay_s)
        self._packets: deque[tuple[float, bytes]] = deque()  # and when each arrives
        self._free_s = float("-inf")  # when the wire is free
        self._num_bytes = 0
        self.num_dropped = 0

    def offer(self, packet: bytes, now_s: float) -> None:
        """Take a packet, or drop it when the buffer is full."""
        if self._num_bytes + len(packet) > self._max_bytes:
            self.num_dropped += 1
            return
        self._free_s = max(self._free_s, now_s) + len(packet) / self._shape.bytes_per_s
        self._packets.append((self._free_s + self._delay_s, packet))
        self._num_bytes += len(packet)

    def arrived(self, now_s: float) -> list[bytes]:
        """Packets that are there by now, in order; they are no longer here."""
        found = []
        while self._packets and self._packets[0][0] <= now_s:
            packet = self._packets.popleft()[1]
            self._num_bytes -= len(packet)
            found.append(packet)
        return found

    def next_s(self) -> float:
        """When the next one arrives; infinity for never."""
        return self._packets[0][0] if self._packets else float("inf")

    def check_invariants(self) -> None:
        held = sum(len(packet) for _, packet in self._packets)
        if held != self._num_bytes or held > self._max_bytes:
            raise InternalFault(f"{held} bytes are on the way, {self._num_bytes} are counted, {self._max_bytes} fit")
        times = [at_s for at_s, _ in self._packets]
        if times != sorted(times):
            raise InternalFault("packets overtake each other")
