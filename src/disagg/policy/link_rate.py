"""How fast KV gets to one peer: learned from pushes that were acknowledged; before the first, what was measured."""

from disagg.core.errors import InternalFault

HALF_LIFE_BYTES = 16 << 20  # after so many more bytes, what was seen counts half


class LinkRate:
    """A sum of bytes over a sum of the time in which some were under way; both fade as bytes go by.

    Pushes overlap. Of each, only the time since the one before it was acknowledged is counted, so that together they
    count the time in which the link had something to do: on a link that is full, its bandwidth.
    """

    def __init__(self) -> None:
        self._num_bytes = 0.0
        self._seconds = 0.0
        self._last_s = float("-inf")  # last acknowledgement
        self.measured_bytes_per_s = 0.0  # when the two met; 0.0: not measured

    def observe(self, num_bytes: int, sent_s: float, acknowledged_s: float) -> None:
        """One push: when it was given to the transport, and when the peer had verified it."""
        busy_s = max(0.0, acknowledged_s - max(sent_s, self._last_s))
        kept = 0.5 ** (num_bytes / HALF_LIFE_BYTES)
        self._num_bytes = kept * self._num_bytes + num_bytes
        self._seconds = kept * self._seconds + busy_s
        self._last_s = max(self._last_s, acknowledged_s)

    @property
    def bytes_per_s(self) -> float:
        """Learned; 0.0 before the first push."""
        return self._num_bytes / self._seconds if self._seconds > 0 else 0.0

    @property
    def likely_bytes_per_s(self) -> float:
        """What the next push may count on; 0.0 while nothing is known."""
        return self.bytes_per_s or self.measured_bytes_per_s

    def check_invariants(self) -> None:
        if self._num_bytes < 0 or self._seconds < 0:
            raise InternalFault(f"{self._num_bytes} bytes in {self._seconds} s were seen on a link")
