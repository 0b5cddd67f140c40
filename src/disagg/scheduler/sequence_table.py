"""One worker's sequences by what they do and what they wait for, so that no event looks at all of them.

WAITING   for a peer's bytes   task DECODE: it starts nothing by itself
          for blocks here      the other tasks, by task
          for a peer's answer  the same, with blocks of their own: room was asked for
others    by state
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from itertools import chain

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId
from disagg.core.roles import Task
from disagg.protocol.lifecycle import SequenceState
from disagg.scheduler.sequence import Sequence

_Listed = dict[int, Sequence]  # by arrival


class SequenceTable:
    """put() and take_out() go around whatever changes a sequence's state; set_blocks() is for one that waits."""

    def __init__(self) -> None:
        self._in_state: dict[SequenceState, _Listed] = {state: {} for state in SequenceState}
        self._waiting: dict[Task, _Listed] = {task: {} for task in Task}  # without blocks
        self._asking: _Listed = {}  # waiting, with blocks
        # Waiting, and there was no room at least once, by tenant; each in the order of the first time.
        self._refused: dict[str, _Listed] = {}
        self._order: list[tuple[int, int]] = []  # of streams that do not stand: (-priority, arrival), ascending
        self._standing: set[int] = set()  # arrivals
        self._streams: tuple[Sequence, ...] | None = None  # in that order, until one begins or ends

    def put(self, sequence: Sequence) -> None:
        """As it is now."""
        state = sequence.state
        self._in_state[state][sequence.arrival] = sequence
        if state is SequenceState.WAITING:
            self._list_waiting(sequence)
        elif state is SequenceState.DECODING:
            self._list_stream(sequence)

    def take_out(self, sequence: Sequence) -> None:
        """As it was put in."""
        state = sequence.state
        del self._in_state[state][sequence.arrival]
        if state is SequenceState.WAITING:
            self._unlist_waiting(sequence)
        elif state is SequenceState.DECODING:
            self._unlist_stream(sequence)

    def set_blocks(self, sequence: Sequence, blocks: tuple[BlockId, ...]) -> None:
        """A waiting sequence takes blocks to ask a peer with, or has given them back."""
        self._unlist_waiting(sequence)
        sequence.blocks = blocks
        self._list_waiting(sequence)

    def stand(self, sequence: Sequence) -> None:
        """A stream needs no rows for a while: see Standing."""
        self._unlist_stream(sequence)
        self._standing.add(sequence.arrival)

    def recall(self, sequence: Sequence) -> None:
        """It needs them again."""
        self._standing.remove(sequence.arrival)
        self._list_stream(sequence)

    def _list_stream(self, sequence: Sequence) -> None:
        insort(self._order, (-sequence.spec.priority, sequence.arrival))
        self._streams = None

    def _unlist_stream(self, sequence: Sequence) -> None:
        del self._order[bisect_left(self._order, (-sequence.spec.priority, sequence.arrival))]
        self._streams = None

    def _list_waiting(self, sequence: Sequence) -> None:
        listed = self._asking if sequence.blocks else self._waiting[sequence.task]
        listed[sequence.arrival] = sequence

    def _unlist_waiting(self, sequence: Sequence) -> None:
        listed = self._asking if sequence.blocks else self._waiting[sequence.task]
        del listed[sequence.arrival]

    def refuse(self, sequence: Sequence, now_s: float) -> None:
        """There was no room for a waiting sequence."""
        sequence.refused_since_s = min(sequence.refused_since_s, now_s)
        self._refused.setdefault(sequence.spec.tenant, {})[sequence.arrival] = sequence

    def forget_refusal(self, sequence: Sequence) -> None:
        """It waits no more."""
        listed = self._refused.get(sequence.spec.tenant, {})
        if listed.pop(sequence.arrival, None) is not None and not listed:
            del self._refused[sequence.spec.tenant]
        sequence.refused_since_s = float("inf")

    def in_state(self, *states: SequenceState) -> Iterator[Sequence]:
        """Sequences in these states, in order of entering them; take a list of it before changing any."""
        return chain.from_iterable(self._in_state[state].values() for state in states)

    def num_in_state(self, state: SequenceState) -> int:
        return len(self._in_state[state])

    def waiting(self, task: Task) -> Collection[Sequence]:
        """Those without blocks that have this task here; take a list of it before changing any."""
        return self._waiting[task].values()

    @property
    def asking(self) -> Collection[Sequence]:
        """Those that wait with blocks."""
        return self._asking.values()

    @property
    def starts_something(self) -> bool:
        """Whether anything waits that may begin to read here without having heard from a peer."""
        return self.num_in_state(SequenceState.WAITING) > len(self._waiting[Task.DECODE])

    def streams(self) -> tuple[Sequence, ...]:
        """Those that write answers and do not stand: the higher priority first, then the older."""
        if self._streams is None:
            decoding = self._in_state[SequenceState.DECODING]
            self._streams = tuple([decoding[arrival] for _, arrival in self._order])
        return self._streams

    def would_overtake(self, sequence: Sequence, limit_s: float, had: Callable[[str], float]) -> bool:
        """Somebody older has been refused room since before limit_s, of its tenant or of one that had no more."""
        own = sequence.spec.tenant
        return any(
            _is_any_older(listed, sequence.arrival, limit_s)
            for tenant, listed in self._refused.items()
            if tenant == own or had(tenant) <= had(own)
        )

    def check_invariants(self, sequences: Collection[Sequence]) -> None:
        """sequences: all there are."""
        for state, listed in self._in_state.items():
            expected = {each.arrival: each for each in sequences if each.state is state}
            if listed != expected:
                raise InternalFault(f"{state} lists arrivals {sorted(listed)}, they are {sorted(expected)}")
        waiting = self._in_state[SequenceState.WAITING]
        for task, listed in self._waiting.items():
            arrivals = {arrival for arrival, each in waiting.items() if each.task is task and not each.blocks}
            if listed.keys() != arrivals:
                raise InternalFault(f"waiting to {task} are arrivals {sorted(arrivals)}, listed {sorted(listed)}")
        if self._asking.keys() != {arrival for arrival, each in waiting.items() if each.blocks}:
            raise InternalFault(f"listed as waiting with blocks are arrivals {sorted(self._asking)}, which is not so")
        refused = {arrival for arrival, each in waiting.items() if each.refused_since_s < float("inf")}
        listed_apart = [arrival for listed in self._refused.values() for arrival in listed]
        if sorted(listed_apart) != sorted(refused):
            raise InternalFault(f"refused are arrivals {sorted(refused)}, listed {sorted(listed_apart)}")
        for tenant, listed in self._refused.items():
            since_s = [each.refused_since_s for each in listed.values()]
            if not listed or since_s != sorted(since_s) or {each.spec.tenant for each in listed.values()} != {tenant}:
                raise InternalFault(f"the refused of {tenant!r} are not its own, in the order in which they were")
        decoding = self._in_state[SequenceState.DECODING]
        if not self._standing <= decoding.keys():
            raise InternalFault("a stream stands that does not decode")
        moving = [each for arrival, each in decoding.items() if arrival not in self._standing]
        if self.streams() != tuple(sorted(moving, key=lambda each: (-each.spec.priority, each.arrival))):
            raise InternalFault("the ordered streams are not those that decode, or not in their order")


def _is_any_older(listed: _Listed, arrival: int, limit_s: float) -> bool:
    for other in listed.values():
        if other.refused_since_s >= limit_s:
            return False  # the others were refused later
        if other.arrival < arrival:
            return True
    return False
