"""Kinds of traffic that people have, as TOML: lengths, sharing, turns, a rate to begin with, targets.

Those in the package are scaled to a model of 135 million parameters on a core or two: an eighth of what is asked of
large models on accelerators, in rate and in length.
"""

import enum
import math
import tomllib
from pathlib import Path

import msgspec

from disagg.bench.arrivals import Arrivals, EvenArrivals, GammaArrivals, PoissonArrivals
from disagg.bench.slo import Slo
from disagg.bench.workload import ClosedWork, Lengths, PrefixPool, RandomWork, SessionWork, Workload
from disagg.core.errors import ConfigurationError

_FOLDER = Path(__file__).with_name("mixes")


class Clock(enum.StrEnum):
    """How requests are spread over time."""

    POISSON = "poisson"
    GAMMA = "gamma"
    EVEN = "even"


class Mix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """rate_per_s counts requests, each turn of a conversation for itself."""

    about: str = ""
    rate_per_s: float
    num_requests: int
    slo: Slo = Slo()
    prompt: Lengths  # what no other request has; of a conversation: each message
    output: Lengths
    prefixes: PrefixPool = PrefixPool()
    arrivals: Clock = Clock.POISSON
    cv: float = 1.0  # of GAMMA
    turns: Lengths | None = None  # None: no conversations
    think_s: float = 1.0  # between an answer and the next message
    max_prompt_tokens: int = 1 << 20
    num_clients: int = 0  # above 0: a closed loop of so many, and no clock

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s < math.inf or self.num_requests < 1 or self.num_clients < 0 or self.think_s < 0:
            text = f"{self.num_requests} requests at {self.rate_per_s:g}/s, {self.num_clients} clients that think for "
            raise ConfigurationError(
                f"{text}{self.think_s:g} s: rate and requests must be above 0, clients and think_s 0 or more"
            )

    def workload(self, scale: float = 1.0, num_requests: int = 0) -> Workload:
        """scale: of the rate. num_requests: 0 for the mix's own; of conversations, about so many."""
        num = num_requests or self.num_requests
        rate_per_s = self.rate_per_s * scale
        if self.turns is not None:
            return SessionWork(
                num_sessions=max(1, round(num / self.turns.mean)),
                arrivals=self._arrivals(rate_per_s / self.turns.mean),
                num_turns=self.turns,
                system=self.prefixes,
                message=self.prompt,
                output=self.output,
                think_s=self.think_s,
                max_prompt_tokens=self.max_prompt_tokens,
                num_clients=self.num_clients,
            )
        work = RandomWork(
            num_requests=num,
            arrivals=self._arrivals(rate_per_s),
            prompt=self.prompt,
            output=self.output,
            prefixes=self.prefixes,
        )
        return ClosedWork(work, self.num_clients, self.think_s) if self.num_clients else work

    def _arrivals(self, rate_per_s: float) -> Arrivals:
        if self.arrivals is Clock.EVEN:
            return EvenArrivals(rate_per_s)
        return PoissonArrivals(rate_per_s) if self.arrivals is Clock.POISSON else GammaArrivals(rate_per_s, self.cv)


def mix_names() -> tuple[str, ...]:
    """Those in the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_mix(name_or_path: str) -> Mix:
    """One of the package, or a TOML file. Raises ConfigurationError naming what is wrong."""
    path = Path(name_or_path) if name_or_path.endswith(".toml") else _FOLDER / f"{name_or_path}.toml"
    if not path.is_file():
        known = ", ".join(mix_names())
        raise ConfigurationError(f"no scenario {name_or_path!r}: name one of {known}, a .toml file, or a server's URL")
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Mix)
    except (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError, ConfigurationError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
