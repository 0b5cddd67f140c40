"""What `disagg top` shows, as lines of text. Looks in, lines out: reads no clock and no terminal.

Totals become rates, and histograms percentiles, between an earlier look and the last one; before there is an earlier
one, rates are unknown and percentiles are of everything so far. A picture that is too wide loses whole columns and says
which: a number that is cut off would be another number.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len

from disagg.cluster.view import ClusterView, WorkerView
from disagg.core.roles import Role
from disagg.policy.routing import FALLBACKS
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
UNKNOWN = "-"
NO_LIMIT = 1 << 30  # width of what is no terminal
_BAR = 10
_INDENT = 11
_BETWEEN = "   "
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
)
_LEFT = ("worker", "role", "state", "KV blocks in use", "sends to")
# What a narrow terminal does without, the first ones first.
_SPARED = ("sends to", "cached", "quarantined", "running", "to read", "hand-offs", "streams", "read/s", "state", "role")

Rate = float | None  # per second; None while there is one look only


class Look(NamedTuple):
    """What a router said at one moment. at_s: on any steady clock."""

    at_s: float
    cluster: ClusterView
    reading: Reading


class Away(NamedTuple):
    """Nothing was said, and why."""

    why: str


class Line(NamedTuple):
    """One line of the picture."""

    text: str
    is_title: bool = False


class _Span:
    """Between two looks, or from the router's start on."""

    def __init__(self, before: Look | None, now: Look) -> None:
        self.seconds = now.at_s - before.at_s if before is not None else 0.0
        self.risen = now.reading.since(before.reading) if before is not None else now.reading

    def rate(self, metric: Metric, **labels: str) -> Rate:
        return self.risen.total(metric, **labels) / self.seconds if self.seconds > 0 else None

    def by_worker(self, metric: Metric) -> Callable[[str], Rate]:
        """The rate of any worker."""
        totals, seconds = self.risen.by(metric, "worker"), self.seconds
        return lambda worker: totals.get(worker, 0.0) / seconds if seconds > 0 else None

    def percentiles(self, metric: Metric) -> str:
        """p50 and p95, or what says that there was nothing."""
        found = self.risen.quantiles(metric, (0.5, 0.95))
        return f"p50 {seconds(found[0])}  p95 {seconds(found[1])}" if found else UNKNOWN


def picture(before: Look | None, now: Look, url: str, width: int = NO_LIMIT) -> list[Line]:
    """The whole screen; workers last, one line each. width: in cells."""
    span = _Span(before, now)
    rows, unseen = _aligned([_COLUMNS, *_rows(span, now)], width)
    hint = _wrapped("a wider terminal shows ", unseen, width) if unseen and now.cluster.workers else [""]
    return [
        *(Line(text, is_title=True) for text in _wrapped("", _headline(now, url), width)),
        *(Line(text) for title, items in _summary(span, now) for text in _wrapped(f"{title:{_INDENT}}", items, width)),
        *(Line(text) for text in hint),
        Line(rows[0], is_title=True),
        *(Line(text) for text in rows[1:] or ["no worker is connected"]),
    ]


def absent(url: str, away: Away, since_s: float | None, width: int = NO_LIMIT) -> list[Line]:
    """Instead of the picture, or above the last one. since_s: seconds since the last answer; None: never."""
    last = () if since_s is None else (f"the last answer is {duration(since_s)} old",)
    why = (away.why, *last, "still asking, Ctrl-C ends this")
    return [
        Line(f"no router answers at {url}", is_title=True),
        *(Line(text, is_title=True) for text in _wrapped(" " * _INDENT, why, width)),
    ]


def fitted(lines: Sequence[Line], height: int) -> list[Line]:
    """At most `height` lines; the last one says how many are not shown."""
    if len(lines) <= height or height < 1:
        return list(lines)
    return [*lines[: height - 1], Line(f"... {len(lines) - height + 1} more lines: a taller terminal shows them")]


def _headline(now: Look, url: str) -> list[str]:
    models = [f"{m.model} ready" if m.is_ready else f"{m.model}: {m.missing}" for m in now.cluster.models]
    return [f"disagg at {url}", f"up {duration(now.cluster.router.uptime_s)}", *(models or ["no model"])]


