"""Streams between two tokens that something hangs on, where an engine computes nothing (the simulator's).

A stream stands while a step can only make it one token longer: no block of its gets full or is needed, and its answer
does not end. Such a step has no row for it; what it has written is filled in when it leaves: because its time is over,
because somebody needs room, or because it is dropped.
"""

import heapq

from disagg.core.errors import InternalFault
from disagg.core.ids import SequenceId
from disagg.scheduler.sequence import Sequence


class Standing:
    """Those that stand on one worker. token_id: what all their tokens are."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self._num_steps = 0  # that ended, ever
        # By sequence: it, the steps that had ended when it came, and those that will have when it is to leave.
        self._members: dict[SequenceId, tuple[Sequence, int, int]] = {}
        self._until: list[tuple[int, SequenceId]] = []  # a heap; entries of some that have left
        self.context = 0  # tokens that they attend to in the next step, summed

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        member = self._members.get(sequence.sequence_id)
        return member is not None and member[0] is sequence

    def enter(self, sequence: Sequence, num_steps: int) -> None:
        """To leave after so many, 1 or more."""
        sequence.is_in_step = True
        until = self._num_steps + num_steps
        self._members[sequence.sequence_id] = (sequence, self._num_steps, until)
        heapq.heappush(self._until, (until, sequence.sequence_id))
        self.context += sequence.num_computed + 1

    def step(self, num_steps: int = 1) -> None:
        """So many have ended."""
        self._num_steps += num_steps
        self.context += num_steps * len(self._members)

    def leave(self, sequence: Sequence) -> int:
        """Fill in what it has written meanwhile; how many tokens that are."""
        num_tokens = self.num_tokens(sequence.sequence_id)
        del self._members[sequence.sequence_id]
        sequence.num_computed += num_tokens
        sequence.answer_ids += (self._token_id,) * num_tokens
        self.context -= sequence.num_computed + 1
        return num_tokens

    def due(self) -> list[Sequence]:
        """Those whose time is over."""
        due: dict[SequenceId, Sequence] = {}  # one that left and came again may be listed twice
        while self._until and self._until[0][0] <= self._num_steps:
            until, sequence_id = heapq.heappop(self._until)
            if self._is_member(until, sequence_id):
                due[sequence_id] = self._members[sequence_id][0]
        return [*due.values()]

    def all(self) -> list[Sequence]:
        return [sequence for sequence, _, _ in self._members.values()]

    def num_tokens(self, sequence_id: SequenceId) -> int:
        """Written since it came; 0 of one that does not stand."""
        member = self._members.get(sequence_id)
        return self._num_steps - member[1] if member is not None else 0

    @property
    def num_free_steps(self) -> int:
        """Until the next one is to leave; 0 where none stands."""
        while self._until and not self._is_member(*self._until[0]):
            heapq.heappop(self._until)
        return self._until[0][0] - self._num_steps if self._until else 0

    def _is_member(self, until: int, sequence_id: SequenceId) -> bool:
        member = self._members.get(sequence_id)
        return member is not None and member[2] == until

    def check_invariants(self) -> None:
        context = sum(each.num_computed + 1 + self.num_tokens(each.sequence_id) for each in self.all())
        if self.context != context:
            raise InternalFault(f"standing streams attend to {context} tokens, not to {self.context}")
