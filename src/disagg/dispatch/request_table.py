"""All open requests, and which of their choices time may change: whoever asks for those looks at no other.

A choice is to be looked at again while no worker has it, while it is placed and has no token yet, and while its reader
is lost and its writer has not said what that means. Most have a worker and an answer that grows.
"""

from collections.abc import Callable, Iterator

from disagg.core.errors import InternalFault
from disagg.core.ids import RequestId, SequenceId, WorkerId
from disagg.dispatch.open_request import Choice, OpenRequest
from disagg.policy.recovery import RecoveryLimits


class RequestTable:
    """note() must be called after whatever changes a choice's place, its reader or its first token."""

    def __init__(self, limits: RecoveryLimits) -> None:
        self._limits = limits
        self._requests: dict[RequestId, OpenRequest] = {}
        self._choices: dict[SequenceId, Choice] = {}  # of these
        self.choice: Callable[[SequenceId], Choice | None] = self._choices.get  # asked for every token
        self._unplaced: dict[SequenceId, Choice] = {}
        self._unanswered: dict[SequenceId, Choice] = {}  # in the order in which they were placed
        self._judging: dict[SequenceId, Choice] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[OpenRequest]:
        """In the order in which they came."""
        return iter(self._requests.values())

    def __getitem__(self, request_id: RequestId) -> OpenRequest:
        return self._requests[request_id]

    def get(self, request_id: RequestId) -> OpenRequest | None:
        return self._requests.get(request_id)

    def written_by(self, worker_id: WorkerId) -> list[tuple[OpenRequest, Choice]]:
        """Choices that are placed there to be written."""
        return [
            (opened, choice)
            for opened in self._requests.values()
            for choice in opened.choices
            if choice.is_placed and choice.placement is not None and choice.placement.decode == worker_id
        ]

    def add(self, opened: OpenRequest) -> None:
        self._requests[opened.request_id] = opened
        for choice in opened.choices:
            self._choices[choice.sequence_id] = choice
            self.note(choice)

    def remove(self, opened: OpenRequest) -> None:
        """It has ended."""
        del self._requests[opened.request_id]
        for choice in opened.choices:
            del self._choices[choice.sequence_id]
            for listed in (self._unplaced, self._unanswered, self._judging):
                listed.pop(choice.sequence_id, None)

    def note(self, choice: Choice) -> None:
        """It was placed, taken from its workers, or ended; its reader was lost; its first token came."""
        is_placed = choice.is_placed
        _list(self._unplaced, choice, is_in=choice.is_open and not is_placed)
        _list(self._unanswered, choice, is_in=is_placed and not choice.entry.tokens)
        _list(self._judging, choice, is_in=choice.judged_by_s(self._limits) < float("inf"))

    def due(self, now_s: float) -> list[Choice]:
        """All that may be due, in the order of their requests: to be placed, to be judged, to be given up."""
        due = {**self._unplaced, **self._judging}
        for sequence_id, choice in self._unanswered.items():
            if choice.unplaced_since_s + self._limits.max_queue_s > now_s:
                break  # those behind it were placed later
            due[sequence_id] = choice
        return [due[sequence_id] for sequence_id in sorted(due)]

    def check_invariants(self) -> None:
        choices = [choice for opened in self._requests.values() for choice in opened.choices]
        if list(self._choices.values()) != choices:
            raise InternalFault(f"choices are known as {sorted(self._choices)}, which are not those of the requests")
        placed = [choice for choice in choices if choice.is_placed]
        lists = (
            ("unplaced", self._unplaced, [each for each in choices if each.is_open and not each.is_placed]),
            ("unanswered", self._unanswered, [each for each in placed if not each.entry.tokens]),
            ("judging", self._judging, [each for each in placed if each.judged_by_s(self._limits) < float("inf")]),
        )
        for name, listed, expected in lists:
            if listed.keys() != {each.sequence_id for each in expected}:
                raise InternalFault(f"listed as {name} are {sorted(listed)}, which is not how choices stand")
        placed_s = [choice.unplaced_since_s for choice in self._unanswered.values()]
        if placed_s != sorted(placed_s):
            raise InternalFault("choices without a token are not listed in the order in which they were placed")
        for opened in self._requests.values():
            opened.check_invariants()


def _list(listed: dict[SequenceId, Choice], choice: Choice, *, is_in: bool) -> None:
    """One that is listed already keeps its place."""
    if is_in:
        listed[choice.sequence_id] = choice
    else:
        listed.pop(choice.sequence_id, None)
