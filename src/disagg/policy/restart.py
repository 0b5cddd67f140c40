"""When to start a dead process again, and when to stop trying."""

from collections.abc import Sequence

import msgspec


class RestartPolicy(msgspec.Struct, frozen=True):
    """Delays double from first_delay_s to max_delay_s; max_crashes within window_s is one too many."""

    first_delay_s: float = 0.25
    max_delay_s: float = 15.0
    max_crashes: int = 8
    window_s: float = 300.0


class RestartDecision(msgspec.Struct, frozen=True):
    """Seconds to wait before the next start; None: leave it dead."""

    delay_s: float | None
    reason: str


DEFAULT_RESTART_POLICY = RestartPolicy()


def restart_delay(
    history: Sequence[float], now_s: float, policy: RestartPolicy = DEFAULT_RESTART_POLICY
) -> RestartDecision:
    """Decide after a crash.

    history: times of all crashes of this process, in seconds on the clock of now_s, the one at hand included.
    Only crashes within the last window_s count, so a process that ran well for long starts again at once.
    """
    recent = sum(1 for crash_s in history if now_s - crash_s <= policy.window_s)
    if recent >= policy.max_crashes:
        return RestartDecision(None, f"{recent} crashes within {policy.window_s:g} s: left dead")
    # The exponent is capped so that a generous max_crashes cannot overflow a float.
    doublings = min(max(recent - 1, 0), 32)
    delay_s = min(policy.first_delay_s * 2.0**doublings, policy.max_delay_s)
    return RestartDecision(delay_s, f"crash {recent} of {policy.max_crashes}: again in {delay_s:g} s")
