"""What `disagg top` shows, as lines of text. Looks in, lines out: reads no clock and no terminal.

Totals become rates, and histograms percentiles, between an earlier look and the last one; before there is an earlier
one, rates are unknown and percentiles are of everything so far.
"""

from collections.abc import Sequence
from typing import NamedTuple

from disagg.cluster.view import ClusterView, WorkerView
from disagg.core.roles import Role
from disagg.telemetry import metrics as table
from disagg.telemetry.metrics import Metric
from disagg.telemetry.reading import Reading

# What is read of a scrape; the rest is left unread.
SHOWN: tuple[Metric, ...] = (
    table.REQUESTS,
    table.REJECTIONS,
    table.PLACEMENTS,
    table.MOVES,
    table.CHOICES_WAITING,
    table.PROMPT_TOKENS,
    table.GENERATED_TOKENS,
    table.TTFT_SECONDS,
    table.ITL_SECONDS,
    table.TPOT_SECONDS,
    table.E2E_SECONDS,
    table.HANDOFFS,
    table.HANDOFF_BYTES,
    table.STEP_SECONDS,
    table.OUTPUT_TOKENS,
    table.PROMPT_TOKENS_COMPUTED,
    table.LINK_BANDWIDTH,
)
FALLBACKS = ("no_prefill_worker", "prefill_pool_too_small")
UNKNOWN = "-"
_BAR = 10
_ROLES = {role.value: place for place, role in enumerate(Role)}
_COLUMNS = (
    "worker",
    "role",
    "state",
    "waiting",
    "running",
    "streams",
    "to read",
    "KV blocks in use",
    "busy",
    "read/s",
    "written/s",
    "hand-offs",
    "cached",
    "quarantined",
    "sends to",
)  # a narrow terminal cuts off the last ones
_LEFT = ("worker", "role", "state", "KV blocks in use", "sends to")


class Look(NamedTuple):
    """What a router said at one moment. at_s: on any steady clock."""

    at_s: float
    cluster: ClusterView
    reading: Reading


class Line(NamedTuple):
    """One line of the picture."""

    text: str
    is_title: bool = False


class _Span:
    """Between two looks, or from the router's start on."""

    def __init__(self, before: Look | None, now: Look) -> None:
        self.seconds = now.at_s - before.at_s if before is not None else 0.0
        self.risen = now.reading.since(before.reading) if before is not None else now.reading

    def rate(self, metric: Metric, **labels: str) -> float | None:
        return self.risen.total(metric, **labels) / self.seconds if self.seconds > 0 else None

    def percentiles(self, metric: Metric) -> str:
        """p50 and p95, or what says that there was nothing."""
        low, high = (self.risen.quantile(metric, share) for share in (0.5, 0.95))
        return UNKNOWN if low is None or high is None else f"p50 {seconds(low)}  p95 {seconds(high)}"


def picture(before: Look | None, now: Look, url: str) -> list[Line]:
    """The whole screen; workers last, one line each."""
    span = _Span(before, now)
    cells = [_COLUMNS, *(_row(worker, span, now) for worker in _ordered(now.cluster.workers))]
    rows = _aligned(cells)
    return [
        Line(_headline(now, url), is_title=True),
        *(Line(text) for text in _summary(span, now)),
        Line(""),
        Line(rows[0], is_title=True),
        *(Line(text) for text in rows[1:] or ["no worker is connected"]),
    ]


def absent(url: str, since_s: float | None) -> list[Line]:
    """Instead of the picture, or above the last one. since_s: seconds since the last answer; None: never."""
    last = "" if since_s is None else f", the last answer is {since_s:.0f} s old"
    return [Line(f"no router answers at {url}{last}; still asking (Ctrl-C ends this)", is_title=True)]


def fitted(lines: Sequence[Line], height: int) -> list[Line]:
    """At most `height` lines; the last one says how many are not shown."""
    if len(lines) <= height or height < 1:
        return list(lines)
    return [*lines[: height - 1], Line(f"... {len(lines) - height + 1} more lines: a taller terminal shows them")]


def _headline(now: Look, url: str) -> str:
    models = ", ".join(f"{m.model} ready" if m.is_ready else f"{m.model}: {m.missing}" for m in now.cluster.models)
    return f"disagg at {url}   up {duration(now.cluster.router.uptime_s)}   {models or 'no model'}"


