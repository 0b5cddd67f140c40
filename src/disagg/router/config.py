"""How the router process is set up, and the one line it prints when it listens."""

import msgspec

from disagg.channel.channel import DEFAULT_BEAT_INTERVAL_S
from disagg.channel.keys import check_exposure
from disagg.core.errors import ConfigurationError
from disagg.policy.recovery import RecoveryLimits
from disagg.router.parser_names import ReasoningParser, ToolParser

API_KEYS_VARIABLE = "DISAGG_API_KEY"  # of the environment: keys with blanks between them


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One router. Raises ConfigurationError when a value cannot work."""

    models: tuple[tuple[str, str], ...]  # (what clients call it, path of its tokenizer and template)
    host: str = "127.0.0.1"
    port: int = 8000  # HTTP; 0: any free one
    control_host: str = "127.0.0.1"
    control_port: int = 8001  # where workers register; 0: any free one
    local_prefill_tokens: int = 512  # prompts with at most this many uncached tokens stay on the decode worker; 0: none
    max_open_requests: int = 1024
    max_queue_s: float = RecoveryLimits().max_queue_s  # without a first token, behind others; then 503
    beat_interval_s: float = DEFAULT_BEAT_INTERVAL_S  # a worker silent for two of these is lost
    max_body_bytes: int = 8 << 20
    max_json_depth: int = 64
    header_timeout_s: float = 10.0  # for the headers of a request
    body_timeout_s: float = 30.0  # for its body, after them
    write_timeout_s: float = 60.0  # for a client to read what waits for it
    api_keys: tuple[str, ...] = ()  # with these or a file, every request to a model needs one
    api_keys_file: str = ""  # TOML with a [[keys]] table for each; see `router.access`
    tls_cert: str = ""  # PEM files; both or none
    tls_key: str = ""
    cors_origins: tuple[str, ...] = ()  # whose pages may ask from a browser; "*": all
    keys: str = ""  # directory made by `disagg keys`: workers are met under mutual TLS; "": loopback only
    decision_log: str = ""  # file to write every event and decision to; "": none
    keep_timelines: int = 256  # of the last requests, to be asked for at /timeline; 0: none
    otel: bool = False  # export a trace of each request over OTLP, set up by the OTEL_ variables of the environment
    tool_parser: ToolParser = ToolParser.AUTO  # how the models write function calls; auto: by their chat templates
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO  # whether <think>…</think> is taken out of answers

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigurationError("no model: name at least one as NAME=PATH")
        names = [name for name, _ in self.models]
        if len(set(names)) != len(names) or not all(names):
            raise ConfigurationError(f"model names {names}: each must be given once and not be empty")
        for field, port in (("port", self.port), ("control_port", self.control_port)):
            if not 0 <= port <= 65535:
                raise ConfigurationError(f"{field} is {port}: it must be 0 (any free one) to 65535")
        check_exposure("--control-host", self.control_host, self.keys)
        if self.port == self.control_port and self.port and self.host == self.control_host:
            raise ConfigurationError(f"port and control_port are both {self.port}: choose two different ones")
        limits = (
            ("local_prefill_tokens", self.local_prefill_tokens, 0),
            ("max_open_requests", self.max_open_requests, 1),
            ("max_body_bytes", self.max_body_bytes, 1024),
            ("max_json_depth", self.max_json_depth, 4),
            ("keep_timelines", self.keep_timelines, 0),
        )
        for field, value, least in limits:
            if value < least:
                raise ConfigurationError(f"{field} is {value}: it must be at least {least}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigurationError("tls_cert and tls_key belong together: give both, or none for plain HTTP")
        for field in ("beat_interval_s", "max_queue_s", "header_timeout_s", "body_timeout_s", "write_timeout_s"):
            seconds = getattr(self, field)
            if not seconds > 0:
                raise ConfigurationError(f"{field} is {seconds:g}: it must be above 0 seconds")


class Announcement(msgspec.Struct, frozen=True):
    """Printed on stdout as one JSON line once both ports listen; how a launcher learns ports that were 0."""

    http: str  # "host:port"
    control: str  # "host:port"
    scheme: str = "http"  # or "https"


def encode_announcement(announcement: Announcement) -> str:
    """One JSON line without its newline."""
    return msgspec.json.encode(announcement).decode()


def decode_announcement(line: str) -> Announcement | None:
    """The announcement in a line of a router's stdout; None for any other line."""
    try:
        return msgspec.json.decode(line, type=Announcement)
    except msgspec.DecodeError:
        return None
