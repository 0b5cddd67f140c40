"""`disagg doctor`: the examination of a cluster, shown."""

import asyncio
import sys

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from disagg.cluster.examination import ClusterReport, Patient, examine_cluster, handoff_links, versions
from disagg.core.endpoints import TransportRate
from disagg.protocol.messages import LinkReport

GIB = 1 << 30
BITS_PER_GBIT = 1e9
MACHINE_COLUMNS = (
    "worker",
    "role",
    "release",
    "protocol",
    "KV layout",
    "blocks",
    "cores",
    "files",
    "locked",
    "shm free",
)


def run_doctor(router_address: str, keys: str, *, as_json: bool) -> int:
    """Prints; 0 when nothing is wrong, else 1. Raises ConfigurationError when the router cannot be asked."""
    report = asyncio.run(examine_cluster(router_address, keys))
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        show(report, Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160))
    return 1 if report.findings else 0


def show(report: ClusterReport, console: Console) -> None:
    """Three parts: machines, links, what to fix."""
    tls = "mutual TLS" if report.is_encrypted else "no TLS (loopback only)"
    console.print(f"{versions(report)}; control connections: {tls}", highlight=False, markup=False)
    console.print(_machines(report))
    links = handoff_links(report)
    if links:
        console.print(_links(links))
    if report.findings:
        console.print("[bold red]To fix:[/]")
        for finding in report.findings:
            console.print(f"  - {finding}", highlight=False, markup=False, soft_wrap=True)
    else:
        console.print("[green]Nothing is wrong.[/]")


def _machines(report: ClusterReport) -> Table:
    table = Table(title="Workers", title_justify="left")
    for name in MACHINE_COLUMNS:
        table.add_column(name)
    table.add_column("clock", justify="right")
    for patient in report.patients:
        table.add_row(*map(Text, _machine_row(patient)))  # as it is: what workers say is no markup
    return table


def _machine_row(patient: Patient) -> list[str]:
    card, answer = patient.card, patient.answer
    layout = card.layout
    shape = f"{layout.num_layers} x {layout.num_kv_heads} x {layout.head_dim} {layout.dtype}"
    shape = f"{shape}, {layout.block_size} tokens a block"
    head = [card.worker_id, card.role.value]
    protocol = str(card.protocols)
    if answer is None:
        return [*head, "?", protocol, shape, str(card.num_blocks), "?", "?", "?", "?", "?"]
    limits = answer.limits
    return [
        *head,
        answer.version,
        protocol,
        shape,
        str(card.num_blocks),
        str(limits.num_cores),
        _limit(limits.max_open_files),
        _bytes(limits.max_locked_bytes),
        _bytes(limits.shared_memory_bytes),
        f"{patient.clock_skew_s:+.3f} s",
    ]


def _links(links: list[tuple[Patient, Patient, LinkReport | None]]) -> Table:
    table = Table(title="Links, measured now", title_justify="left")
    for name in ("from", "to", "transport", "why", "TLS"):
        table.add_column(name)
    for name in ("Gbit/s", "expected", "there and back", "other ways, Gbit/s"):
        table.add_column(name, justify="right")
    for source, target, link in links:
        ends = (source.card.worker_id, target.card.worker_id)
        if link is None or not link.transport:
            table.add_row(*map(Text, (*ends, "not paired", *[""] * 6)))
            continue
        rate, expected = (8 * each / BITS_PER_GBIT for each in (link.bytes_per_s, link.expected_bytes_per_s))
        row = (
            *ends,
            link.transport,
            link.choice.replace("_", " "),
            "yes" if link.is_encrypted else "no",
            f"{rate:.3g}" if rate else "-",
            f"{expected:.3g}" if expected else "-",
            f"{1e3 * link.latency_s:.2f} ms" if rate else "-",
            ", ".join(_other_way(way) for way in link.rates if way.kind.value != link.transport) or "-",
        )
        table.add_row(*map(Text, row))
    return table


def _other_way(way: TransportRate) -> str:
    return f"{way.kind} {8 * way.bytes_per_s / BITS_PER_GBIT:.3g}" if way.bytes_per_s else f"{way.kind} ?"


def _limit(number: int) -> str:
    return "no limit" if number < 0 else str(number)


def _bytes(number: int) -> str:
    return "no limit" if number < 0 else f"{number / GIB:.3g} GiB" if number >= GIB else f"{number >> 20} MiB"
