"""How long bytes take: shared links played out moment by moment, or their arrival computed at once.

A transfer uses the sender's card, the receiver's card, and the line between their sites where they have one.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple, Protocol

import msgspec

from disagg.core.errors import InternalFault
from disagg.sim.events import EventHeap
from disagg.sim.scenario import Scenario, WorkerSpec

OnDone = Callable[[bool], object]  # whether all bytes have arrived

_ROUNDING_S = 1e-9  # what a transfer that is due now may still have left


class Write(msgspec.Struct, frozen=True):
    """Bytes to move. first_s, last_bytes: where layers came one by one until now, when their first bytes existed and
    how many came last."""

    key: bytes  # of the grant it is made under
    pair: tuple[str, str]  # from whom to whom
    resources: tuple[str, ...]
    num_bytes: int
    latency_s: float
    first_s: float
    last_bytes: int = 0


class Links(Protocol):
    """Bandwidth that transfers have in common. on_done is called once for each, with False when it was cancelled."""

    def set_capacity(self, resource: str, bytes_s: float) -> None: ...

    def send(self, write: Write, on_done: OnDone) -> None: ...

    def cancel(self, key: bytes) -> None: ...

    def break_pair(self, pair: tuple[str, str]) -> None: ...

    def check_invariants(self) -> None: ...


class _Transfer:
    """One write under way."""

    __slots__ = ("num_left", "on_done", "rate", "write")

    def __init__(self, write: Write, on_done: OnDone) -> None:
        self.write = write
        self.on_done = on_done
        self.num_left = float(write.num_bytes)
        self.rate = 0.0


class FairLinks:
    """Every moment, each transfer has its max-min fair share; what one cannot use goes to the others."""

    def __init__(self, heap: EventHeap) -> None:
        self._heap = heap
        self._capacity: dict[str, float] = {}
        self._open: list[_Transfer] = []
        self._moved_s = 0.0  # until when the bytes of open transfers are counted
        self._next_s = float("inf")

    def set_capacity(self, resource: str, bytes_s: float) -> None:
        self._capacity[resource] = bytes_s

    def send(self, write: Write, on_done: OnDone) -> None:
        """Begin now."""
        self._advance()
        self._open.append(_Transfer(write, on_done))
        self._share()

    def cancel(self, key: bytes) -> None:
        """Transfers under this grant that are not done never will be; their share goes to the others."""
        self._drop(lambda write: write.key == key)

    def break_pair(self, pair: tuple[str, str]) -> None:
        self._drop(lambda write: write.pair == pair)

    def _drop(self, is_dropped: Callable[[Write], bool]) -> None:
        self._advance()
        dropped = [transfer for transfer in self._open if is_dropped(transfer.write)]
        if dropped:
            self._open = [transfer for transfer in self._open if not is_dropped(transfer.write)]
            self._share()
        for transfer in dropped:
            transfer.on_done(False)

    def _advance(self) -> None:
        passed_s = self._heap.now_s - self._moved_s
        if passed_s > 0:
            for transfer in self._open:
                transfer.num_left -= transfer.rate * passed_s
        self._moved_s = self._heap.now_s

    def _share(self) -> None:
        """New rates, and when the first transfer will be done at them."""
        rates = fair_rates([transfer.write.resources for transfer in self._open], self._capacity)
        for transfer, rate in zip(self._open, rates, strict=True):
            transfer.rate = rate
        left_s = min((max(0.0, t.num_left) / t.rate for t in self._open), default=float("inf"))
        self._next_s = self._heap.now_s + left_s
        if self._open:
            self._heap.at(self._next_s, self._wake, self._next_s)

    def _wake(self, due_s: float) -> None:
        if due_s != self._next_s:
            return  # rates have changed since
        self._advance()
        done = [transfer for transfer in self._open if transfer.num_left <= transfer.rate * _ROUNDING_S]
        self._open = [transfer for transfer in self._open if transfer.num_left > transfer.rate * _ROUNDING_S]
        self._share()
        for transfer in done:
            self._heap.after(transfer.write.latency_s, transfer.on_done, True)

    def check_invariants(self) -> None:
        for resource, capacity in self._capacity.items():
            used = sum(transfer.rate for transfer in self._open if resource in transfer.write.resources)
            if used > capacity * (1 + 1e-9):
                raise InternalFault(f"{resource} gives {used:g} bytes/s, it has {capacity:g}")


def fair_rates(users: list[tuple[str, ...]], capacity: dict[str, float]) -> list[float]:
    """Max-min fair rates: the scarcest resource is shared out evenly first, its users want no more of the others."""
    rates = [0.0] * len(users)
    left = dict(capacity)
    waiting: dict[int, tuple[str, ...]] = dict(enumerate(users))
    while waiting:
        counts: dict[str, int] = {}
        for resources in waiting.values():
            for resource in resources:
                counts[resource] = counts.get(resource, 0) + 1
        scarcest = min(counts, key=lambda resource: (left[resource] / counts[resource], resource))
        share = left[scarcest] / counts[scarcest]
        for index, resources in list(waiting.items()):
            if scarcest in resources:
                rates[index] = share
                for resource in resources:
                    left[resource] = max(0.0, left[resource] - share)
                del waiting[index]
    return rates


class ComputedLinks:
    """Closed form: each resource takes transfers one after another, none sooner than its bytes exist.

    Of a chunk whose layers came one by one, the first bytes existed before the step's end and the last at its end, so
    what remains visible is at least the last layers' own time.
    """

    def __init__(self, heap: EventHeap) -> None:
        self._heap = heap
        self._capacity: dict[str, float] = {}
        self._free_s: dict[str, float] = {}
        self._open: dict[bytes, dict[int, tuple[Write, OnDone]]] = {}
        self._numbers = count()

    def set_capacity(self, resource: str, bytes_s: float) -> None:
        self._capacity[resource] = bytes_s

    def send(self, write: Write, on_done: OnDone) -> None:
        number = next(self._numbers)
        self._open.setdefault(write.key, {})[number] = (write, on_done)
        self._heap.at(self._done_s(write) + write.latency_s, self._finish, write.key, number)

    def cancel(self, key: bytes) -> None:
        for _, on_done in self._open.pop(key, {}).values():
            on_done(False)

    def break_pair(self, pair: tuple[str, str]) -> None:
        for key in [key for key, writes in self._open.items() if any(w.pair == pair for w, _ in writes.values())]:
            self.cancel(key)

    def check_invariants(self) -> None:
        if not all(self._open.values()):
            raise InternalFault("a grant without transfers is listed")

    def _done_s(self, write: Write) -> float:
        done_s = now_s = self._heap.now_s
        for resource in write.resources:
            capacity = self._capacity[resource]
            free_s = max(write.first_s, self._free_s.get(resource, 0.0)) + write.num_bytes / capacity
            self._free_s[resource] = free_s
            done_s = max(done_s, free_s, now_s + write.last_bytes / capacity)
        return done_s

    def _finish(self, key: bytes, number: int) -> None:
        writes = self._open.get(key, {})
        known = writes.pop(number, None)
        if known is None:
            return  # cancelled
        if not writes:
            del self._open[key]
        known[1](True)


class Route(NamedTuple):
    """From one worker to another."""

    resources: tuple[str, ...]  # that transfers use
    latency_s: float  # of transfers
    message_s: float  # of a control message, or of the word that a transfer has arrived


class Routes:
    """Between all workers: both cards, and the line between their sites."""

    def __init__(self, scenario: Scenario) -> None:
        self._specs = {spec.name: spec for spec in scenario.workers}
        self._lines = {(line.source, line.target): line.link for line in scenario.lines}
        self._message_s = scenario.message_s
        self._known: dict[tuple[str, str], Route] = {}

    def capacities(self) -> Iterator[tuple[str, float]]:
        """Every resource and its bytes/s."""
        for spec in self._specs.values():
            yield f"{spec.name} out", spec.nic.bandwidth_bytes_s
            yield f"{spec.name} in", spec.nic.bandwidth_bytes_s
        for (source, target), link in self._lines.items():
            yield f"{source} to {target}", link.bandwidth_bytes_s

    def between(self, source: str, target: str) -> Route:
        known = self._known.get((source, target))
        if known is None:
            known = self._known[source, target] = self._find(self._specs[source], self._specs[target])
        return known

    def _find(self, one: WorkerSpec, other: WorkerSpec) -> Route:
        resources = (f"{one.name} out", f"{other.name} in")
        latency_s = max(one.nic.latency_s, other.nic.latency_s)
        line = self._lines.get((one.site, other.site))
        if line is None:
            return Route(resources, latency_s, self._message_s)
        name = f"{one.site} to {other.site}"
        return Route((*resources, name), latency_s + line.latency_s, self._message_s + line.latency_s)
