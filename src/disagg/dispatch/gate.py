"""Which requests are let in: checked against the model's limits and what is promised already.

Who is turned away is told when to come back, by how fast requests have ended lately.
"""

import msgspec

from disagg.core.errors import DisaggError, Failure, FailureKind, InvalidRequest, ModelNotFound, Overloaded, Unavailable
from disagg.dispatch.config import RETRY_AFTER_S, DispatcherConfig
from disagg.dispatch.registry import Registry
from disagg.dispatch.stream import GenerateRequest, ModelStatus
from disagg.dispatch.turnover import TurnoverCounts
from disagg.policy.admission import Limits, default_max_tokens, impossible, retry_after_s, too_much_claimed
from disagg.policy.recovery import Recovery, queued_too_long
from disagg.policy.routing import what_is_missing
from disagg.telemetry.counters import Counters
from disagg.telemetry.metrics import REJECTIONS


class Gate:
    """Remembers which models could be served at some time: their workers may come back, and requests may wait."""

    def __init__(self, config: DispatcherConfig, registry: Registry, counters: Counters) -> None:
        self._config = config
        self._registry = registry
        self._counters = counters
        self._once_ready: dict[str, Limits] = {}
        self._turnover = TurnoverCounts()

    def note_ready(self, model: str) -> None:
        """Called whenever a worker of the model has come or paired."""
        limits = self._registry.limits(model)
        if limits is None or self._once_ready.get(model) == limits:
            return
        if not what_is_missing(self._registry.views(model)):
            self._once_ready[model] = limits

    def limits(self, model: str) -> Limits | None:
        """As they are now, or as they were when the model could last be served."""
        return self._registry.limits(model) or self._once_ready.get(model)

    def statuses(self) -> tuple[ModelStatus, ...]:
        """Of every model that is served here."""
        statuses = []
        for model in self._registry.models:
            missing = self._registry.missing(model)
            limits = self.limits(model)
            statuses.append(ModelStatus(model, not missing, missing, limits.max_context if limits else None))
        return tuple(statuses)

    def note_ended(self, now_s: float) -> None:
        """A request is over, whichever way: there is room for another."""
        self._turnover.note_ended(now_s)

    def queued_too_long(self, queued_s: float, num_open: int, now_s: float) -> Unavailable:
        """What the client of a request is told that was placed and got no token in its time."""
        text = queued_too_long(queued_s, self._config.recovery)
        return Unavailable(text, retry_after_s=self._turn_away("queued_too_long", num_open, now_s))

    def checked(self, request: GenerateRequest, num_open: int, now_s: float) -> GenerateRequest:
        """The request as it will run. Raises InvalidRequest, ModelNotFound, Unavailable or Overloaded."""
        model = request.model
        if model not in self._registry.models:
            self._counters.add(REJECTIONS, label="model_not_found")
            known = ", ".join(self._registry.models)
            raise ModelNotFound(f"no model {model!r} is served here; there is {known}", code="model_not_found")
        if num_open >= self._config.max_open_requests:
            text = f"{num_open} requests are open, the limit is {self._config.max_open_requests}; try again later"
            raise Overloaded(text, retry_after_s=self._turn_away("too_many_requests", num_open, now_s))
        # Workers that were there come back: what they could serve may wait for them.
        limits = self.limits(model)
        missing = self._registry.missing(model)
        if limits is None or (missing and model not in self._once_ready):
            self._counters.add(REJECTIONS, label="unavailable")
            raise Unavailable(f"model {model} cannot be served now: {missing}", retry_after_s=RETRY_AFTER_S)
        sampling = request.sampling
        if request.is_open_ended:
            most = default_max_tokens(len(request.prompt_ids), limits)
            sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, most))
            request = msgspec.structs.replace(request, sampling=sampling)
        num_answer = 0 if request.is_prompt_only else sampling.max_tokens
        failure = impossible(len(request.prompt_ids), num_answer, limits)
        if failure is not None:
            self._counters.add(REJECTIONS, label="impossible")
            raise InvalidRequest(failure.message, code="context_length_exceeded")
        failure = too_much_claimed(self._registry.views(model), self._config.max_claimed_share)
        if failure is not None:
            raise Overloaded(failure.message, retry_after_s=self._turn_away("overloaded", num_open, now_s))
        if num_open == 0:
            self._turnover.note_busy(now_s)
        return request

    def _turn_away(self, reason: str, num_open: int, now_s: float) -> float:
        """Count it; seconds after which it should be let in."""
        self._counters.add(REJECTIONS, label=reason)
        again_s = retry_after_s(num_open, self._turnover.lately(now_s))
        self._turnover.note_turned_away(now_s)
        return again_s

    def check_invariants(self) -> None:
        self._turnover.check_invariants()


def error_of(failure: Failure, recovery: Recovery) -> DisaggError:
    """What the client is told of a failure that no move cures."""
    if failure.kind is FailureKind.INVALID_REQUEST:
        return InvalidRequest(failure.message)
    return Unavailable(recovery.reason, retry_after_s=RETRY_AFTER_S)
