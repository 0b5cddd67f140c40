"""Who may ask, how much in a minute, and how urgently.

Without keys everybody may, as one nameless client. With keys each request names one, as `Authorization: Bearer KEY`;
the key's name is the tenant whose prompts take turns with others', and nobody else reads the KV of its prompts.
"""

import hashlib
import hmac
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from disagg.core.errors import ConfigurationError, InvalidRequest, NotAllowed, NotAuthenticated, RateLimited
from disagg.policy.rate_limit import RateLimits, RateMeter

MAX_PRIORITY: Final = 100
MIN_KEY_LENGTH: Final = 8
PRIORITY_HEADER: Final = "x-priority"
SLO_CLASS_HEADER: Final = "x-slo-class"
_SCHEME: Final = "bearer "
_MAX_HEADER: Final = 256


class AccessKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One client and what it may do. The fields of one [[keys]] table of a keys file.

    Raises ValueError for what cannot be.
    """

    key: str
    name: str  # unique; in logs, and never the key itself
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers
    priority: int = 0  # of requests that name none; higher goes first
    max_priority: int | None = None  # the most that a request may name; None: `priority`
    slo_class: str = "default"  # of requests that name none
    slo_classes: tuple[str, ...] = ()  # others that a request may name

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > _MAX_HEADER:
            raise ValueError(f"name has {len(self.name)} characters; give 1 to {_MAX_HEADER}")
        if len(self.key) < MIN_KEY_LENGTH or not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise ValueError(
                f"the key of {self.name} must be at least {MIN_KEY_LENGTH} printable ASCII characters without blanks"
            )
        for priority in (self.priority, self.highest):
            if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
                raise ValueError(f"a priority of {priority}: it must be {-MAX_PRIORITY} to {MAX_PRIORITY}")
        RateMeter(self.limits)

    @property
    def limits(self) -> RateLimits:
        return RateLimits(self.requests_per_minute, self.tokens_per_minute)

    @property
    def highest(self) -> int:
        return self.priority if self.max_priority is None else self.max_priority


class _KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: tuple[AccessKey, ...]


class Caller(msgspec.Struct, frozen=True):
    """Who asks, and how urgently. Nothing else of a request says where it runs or when."""

    name: str
    priority: int
    slo_class: str
    meter: RateMeter

    def admit(self, num_tokens: int, now_s: float) -> None:
        """Count a request with this many prompt tokens. Raises RateLimited."""
        if not self.meter.try_admit(num_tokens, now_s):
            limits, wait_s = self.meter.limits, self.meter.wait_s(num_tokens, now_s)
            may = [(limits.requests_per_minute, "requests"), (limits.tokens_per_minute, "tokens")]
            text = " and ".join(f"{count} {what}" for count, what in may if count is not None)
            raise RateLimited(
                f"the key {self.name} may use {text} a minute, and has; try again in {wait_s:.0f} s",
                retry_after_s=wait_s,
            )


class Access:
    """The keys of one router and their meters."""

    def __init__(self, keys: Sequence[AccessKey] = ()) -> None:
        """Raises ConfigurationError when two keys have one name or one secret."""
        for what, values in (("name", [key.name for key in keys]), ("secret", [key.key for key in keys])):
            if len(set(values)) < len(values):
                raise ConfigurationError(f"two API keys have the same {what}; each needs its own")
        self._keys = tuple((_digest(key.key), key, RateMeter(key.limits)) for key in keys)
        self._anybody = AccessKey(key="-" * MIN_KEY_LENGTH, name="anybody"), RateMeter(RateLimits())

    @property
    def is_open(self) -> bool:
        """Nobody needs a key."""
        return not self._keys

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Raises NotAuthenticated, InvalidRequest for a header that makes no sense, NotAllowed for one too far."""
        key, meter = self._anybody if self.is_open else self._find(headers.get("authorization", ""))
        name = "" if self.is_open else key.name
        return Caller(name, _priority(headers, key), _slo_class(headers, key), meter)

    def _find(self, authorization: str) -> tuple[AccessKey, RateMeter]:
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise NotAuthenticated(
                "this server needs an API key: send it as 'Authorization: Bearer KEY'", code="missing_api_key"
            )
        given = _digest(authorization[len(_SCHEME) :].strip())
        found: tuple[AccessKey, RateMeter] | None = None
        for digest, key, meter in self._keys:  # all of them: how long it takes says nothing
            if hmac.compare_digest(given, digest):
                found = key, meter
        if found is None:
            raise NotAuthenticated("the API key is not one of this server's; check it, or ask for one")
        return found

    def check_invariants(self) -> None:
        for _, _, meter in self._keys:
            meter.check_invariants()


def load_access(api_keys: Sequence[str], keys_file: str) -> Access:
    """Keys given one by one, named key-1, key-2, ..., and those of a TOML file. Raises ConfigurationError."""
    try:
        keys = [AccessKey(key=key, name=f"key-{number}") for number, key in enumerate(api_keys, 1)]
    except ValueError as error:
        raise ConfigurationError(f"--api-key: {error}") from None
    if keys_file:
        try:
            content = tomllib.loads(Path(keys_file).read_text())
            keys += msgspec.convert(content, _KeysFile).keys
        except OSError as error:
            raise ConfigurationError(f"--api-keys-file {keys_file}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--api-keys-file {keys_file}: {error}; write [[keys]] tables") from None
    return Access(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _priority(headers: Mapping[str, str], key: AccessKey) -> int:
    text = headers.get(PRIORITY_HEADER)
    if text is None:
        return key.priority
    digits = text.strip().removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 3 and int(digits) <= MAX_PRIORITY):
        raise InvalidRequest(
            f"'X-Priority' must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}", param="X-Priority"
        )
    priority = int(text)
    if priority > key.highest:
        raise NotAllowed(
            f"'X-Priority' is {priority}; at most {key.highest} is allowed here",
            param="X-Priority",
            code="priority_not_allowed",
        )
    return priority


def _slo_class(headers: Mapping[str, str], key: AccessKey) -> str:
    wanted = headers.get(SLO_CLASS_HEADER)
    if wanted is None or wanted == key.slo_class or wanted in key.slo_classes:
        return wanted or key.slo_class
    allowed = ", ".join(dict.fromkeys((key.slo_class, *key.slo_classes)))
    raise NotAllowed(
        f"'X-SLO-Class' is {wanted[:_MAX_HEADER]!r}; allowed here: {allowed}",
        param="X-SLO-Class",
        code="slo_class_not_allowed",
    )
