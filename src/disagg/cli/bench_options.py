"""What `disagg bench` was asked, between its command line and its work."""

from pathlib import Path

import msgspec


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of every load. Empty and 0: not given."""

    target: str  # URL, name of a mix, or a .toml file
    scenario: str = ""  # of a URL
    model: str = ""
    api: str = "chat"
    api_key: str = ""
    tokenizer: str = ""
    trace: str = ""
    trace_format: str = "mooncake"
    rate_scale: float = 1.0
    length_scale: float = 1.0
    rate: float = 0.0
    arrivals: str = "poisson"
    cv: float = 1.0
    clients: int = 0
    think_s: float = 0.0
    requests: int = 0
    prompt_tokens: int = 256
    output_tokens: int = 64
    spread: float = 0.0
    max_prompt_tokens: int = 1 << 20
    prefixes: int = 0
    prefix_tokens: int = 0
    warm_up: int = 0
    seed: int = 7
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    timeout_s: float = 300.0
    max_s: float = 0.0
    max_open: int = 2000
    search: bool = False
    search_runs: int = 8
    prefill: int = 1
    decode: int = 1
    mixed: int = 0


class ReportOptions(msgspec.Struct, frozen=True):
    """Where results go; None: nowhere but to the terminal."""

    html: Path | None = None
    records: Path | None = None
    as_json: bool = False


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """mixes: names or files. rates: factors of each mix's own rate, the first one for the verdict."""

    model: str
    prefill: int
    decode: int
    mixes: tuple[str, ...]
    rates: tuple[float, ...]
    requests: int
    rounds: int
    seed: int
    timeout_s: float
    serve_flags: tuple[str, ...]


class PhasesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """target: a URL, or a model to be served by one prefill and one decode worker."""

    target: str
    model: str
    concurrent: int
    prompt_tokens: int
    output_tokens: int
    rounds: int
    seed: int
    weights: str
    measure_limits: bool
    timeout_s: float
