"""Every metric's name, kind, unit, labels and help. Names are written nowhere else; docs/metrics.md is made from this.

Names follow what servers of language models have in common, with our prefix: the unit is in the name, counters end in
_total. A label's values are listed here and bounded: nothing that a client or a peer says becomes a label value.
"""

import enum
from collections.abc import Collection

import msgspec

from disagg.core.endpoints import TransportKind
from disagg.core.errors import FailureKind
from disagg.core.roles import Task

MAX_LABEL_VALUES = 64  # of a label whose values are not listed
OTHER = "other"  # what further ones count as


class MetricKind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(msgspec.Struct, frozen=True):
    """One family. At most one label of its own, beside those that say which worker it is about."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()  # that the label may take; () where they are names: of messages, models, workers
    buckets: tuple[float, ...] = ()  # upper bounds, without the infinite one

    def label_value(self, value: str, known: Collection[str]) -> str:
        """What to count under: the value itself, or OTHER when it is not listed, or one too many beside `known`."""
        if not self.label:
            return ""
        if self.values:
            return value if value in self.values else OTHER
        return value if value in known or len(known) < MAX_LABEL_VALUES else OTHER


_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

# What labels may say. Those of rooms above this one are spelled out; a test compares each with its enum.
_TASKS = tuple(task.value for task in Task)
_FAILURES = tuple(kind.value for kind in FailureKind)
_TRANSPORTS = tuple(kind.value for kind in TransportKind)
_PATHS = ("mixed", "local", "remote")
_PLACEMENTS = (
    "mixed_worker",
    "short_prompt",
    "long_prompt",
    "no_prefill_worker",
    "shared_prompt",
    "prefill_pool_too_small",
)
_REFUSALS = ("full", "late", "garbage", "not_paired", "no_tls", "no_grant", "false_proof")
_BLOCK_STATES = ("free", "reserved", "held", "cached", "quarantined")
_REJECTIONS = (
    "model_not_found",
    "too_many_requests",
    "unavailable",
    "impossible",
    "overloaded",
    "queued_too_long",
    "rate_limited",
)
_STATUSES = ("400", "401", "403", "404", "405", "408", "413", "429", "499", "500", "502", "503")
_TRANSPORT_REASONS = ("only", "fastest", "tie", "not_measured")
_STEP_KINDS = ("prefill", "decode", "both", "part")
_PARTIAL_STARTS = (
    "finished",
    "joined",
    "dropped",
    "off",
    "no_step",
    "no_room",
    "rate_unknown",
    "wire_short",
    "too_late",
)
_HANDOFF_ENDS = ("sent", "received", "send_cancelled", "receive_cancelled")

# Seconds. A first token takes milliseconds to minutes, a gap a tenth of that, a whole answer minutes.
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ANSWER = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

# --- counted by workers ------------------------------------------------------------------------------------------
PROMPT_TOKENS_COMPUTED = Metric(
    "disagg_prompt_tokens_computed_total", _C, "tokens", "Prompt tokens computed here.", "task", _TASKS
)
PROMPT_TOKENS_CACHED = Metric(
    "disagg_prompt_tokens_cached_total", _C, "tokens", "Prompt tokens read from the prefix index.", "task", _TASKS
)
PREFIX_TOKENS_LOOKED_UP = Metric(
    "disagg_prefix_cache_queries_total", _C, "tokens", "Tokens asked of the prefix index.", "task", _TASKS
)
PREFIX_TOKENS_HIT = Metric(
    "disagg_prefix_cache_hits_total", _C, "tokens", "Of those, tokens that were in the index.", "task", _TASKS
)
PROMPT_TOKENS_RECEIVED = Metric(
    "disagg_prompt_tokens_received_total", _C, "tokens", "Prompt tokens whose KV came from a peer."
)
OUTPUT_TOKENS = Metric("disagg_output_tokens_total", _C, "tokens", "Tokens sampled here.", "task", _TASKS)
STEPS = Metric("disagg_steps_total", _C, "steps", "Forward passes, by what they computed.", "kind", _STEP_KINDS)
STEP_SECONDS = Metric("disagg_step_seconds_total", _C, "seconds", "Time in forward passes.", "kind", _STEP_KINDS)
HANDOFFS = Metric(
    "disagg_handoffs_total", _C, "hand-offs", "Hand-offs that ended, by end and outcome.", "outcome", _HANDOFF_ENDS
)
HANDOFF_BYTES = Metric(
    "disagg_handoff_bytes_total",
    _C,
    "bytes",
    "KV acknowledged by the destination: hidden before the prompt was computed, visible after.",
    "visibility",
    ("hidden", "visible"),
)
PUSHES = Metric("disagg_pushes_total", _C, "pushes", "Writes of KV into a peer's arena.")
PUSH_RETRIES = Metric("disagg_push_retries_total", _C, "pushes", "Pushes sent again after a failure.")
LANDINGS_REJECTED = Metric("disagg_landings_rejected_total", _C, "pushes", "Pushes that arrived with a wrong checksum.")
RESERVATIONS_REFUSED = Metric(
    "disagg_reservations_refused_total", _C, "reservations", "Reservations refused here.", "reason", _FAILURES
)
PARTIAL_STARTS = Metric(
    "disagg_partial_starts_total",
    _C,
    "hand-offs",
    "Hand-offs whose first step began before all KV was here, or why not.",
    "outcome",
    _PARTIAL_STARTS,
)
SEQUENCES = Metric(
    "disagg_sequences_total", _C, "sequences", "Sequences that ended here.", "outcome", ("finished", *_FAILURES)
)
MESSAGES_IGNORED = Metric(
    "disagg_messages_ignored_total", _C, "messages", "Late, repeated or unknown messages, by class.", "message"
)
PREEMPTIONS = Metric(
    "disagg_num_preemptions_total", _C, "sequences", "Streams that gave up their blocks to older ones."
)
BLOCKS_EVICTED = Metric("disagg_blocks_evicted_total", _C, "blocks", "Cached blocks given up for new ones.")
PAIRINGS_REFUSED = Metric(
    "disagg_pairings_refused_total", _C, "pairings", "Peers that cannot exchange KV with this worker."
)
DATA_REFUSED = Metric(
    "disagg_data_refused_total", _C, "refusals", "Data connections and frames turned away.", "reason", _REFUSALS
)
PEERS_REFUSED = Metric(
    "disagg_peers_refused_total", _C, "refusals", "Control connections of peers turned away.", "reason", _REFUSALS
)
TRANSPORTS_CHOSEN = Metric(
    "disagg_transports_chosen_total", _C, "peers", "Peers met, by why their transport.", "reason", _TRANSPORT_REASONS
)
SLOW_LINKS = Metric(
    "disagg_slow_links_total", _C, "links", "Links found far slower than they should be.", "transport", _TRANSPORTS
)

# --- gauges of workers -------------------------------------------------------------------------------------------
BLOCKS = Metric("disagg_blocks", _G, "blocks", "KV blocks by state.", "state", _BLOCK_STATES)
SEQUENCES_WAITING = Metric("disagg_sequences_waiting", _G, "sequences", "Sequences without blocks.")
SEQUENCES_RUNNING = Metric("disagg_sequences_running", _G, "sequences", "Sequences with blocks.")
SEQUENCES_DECODING = Metric("disagg_sequences_decoding", _G, "sequences", "Of those, streams that write an answer.")
PROMPT_TOKENS_WAITING = Metric("disagg_prompt_tokens_waiting", _G, "tokens", "Prompt tokens not computed yet.")
HANDOFFS_OPEN = Metric("disagg_handoffs_open", _G, "hand-offs", "Hand-offs under way, both ends.")
LINK_BANDWIDTH = Metric(
    "disagg_link_bytes_per_second", _G, "bytes/s", "Learned from pushes to a peer; none before the first.", "peer"
)
LINK_MEASURED = Metric(
    "disagg_link_measured_bytes_per_second", _G, "bytes/s", "Measured when two workers met; 0 where it was not.", "peer"
)
LINKS = Metric("disagg_links", _G, "links", "Paired peers, by what carries KV to them.", "transport", _TRANSPORTS)

# --- what a router says of each worker ---------------------------------------------------------------------------
WORKER_UP = Metric("disagg_worker_up", _G, "workers", "1 while the worker is connected; no series afterwards.")
WORKER_DRAINING = Metric("disagg_worker_draining", _G, "workers", "1 while it takes no new work and ends.")

# --- counted by the router ---------------------------------------------------------------------------------------
REQUESTS = Metric(
    "disagg_requests_total", _C, "requests", "Requests that ended.", "outcome", ("finished", "failed", "aborted")
)
REQUESTS_OPEN = Metric("disagg_requests_open", _G, "requests", "Requests under way.")
CHOICES_WAITING = Metric("disagg_choices_waiting", _G, "choices", "Answers to open requests that no worker has.")
MODEL_READY = Metric("disagg_model_ready", _G, "models", "1 while the model can be served.", "model")
MOVES = Metric(
    "disagg_moves_total",
    _C,
    "sequences",
    "Sequences taken from a worker and placed again, by cause.",
    "cause",
    ("drain", *_FAILURES),
)
MOVED_TOKENS = Metric(
    "disagg_moved_tokens_total", _C, "tokens", "Tokens of moved sequences read again.", "how", ("cached", "computed")
)
PLACEMENTS = Metric(
    "disagg_placements_total", _C, "sequences", "Sequences placed, by path and reason.", "reason", _PLACEMENTS
)
REJECTIONS = Metric("disagg_rejections_total", _C, "requests", "Requests turned away.", "reason", _REJECTIONS)
HTTP_ERRORS = Metric(
    "disagg_http_errors_total", _C, "answers", "HTTP requests answered with an error.", "status", _STATUSES
)
TTFT_SECONDS = Metric(
    "disagg_time_to_first_token_seconds",
    _H,
    "seconds",
    "Request received to its first token.",
    "path",
    _PATHS,
    _FIRST_TOKEN,
)
ITL_SECONDS = Metric(
    "disagg_inter_token_latency_seconds", _H, "seconds", "Gap between two tokens of a stream.", "path", _PATHS, _GAP
)
TPOT_SECONDS = Metric(
    "disagg_request_time_per_output_token_seconds",
    _H,
    "seconds",
    "First to last token of an answer over the tokens after the first.",
    "path",
    _PATHS,
    _GAP,
)
E2E_SECONDS = Metric(
    "disagg_e2e_request_latency_seconds",
    _H,
    "seconds",
    "Request received to the last token of all its answers.",
    "path",
    _PATHS,
    _ANSWER,
)
CONTROL_REFUSED = Metric(
    "disagg_control_refused_total",
    _C,
    "refusals",
    "Connections to the control port turned away.",
    "reason",
    _REFUSALS,
)
PROMPT_TOKENS = Metric("disagg_prompt_tokens_total", _C, "tokens", "Prompt tokens of accepted requests.")
GENERATED_TOKENS = Metric("disagg_generation_tokens_total", _C, "tokens", "Tokens delivered to clients.")

WORKER_METRICS: tuple[Metric, ...] = (
    PROMPT_TOKENS_COMPUTED,
    PROMPT_TOKENS_CACHED,
    PREFIX_TOKENS_LOOKED_UP,
    PREFIX_TOKENS_HIT,
    PROMPT_TOKENS_RECEIVED,
    OUTPUT_TOKENS,
    STEPS,
    STEP_SECONDS,
    HANDOFFS,
    HANDOFF_BYTES,
    PUSHES,
    PUSH_RETRIES,
    LANDINGS_REJECTED,
    RESERVATIONS_REFUSED,
    PARTIAL_STARTS,
    SEQUENCES,
    MESSAGES_IGNORED,
    PREEMPTIONS,
    BLOCKS_EVICTED,
    PAIRINGS_REFUSED,
    DATA_REFUSED,
    PEERS_REFUSED,
    TRANSPORTS_CHOSEN,
    SLOW_LINKS,
    BLOCKS,
    SEQUENCES_WAITING,
    SEQUENCES_RUNNING,
    SEQUENCES_DECODING,
    PROMPT_TOKENS_WAITING,
    HANDOFFS_OPEN,
    LINK_BANDWIDTH,
    LINK_MEASURED,
    LINKS,
)
FLEET_METRICS: tuple[Metric, ...] = (WORKER_UP, WORKER_DRAINING)
ROUTER_METRICS: tuple[Metric, ...] = (
    REQUESTS,
    REQUESTS_OPEN,
    CHOICES_WAITING,
    MODEL_READY,
    MOVES,
    MOVED_TOKENS,
    PLACEMENTS,
    REJECTIONS,
    HTTP_ERRORS,
    TTFT_SECONDS,
    ITL_SECONDS,
    TPOT_SECONDS,
    E2E_SECONDS,
    CONTROL_REFUSED,
    PROMPT_TOKENS,
    GENERATED_TOKENS,
)
ALL_METRICS = (*ROUTER_METRICS, *FLEET_METRICS, *WORKER_METRICS)
WORKER_LABELS = ("worker", "role", "model")  # of every series that is about a worker
