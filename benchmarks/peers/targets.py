"""How much faster than others our engines are to be, and which cells miss it, at which share of their roofline."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from peers.catalog import OURS, Entry


class Cell(Protocol):
    """What is measured; batch 0 is the reading of a prompt."""

    @property
    def batch(self) -> int: ...

    @property
    def name(self) -> str: ...


class Rated(Protocol):
    """One engine's results."""

    def tokens_per_s(self, cell: Any) -> float: ...


class Target(msgspec.Struct, frozen=True):
    """Ours at least `least` times as fast as each of the peers that is at least as precise."""

    ours: str  # kind
    least: float
    peers: str = ""  # a name or family of the catalog; "": all
    batches: tuple[int, ...] = ()  # of cells; none: all

    @property
    def text(self) -> str:
        cells = " and ".join(f"batch {batch}" if batch else "prefill" for batch in self.batches) or "everywhere"
        return f"{self.ours} >= {self.least:g} x {self.peers or 'the fastest as precise'}, {cells}"

    def is_of(self, entry: Entry) -> bool:
        return not self.peers or self.peers in (entry.name, entry.family)


TARGETS = (
    Target("fp32", 1.0),
    Target("fp16", 1.0),
    Target("fp16", 2.0, "transformers"),
    Target("int8", 1.0),
    Target("int8", 1.3, "llamacpp-Q8_0", (0, 8, 16)),
    Target("int8", 0.9, "llamacpp-Q8_0", (1,)),
)


class Shortfall(NamedTuple):
    """A cell that misses a target."""

    cell: str
    peer: str
    ratio: float
    share: float  # of what memory and arithmetic allow ours


def best_peer(cell: Cell, ours: Entry, entries: Sequence[Entry], results: Mapping[str, Rated]) -> tuple[str, float]:
    """(name, tokens/s) of the fastest peer that is at least as precise; ('', nan) without one."""
    rates = {
        entry.name: results[entry.name].tokens_per_s(cell)
        for entry in entries
        if entry.family != OURS and entry.precision >= ours.precision and entry.name in results
    }
    rates = {name: rate for name, rate in rates.items() if not math.isnan(rate)}
    if not rates:
        return "", math.nan
    name = max(rates, key=lambda each: rates[each])
    return name, rates[name]


def show_targets(
    entries: Sequence[Entry],
    cells: Sequence[Cell],
    results: Mapping[str, Rated],
    shares: Mapping[str, Sequence[float]],
) -> dict[str, dict[str, object]]:
    """Prints each target with its shortfalls; gives what of it goes into the JSON line."""
    print("\ntargets")
    found: dict[str, dict[str, object]] = {}
    for target in TARGETS:
        for ours in (each for each in entries if (each.family, each.kind) == (OURS, target.ours)):
            if ours.name in results:
                num_cells, short = _compare(target, ours, entries, cells, results, shares[ours.name])
                found[target.text] = {"cells": num_cells, "short": [each._asdict() for each in short]}
                met = f"{num_cells - len(short)} of {num_cells} cells" if num_cells else "not measured"
                print(f"  {target.text}: {met}")
                for each in short:
                    roofline = f"{100 * each.share:.0f} % of its roofline"
                    print(f"    short: {each.cell:18} {each.ratio:5.2f} x {each.peer}, at {roofline}")
    return found


def _compare(
    target: Target,
    ours: Entry,
    entries: Sequence[Entry],
    cells: Sequence[Cell],
    results: Mapping[str, Rated],
    shares: Sequence[float],
) -> tuple[int, list[Shortfall]]:
    """Cells that both sides did, and those that miss it."""
    peers = [entry for entry in entries if target.is_of(entry)]
    num_cells, short = 0, []
    for cell, share in zip(cells, shares, strict=True):
        name, best = best_peer(cell, ours, peers, results)
        ratio = results[ours.name].tokens_per_s(cell) / best
        if (target.batches and cell.batch not in target.batches) or math.isnan(ratio):
            continue
        num_cells += 1
        if ratio < target.least:
            short.append(Shortfall(cell.name, name, round(ratio, 3), round(share, 3)))
    return num_cells, short
