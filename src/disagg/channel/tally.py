"""What was turned away at a socket, counted from any thread."""

import enum
import threading


class Refusal(enum.StrEnum):
    """Why a connection, a message or a frame was turned away."""

    FULL = "full"  # too many connections
    LATE = "late"  # did not introduce itself in time
    GARBAGE = "garbage"  # nothing of this protocol
    NOT_PAIRED = "not_paired"  # another incarnation, or no proof of the pairing
    NO_TLS = "no_tls"  # no certificate that the authority has signed
    NO_GRANT = "no_grant"  # unknown, given back, or somebody else's
    FALSE_PROOF = "false_proof"  # the grant is there, its key was not proven


class Tally:
    """Counts refusals from any thread. Bounded: one number per reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(Refusal, 0)
        self._taken = dict.fromkeys(Refusal, 0)

    def add(self, reason: Refusal) -> None:
        with self._lock:
            self._counts[reason] += 1

    def counts(self) -> dict[Refusal, int]:
        """Totals since the start, without those that are 0."""
        with self._lock:
            return {reason: count for reason, count in self._counts.items() if count}

    def take(self) -> dict[Refusal, int]:
        """What was added since this was last called, without zeros. For one caller only."""
        with self._lock:
            new = {reason: count - self._taken[reason] for reason, count in self._counts.items()}
            self._taken = dict(self._counts)
        return {reason: count for reason, count in new.items() if count}
