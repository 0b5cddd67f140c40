"""Every error of the project.

    DisaggError
      ConfigurationError      what the operator typed or pointed at; one plain line in the terminal
        ModelLoadError        missing file, not a model, unknown architecture
          NotNative           a whole model, but not of a kind that the engine computes itself
      RequestError            what the client sent
        InvalidRequest        400
        ModelNotFound         404
        NotAuthenticated      401: no key, or none of ours
        NotAllowed            403: the key does not allow this
      Unavailable             503 (or 429 for Overloaded): come back after retry_after_s
        Overloaded
          RateLimited         429: this client has asked for more than it may in a minute
      PeerFault               the other process is at fault or gone
        PeerLost
        ProtocolViolation
      InternalFault           ours: a broken invariant or a failed step

A message names the value, the limit and what to do.
"""

import enum

import msgspec


class DisaggError(Exception):
    """Root of everything this project raises on purpose."""


class ConfigurationError(DisaggError):
    """The operator asked for something that cannot work."""


class ModelLoadError(ConfigurationError):
    """The path is not a model that this engine can run."""


class NotNative(ModelLoadError):
    """A whole model of a kind that the engine does not compute itself; a library may."""


class RequestError(DisaggError):
    """The client's request is at fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidRequest(RequestError):
    """HTTP 400."""


class ModelNotFound(RequestError):
    """HTTP 404."""


class NotAuthenticated(RequestError):
    """HTTP 401."""


class NotAllowed(RequestError):
    """HTTP 403."""


class Unavailable(DisaggError):
    """Nothing can serve this now. HTTP 503 with Retry-After."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """Too much is asked at once. HTTP 429 with Retry-After."""


class RateLimited(Overloaded):
    """One client's share is used up, others' are not. HTTP 429 with Retry-After."""


class PeerFault(DisaggError):
    """Another process is at fault or gone."""


class PeerLost(PeerFault):
    """The connection ended or its heartbeat stopped."""


class ProtocolViolation(PeerFault):
    """A peer sent what the protocol does not allow."""


class InternalFault(DisaggError):
    """A broken invariant or a failed step."""


class FailureKind(enum.StrEnum):
    """An error as it crosses a connection."""

    INVALID_REQUEST = "invalid_request"  # can never be served: too long, wrong vocabulary
    WRONG_ROLE = "wrong_role"
    WORKER_LOST = "worker_lost"
    TRANSFER_FAILED = "transfer_failed"
    LEASE_EXPIRED = "lease_expired"
    OVERLOADED = "overloaded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a sequence, hand-off or pairing failed, as data."""

    kind: FailureKind
    message: str