def _summary(span: _Span, now: Look) -> list[str]:
    fallbacks = [span.rate(table.PLACEMENTS, reason=reason) for reason in FALLBACKS]
    moved = span.risen.by(table.HANDOFF_BYTES, "visibility")
    total = sum(moved.values())
    hidden = f"{100 * moved.get('hidden', 0.0) / total:.0f} %" if total else UNKNOWN
    num_open = sum(worker.state.num_handoffs for worker in now.cluster.workers)
    queued = now.reading.total(table.CHOICES_WAITING)
    requests = (
        f"open {now.cluster.router.num_open_requests}",
        f"queued at the router {queued:.0f}",
        f"ended {_per_s(span.rate(table.REQUESTS))}",
        f"turned away {_per_s(span.rate(table.REJECTIONS))}",
        f"moved {_per_s(span.rate(table.MOVES))}",
        f"fallbacks {_per_s(_sum(fallbacks))}",
    )
    handoffs = (
        f"open {num_open} ends",
        f"sent {_per_s(span.rate(table.HANDOFFS, outcome='sent'))}",
        _bytes_per_s(span.rate(table.HANDOFF_BYTES)),
        f"hidden {hidden}",
    )
    prompt, generated = (_per_s(span.rate(metric)) for metric in (table.PROMPT_TOKENS, table.GENERATED_TOKENS))
    return [
        f"requests   {'   '.join(requests)}",
        f"tokens     prompt {prompt}   generated {generated}",
        f"latency    TTFT {span.percentiles(table.TTFT_SECONDS)}   ITL {span.percentiles(table.ITL_SECONDS)}",
        f"           TPOT {span.percentiles(table.TPOT_SECONDS)}   whole answer {span.percentiles(table.E2E_SECONDS)}",
        f"hand-offs  {'   '.join(handoffs)}",
    ]


def _ordered(workers: Sequence[WorkerView]) -> list[WorkerView]:
    return sorted(workers, key=lambda worker: (_ROLES.get(worker.role, len(_ROLES)), worker.worker_id))


def _row(worker: WorkerView, span: _Span, now: Look) -> tuple[str, ...]:
    state, me = worker.state, worker.worker_id
    used = state.num_held_blocks + state.num_reserved_blocks + state.num_quarantined_blocks
    total = used + state.num_free_blocks + state.num_cached_blocks
    busy = span.rate(table.STEP_SECONDS, worker=me)
    links = now.reading.by(table.LINK_BANDWIDTH, "peer", worker=me)
    fast = max(links.values(), default=0.0)
    return (
        me,
        worker.role,
        "draining" if worker.draining else "up" if worker.connected else "away",
        str(state.num_waiting),
        str(state.num_running),
        str(state.num_decoding),
        str(state.num_waiting_tokens),
        f"{_bar(used, total)} {used}/{total}",
        UNKNOWN if busy is None else f"{100 * min(1.0, busy):.0f} %",
        _number(span.rate(table.PROMPT_TOKENS_COMPUTED, worker=me)),
        _number(span.rate(table.OUTPUT_TOKENS, worker=me)),
        str(state.num_handoffs),
        str(state.num_cached_blocks),
        str(state.num_quarantined_blocks),
        f"{len(links)} at up to {_bytes_per_s(fast)}" if links else "",
    )


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Columns two blanks apart: words to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in cells) for place in range(len(_COLUMNS))]
    is_left = [name in _LEFT for name in _COLUMNS]
    return [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_left, strict=True)
        ).rstrip()
        for row in cells
    ]


def _bar(used: int, total: int) -> str:
    filled = -(-_BAR * used // total) if total else 0
    return f"[{'#' * filled}{'.' * (_BAR - filled)}]"


def _sum(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if len(known) == len(rates) else None


def _number(rate: float | None) -> str:
    if rate is None:
        return UNKNOWN
    return f"{rate:.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"


def _per_s(rate: float | None) -> str:
    return f"{_number(rate)}/s"


def _bytes_per_s(rate: float | None) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if rate is not None and rate >= size:
            return f"{rate / size:.3g} {unit}/s"
    return UNKNOWN if rate is None else f"{rate:.0f} B/s"


def seconds(value: float) -> str:
    """Three digits, in ms below a second."""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def duration(value: float) -> str:
    """Days, hours, minutes, seconds: the two largest."""
    whole = int(value)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    while len(parts) > 1 and parts[0][0] == 0:
        parts = parts[1:]
    return " ".join(f"{number} {unit}" for number, unit in parts[:2])
