"""What flags of `disagg bench` cannot be, and which say nothing beside others: who gives one thinks that it holds."""

from typing import Final, NamedTuple

import msgspec

from disagg.cli.bench_options import LoadOptions
from disagg.core.errors import ConfigurationError

_LENGTHS: Final = ("prompt_tokens", "output_tokens", "spread", "prefixes", "prefix_tokens")
_CLOCK: Final = ("rate", "arrivals", "cv")
_FROM_0: Final[tuple[str, ...]] = (
    "rate",
    "requests",
    "warm_up",
    "spread",
    "prefixes",
    "prefix_tokens",
    "clients",
    "think_s",
    "max_s",
)
_FROM_1: Final[tuple[str, ...]] = ("prompt_tokens", "output_tokens", "max_prompt_tokens", "max_open", "search_runs")


class _Rule(NamedTuple):
    """Flags that say nothing, where that is so."""

    where: str
    holds: bool
    names: tuple[str, ...]


def check_flags(asked: LoadOptions) -> None:
    """Raises ConfigurationError naming the flags, and what they do not go with."""
    if not asked.timeout_s > 0:
        raise ConfigurationError(f"--timeout-s is {asked.timeout_s:g}: it must be above 0")
    for least, names in ((0, _FROM_0), (1, _FROM_1)):
        for name in names:
            value = getattr(asked, name)
            if not value >= least:
                raise ConfigurationError(f"{_flag(name)} is {value:g}: it must be at least {least}")
    given = {each.name for each in msgspec.structs.fields(asked) if getattr(asked, each.name) != each.default}
    for where, holds, names in _rules(asked):
        idle = [_flag(name) for name in names if name in given]
        if holds and idle:
            cure = "give both or neither" if where.startswith("without") else "leave out one or the other"
            raise ConfigurationError(f"{' and '.join(idle)} {'say' if idle[1:] else 'says'} nothing {where}: {cure}")


def is_url(target: str) -> bool:
    """Whether a server is named, not what is to be served here."""
    return target.startswith(("http://", "https://"))


def _rules(asked: LoadOptions) -> tuple[_Rule, ...]:
    is_here = not is_url(asked.target)
    has_mix = (bool(asked.scenario) or is_here) and not asked.trace
    return (
        _Rule("beside --trace", bool(asked.trace), (*_LENGTHS, *_CLOCK, "scenario", "clients", "think_s")),
        _Rule("without --trace", not asked.trace, ("trace_format", "rate_scale", "length_scale")),
        _Rule("beside a scenario", has_mix, (*_LENGTHS, "max_prompt_tokens", "arrivals", "cv")),
        _Rule("beside a scenario that is served here", is_here, ("scenario",)),
        _Rule("beside --clients", asked.clients > 0, _CLOCK),
        _Rule("without --clients", asked.clients < 1 and not has_mix, ("think_s",)),
        _Rule("without --arrivals gamma", asked.arrivals != "gamma", ("cv",)),
        _Rule("without --prefixes", asked.prefixes < 1, ("prefix_tokens",)),
        _Rule("without --prefix-tokens", asked.prefix_tokens < 1, ("prefixes",)),
        _Rule("without --api ids", asked.api != "ids", ("tokenizer",)),
        _Rule("without --search", not asked.search, ("search_runs",)),
        _Rule("beside a URL", not is_here, ("prefill", "decode", "mixed")),
        _Rule("beside --mixed", asked.mixed > 0, ("prefill", "decode")),
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
