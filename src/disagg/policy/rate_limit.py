"""How much one client may ask for in a minute. Token buckets: what was not used yet may be used at once.

A bucket holds a minute's worth and fills evenly. What a request will cost is not known before it has ended, so an
answer may take a bucket below zero; then the next request waits until it is above again.
"""

import msgspec

from disagg.core.errors import InternalFault

_MINUTE_S = 60.0


class RateLimits(msgspec.Struct, frozen=True):
    """Of one client; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers


class _Bucket:
    """What is left of a minute's worth."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._seen_s: float | None = None

    def left(self, now_s: float) -> float:
        gained = 0.0 if self._seen_s is None else (now_s - self._seen_s) * self.per_minute / _MINUTE_S
        self._left = min(float(self.per_minute), self._left + gained)
        self._seen_s = now_s
        return self._left

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until this much is there. More than a bucket holds needs a full one."""
        missing = min(amount, float(self.per_minute)) - self.left(now_s)
        return max(0.0, missing * _MINUTE_S / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        self._left = self.left(now_s) - amount


class RateMeter:
    """One client's use. Times never go back."""

    def __init__(self, limits: RateLimits) -> None:
        """Raises ValueError for a limit below 1."""
        for limit in (limits.requests_per_minute, limits.tokens_per_minute):
            if limit is not None and limit < 1:
                raise ValueError(f"a limit of {limit} per minute: it must be at least 1, or left out")
        self.limits = limits
        self._requests = None if limits.requests_per_minute is None else _Bucket(limits.requests_per_minute)
        self._tokens = None if limits.tokens_per_minute is None else _Bucket(limits.tokens_per_minute)

    def wait_s(self, num_tokens: int, now_s: float) -> float:
        """Seconds until a request with this many prompt tokens may come; 0: now."""
        waits = [0.0]
        if self._requests is not None:
            waits.append(self._requests.wait_s(1.0, now_s))
        if self._tokens is not None:
            waits.append(self._tokens.wait_s(float(max(1, num_tokens)), now_s))
        return max(waits)

    def try_admit(self, num_tokens: int, now_s: float) -> bool:
        """Count a request with this many prompt tokens, unless it is too early for it."""
        if self.wait_s(num_tokens, now_s) > 0.0:
            return False
        if self._requests is not None:
            self._requests.take(1.0, now_s)
        self.charge(num_tokens, now_s)
        return True

    def charge(self, num_tokens: int, now_s: float) -> None:
        """Count tokens that were written."""
        if self._tokens is not None:
            self._tokens.take(float(num_tokens), now_s)

    def check_invariants(self) -> None:
        if self._requests is not None and self._requests._left < -1e-6:
            raise InternalFault(f"{-self._requests._left:g} requests more were let in than may be")
