"""Every metric's name, kind, label and help. Names are written nowhere else."""

import enum

import msgspec


class MetricKind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(msgspec.Struct, frozen=True):
    """One family. At most one label of its own, beside the worker's labels that the router adds."""

    name: str
    kind: MetricKind
    help: str
    label: str = ""
    buckets: tuple[float, ...] = ()


_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# --- counted by workers ------------------------------------------------------------------------------------------
PROMPT_TOKENS_COMPUTED = Metric("disagg_prompt_tokens_computed_total", _C, "Prompt tokens computed here.", "task")
PROMPT_TOKENS_CACHED = Metric("disagg_prompt_tokens_cached_total", _C, "Prompt tokens found in the index.", "task")
PREFIX_TOKENS_LOOKED_UP = Metric("disagg_prefix_tokens_looked_up_total", _C, "Tokens asked of the index.", "task")
PREFIX_TOKENS_HIT = Metric("disagg_prefix_tokens_hit_total", _C, "Of those, tokens that were in the index.", "task")
PROMPT_TOKENS_RECEIVED = Metric("disagg_prompt_tokens_received_total", _C, "Prompt tokens whose KV came from a peer.")
OUTPUT_TOKENS = Metric("disagg_output_tokens_total", _C, "Tokens sampled here.", "task")
STEPS = Metric("disagg_steps_total", _C, "Forward passes.", "kind")
STEP_SECONDS = Metric("disagg_step_seconds_total", _C, "Time in forward passes.", "kind")
HANDOFFS = Metric("disagg_handoffs_total", _C, "Hand-offs that ended, by end and outcome.", "outcome")
HANDOFF_BYTES = Metric("disagg_handoff_bytes_total", _C, "KV bytes acknowledged by the destination.", "visibility")
PUSHES = Metric("disagg_pushes_total", _C, "Writes of KV into a peer's arena.")
PUSH_RETRIES = Metric("disagg_push_retries_total", _C, "Pushes sent again after a failure.")
LANDINGS_REJECTED = Metric("disagg_landings_rejected_total", _C, "Pushes that arrived with a wrong checksum.")
RESERVATIONS_REFUSED = Metric("disagg_reservations_refused_total", _C, "Reservations refused here.", "reason")
SEQUENCES = Metric("disagg_sequences_total", _C, "Sequences that ended here.", "outcome")
MESSAGES_IGNORED = Metric("disagg_messages_ignored_total", _C, "Late, repeated or unknown messages.", "message")
PREEMPTIONS = Metric("disagg_preemptions_total", _C, "Streams that gave up their blocks to older ones.")
BLOCKS_EVICTED = Metric("disagg_blocks_evicted_total", _C, "Cached blocks given up for new ones.")
PAIRINGS_REFUSED = Metric("disagg_pairings_refused_total", _C, "Peers that cannot exchange KV with this worker.")
DATA_REFUSED = Metric("disagg_data_refused_total", _C, "Data connections and frames turned away.", "reason")
PEERS_REFUSED = Metric("disagg_peers_refused_total", _C, "Control connections of peers turned away.", "reason")
TRANSPORTS_CHOSEN = Metric("disagg_transports_chosen_total", _C, "Peers met, by why their transport.", "reason")
SLOW_LINKS = Metric("disagg_slow_links_total", _C, "Links found far slower than they should be.", "transport")

# --- gauges of workers -------------------------------------------------------------------------------------------
BLOCKS = Metric("disagg_blocks", _G, "KV blocks by state.", "state")
SEQUENCES_WAITING = Metric("disagg_sequences_waiting", _G, "Sequences without blocks.")
SEQUENCES_RUNNING = Metric("disagg_sequences_running", _G, "Sequences with blocks.")
HANDOFFS_OPEN = Metric("disagg_handoffs_open", _G, "Hand-offs under way, both ends.")
LINKS = Metric("disagg_links", _G, "Paired peers, by what carries KV to them.", "transport")
LINK_RATE = Metric("disagg_link_bytes_per_second", _G, "Measured when two workers met.", "peer")
WORKER_UP = Metric("disagg_worker_up", _G, "1 while the worker is connected.")

# --- counted by the router ---------------------------------------------------------------------------------------
REQUESTS = Metric("disagg_requests_total", _C, "Requests that ended.", "outcome")
REQUESTS_OPEN = Metric("disagg_requests_open", _G, "Requests under way.")
MOVES = Metric("disagg_moves_total", _C, "Sequences taken from a worker and placed again, by cause.", "cause")
MOVED_TOKENS = Metric("disagg_moved_tokens_total", _C, "Tokens of moved sequences read again: cached, computed.", "how")
PLACEMENTS = Metric("disagg_placements_total", _C, "Sequences placed, by path and reason.", "reason")
REJECTIONS = Metric("disagg_rejections_total", _C, "Requests turned away.", "reason")
TTFT_SECONDS = Metric("disagg_ttft_seconds", _H, "Request received to first token sent.", "path", _SECONDS)
ITL_SECONDS = Metric("disagg_itl_seconds", _H, "Gap between two tokens of a stream.", "path", _SECONDS)
CONTROL_REFUSED = Metric("disagg_control_refused_total", _C, "Connections to the control port turned away.", "reason")
PROMPT_TOKENS = Metric("disagg_prompt_tokens_total", _C, "Prompt tokens of accepted requests.")
GENERATED_TOKENS = Metric("disagg_generated_tokens_total", _C, "Tokens delivered to clients.")

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
    HANDOFFS_OPEN,
    LINKS,
    LINK_RATE,
    WORKER_UP,
)
ROUTER_METRICS: tuple[Metric, ...] = (
    REQUESTS,
    REQUESTS_OPEN,
    MOVES,
    MOVED_TOKENS,
    PLACEMENTS,
    REJECTIONS,
    TTFT_SECONDS,
    ITL_SECONDS,
    CONTROL_REFUSED,
    PROMPT_TOKENS,
    GENERATED_TOKENS,
)