def _summary(span: _Span, now: Look) -> list[tuple[str, Sequence[str]]]:
    """Titles and what stands behind them."""
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
        ("requests", requests),
        ("tokens", (f"prompt {prompt}", f"generated {generated}")),
        ("latency", (f"TTFT {span.percentiles(table.TTFT_SECONDS)}", f"ITL {span.percentiles(table.ITL_SECONDS)}")),
        (
            "",
            (
                f"TPOT {span.percentiles(table.TPOT_SECONDS)}",
                f"whole answer {span.percentiles(table.E2E_SECONDS)}",
            ),
        ),
        ("hand-offs", handoffs),
    ]


def _wrapped(start: str, items: Sequence[str], width: int) -> list[str]:
    """As many lines as it takes, each at least one item long; start: what stands before the first one."""
    lines = [start + items[0]]
    for item in items[1:]:
        longer = f"{lines[-1]}{_BETWEEN}{item}"
        if cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(" " * _INDENT + item)
    return lines


def _rows(span: _Span, now: Look) -> list[tuple[str, ...]]:
    """A row for each worker, by role and name."""
    busy, read, written = map(span.by_worker, (table.STEP_SECONDS, table.PROMPT_TOKENS_COMPUTED, table.OUTPUT_TOKENS))
    links: dict[str, list[float]] = {}
    for labels, bytes_per_s in now.reading.series(table.LINK_BANDWIDTH):
        links.setdefault(labels.get("worker", ""), []).append(bytes_per_s)
    workers = sorted(now.cluster.workers, key=lambda each: (_ROLES.get(each.role, len(_ROLES)), each.worker_id))
    return [
        _row(each, busy(each.worker_id), read(each.worker_id), written(each.worker_id), links.get(each.worker_id, ()))
        for each in workers
    ]


def _row(worker: WorkerView, busy: Rate, read: Rate, written: Rate, links: Sequence[float]) -> tuple[str, ...]:
    """links: what each carries, in bytes a second."""
    state = worker.state
    used = state.num_held_blocks + state.num_reserved_blocks + state.num_quarantined_blocks
    total = used + state.num_free_blocks + state.num_cached_blocks
    return (
        worker.worker_id,
        worker.role,
        "draining" if worker.draining else "up" if worker.connected else "away",
        str(state.num_waiting),
        str(state.num_running),
        str(state.num_decoding),
        str(state.num_waiting_tokens),
        f"{_bar(used, total)} {used}/{total}",
        UNKNOWN if busy is None else f"{100 * min(1.0, busy):.0f} %",
        _number(read),
        _number(written),
        str(state.num_handoffs),
        str(state.num_cached_blocks),
        str(state.num_quarantined_blocks),
        f"{len(links)} at up to {_bytes_per_s(max(links))}" if links else "",
    )


def _aligned(cells: Sequence[Sequence[str]], width: int) -> tuple[list[str], list[str]]:
    """Columns two blanks apart, words to the left, numbers to the right; and those that had to be left out."""
    widths = {name: max(map(len, column)) for name, column in zip(_COLUMNS, zip(*cells, strict=True), strict=True)}
    unseen: list[str] = []
    for name in _SPARED:
        if sum(widths.values()) + 2 * (len(widths) - 1) <= width:
            break
        unseen.append(name)
        del widths[name]
    shown = [(place, widths[name], name in _LEFT) for place, name in enumerate(_COLUMNS) if name in widths]
    lines = [
        "  ".join([row[place].ljust(room) if left else row[place].rjust(room) for place, room, left in shown]).rstrip()
        for row in cells
    ]
    return lines, [name for name in _COLUMNS if name in unseen]


def _bar(used: int, total: int) -> str:
    filled = -(-_BAR * used // total) if total else 0
    return f"[{'#' * filled}{'.' * (_BAR - filled)}]"


def _sum(rates: Sequence[Rate]) -> Rate:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if len(known) == len(rates) else None


def _number(rate: Rate) -> str:
    if rate is None:
        return UNKNOWN
    return f"{rate:.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"


def _per_s(rate: Rate) -> str:
    return f"{_number(rate)}/s"


def _bytes_per_s(rate: Rate) -> str:
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
