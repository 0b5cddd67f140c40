"""What goes in and comes out of the dispatcher for one client request. Token ids only; text is the router's."""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from disagg.core.errors import DisaggError
from disagg.core.ids import RequestId
from disagg.core.request import EmittedToken, FinishReason, SamplingParams
from disagg.telemetry.metrics import Metric
from disagg.telemetry.track import RequestTrack


class GenerateRequest(msgspec.Struct, frozen=True):
    """One prompt, `num_choices` answers. Checked against the model's limits by the dispatcher."""

    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int = 1
    is_open_ended: bool = False  # max_tokens was not asked for: it may be lowered to what fits
    is_prompt_only: bool = False  # nothing is to be written: the one token that reading gives is not shown to anybody
    priority: int = 0
    slo_class: str = "default"  # decides nothing; timelines and traces name it
    tenant: str = ""  # whose turn it is among others of its priority
    cache_salt: str = ""  # KV is shared only between requests with the same one


class TokensDelivered(msgspec.Struct, frozen=True):
    """Next tokens of one choice, in order, each position once. finish_reason is set with the choice's last."""

    choice: int
    tokens: tuple[EmittedToken, ...]
    finish_reason: FinishReason | None = None


class RequestFailed(msgspec.Struct, frozen=True):
    """The request is over; no further event follows."""

    error: DisaggError


StreamEvent = TokensDelivered | RequestFailed


class ModelStatus(msgspec.Struct, frozen=True):
    """One model as /v1/models and /health show it."""

    model: str
    is_ready: bool
    missing: str  # plain sentence: what is not there; "" when ready
    max_context: int | None  # tokens; None until a worker has registered


class TokenStream(Protocol):
    """One open request. Iterate its events; leaving early must call abort()."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens answered from a prefix cache, known once the last choice has finished."""

    def events(self) -> AsyncIterator[StreamEvent]:
        """Ends after every choice has finished, or after RequestFailed."""

    def take_ready(self) -> list[StreamEvent]:
        """Events that are here already, for the reader that has just got one; a failure is not among them."""

    def push_to(self, take: Callable[[TokensDelivered], bool]) -> None:
        """Offer `take` tokens the moment they come, if the reader waits and they are not a choice's last.

        Those for which it says True are no event any more. It must not raise, or call this stream back.
        """

    def finish_choice(self, choice: int) -> None:
        """Stop one choice whose text matched a stop string; its workers drop it within one step."""

    def abort(self) -> None:
        """Drop everything: the client has gone. Idempotent."""


class GenerationService(Protocol):
    """What the HTTP front needs of the rest. `disagg.testing` ships a fake one."""

    def submit(
        self, request: GenerateRequest, track: RequestTrack | None = None, received_s: float | None = None
    ) -> TokenStream:
        """Raises InvalidRequest, ModelNotFound, Unavailable, Overloaded at once; later failures are events.

        What becomes of the request and when goes into its track, if it has one.
        received_s: when its first byte was here, by time.monotonic(); None: now.
        """

    def models(self) -> tuple[ModelStatus, ...]: ...

    def count(self, metric: Metric, label: str) -> None:
        """One more of what only the HTTP front sees."""

    def metrics_text(self) -> bytes:
        """Prometheus exposition of router and workers."""

    def cluster_json(self) -> bytes:
        """State of every worker, for `serve`'s live lines and for people."""
