"""Tokens that the router does not need to hear of yet, at large fidelity: when each came is noted, and that is all."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from disagg.core.ids import RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken
from disagg.protocol.messages import EmitTokens, WorkerToRouter
from disagg.sim.events import EventHeap
from disagg.sim.records import OpenRecord, RecordTable, take_held
from disagg.sim.worker import SimWorker


class Course:
    """When a worker's last steps ended, as the router sees it."""

    def __init__(self, num_kept: int) -> None:
        """num_kept: steps that a stream can stand for, at most."""
        self._gaps_s: deque[float] = deque(maxlen=num_kept + 1)
        self._ends_s: deque[float] = deque([0.0], maxlen=num_kept + 2)

    def note(self, end_s: float) -> float:
        """A step's end; seconds since the one before."""
        gap_s = end_s - self._ends_s[-1]
        self._gaps_s.append(gap_s)
        self._ends_s.append(end_s)
        return gap_s

    def before(self, num_steps: int, num_later: int) -> tuple[float, float]:
        """Of so many steps, before the last num_later: the last one's end, the longest gap."""
        stop = len(self._gaps_s) - num_later
        return self._ends_s[-1 - num_later], max(islice(self._gaps_s, stop - num_steps, stop))


class HeldTokens:
    """What begins or ends an answer is passed on; the rest is kept back until then, or until release()."""

    def __init__(
        self,
        heap: EventHeap,
        records: RecordTable,
        open_records: dict[RequestId, OpenRecord],
        hear: Callable[[SimWorker, WorkerToRouter], None],
        message_s: float,
    ) -> None:
        self._heap = heap
        self._records = records
        self._open = open_records
        self._hear = hear  # what the router does with a message
        self._message_s = message_s
        self._by_worker: dict[WorkerId, dict[SequenceId, OpenRecord]] = {}
        self._courses: dict[SimWorker, Course] = {}

    def take(self, worker: SimWorker, message: EmitTokens) -> None:
        """What one step gave, now."""
        seen_s = self._heap.now_s + self._message_s
        holding = self._by_worker.setdefault(worker.worker_id, {})
        passed_on: list[EmittedToken] = []
        open_records, note_token = self._open, self._records.note_token
        for token in message.tokens:
            sequence_id, position = token.sequence_id, token.position
            record = open_records.get(sequence_id.request_id)
            if record is None or position < record.num_tokens:
                continue  # a repeat, or of a request that has ended
            record.holder = worker
            if worker.scheduler.has_recalled(sequence_id):
                self._fill(worker, record, position + 1 - record.num_tokens, 0)
                continue
            self._fill(worker, record, position - record.num_tokens, 1)
            note_token(record, seen_s)
            if record.num_tokens == record.request.num_output_tokens:
                passed_on += take_held(record, sequence_id, position)
                passed_on.append(token)
                holding.pop(sequence_id, None)
            elif position == 0:
                passed_on.append(token)
            else:
                holding[sequence_id] = record
                record.num_held += 1
        if passed_on or message.prompts:
            rest = EmitTokens(tuple(passed_on), message.prompts)
            self._heap.after(self._message_s, self._hear, worker, rest)

    def note_ends(self, worker: SimWorker, ends_s: Sequence[float]) -> None:
        """Steps are over; streams that stand got a token of each."""
        course = self._courses.get(worker)
        if course is None:
            course = self._courses[worker] = Course(worker.card.layout.block_size)
        num_standing = worker.scheduler.num_standing
        for end_s in ends_s:
            gap_s = course.note(end_s + self._message_s)
            if num_standing:
                self._records.count_more(gap_s, num_standing)

    def _fill(self, worker: SimWorker, record: OpenRecord, num_tokens: int, num_later: int) -> None:
        """What a stream wrote while it stood, before the last num_later steps."""
        if num_tokens < 1:
            return
        last_s, most_s = self._courses[worker].before(num_tokens, num_later)
        record.num_tokens += num_tokens
        record.num_held += num_tokens
        record.last_s = last_s
        record.max_gap_s = max(record.max_gap_s, most_s)

    def release(self, worker: SimWorker, sequence_id: SequenceId | None = None) -> None:
        """Hand the router what was kept back, of one sequence or of all that this worker writes."""
        worker.catch_up()
        holding = self._by_worker.get(worker.worker_id, {})
        for each in [sequence_id] if sequence_id is not None else list(holding):
            self.settle(worker, each)
            record = holding.get(each)
            is_writer = record is not None and record.holder is worker
            if not is_writer or not worker.scheduler.num_written(each):  # else more may come, and nobody will say so
                holding.pop(each, None)
            if record is not None and is_writer and record.num_held:
                self._hear(worker, EmitTokens(tuple(take_held(record, each, record.num_tokens))))

    def settle(self, worker: SimWorker, sequence_id: SequenceId) -> None:
        """Note what one stream has written while it stands."""
        worker.catch_up()
        record = self._by_worker.get(worker.worker_id, {}).get(sequence_id)
        num_written = worker.scheduler.num_written(sequence_id)
        if record is not None and record.holder is worker and num_written:
            self._fill(worker, record, num_written - record.num_tokens, 0)

    def forget(self, worker_id: WorkerId, sequence_id: SequenceId) -> None:
        """The request has ended."""
        self._by_worker.get(worker_id, {}).pop(sequence_id, None)
