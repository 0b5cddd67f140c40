"""Tokens that the router does not need to hear of yet, at large fidelity: when each came is noted, and that is all."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from disagg.core.ids import RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken
from disagg.protocol.messages import EmitTokens, WorkerToRouter
from disagg.sim.events import EventHeap
from disagg.sim.records import OpenRecord, RecordTable, take_held
from disagg.sim.worker import SimWorker


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

    def take(self, worker: SimWorker, message: EmitTokens) -> None:
        """What one step gave, now."""
        seen_s = self._heap.now_s + self._message_s
        holding = self._by_worker.setdefault(worker.worker_id, {})
        passed_on: list[EmittedToken] = []
        open_records, note_token = self._open, self._records.note_token
        for token in message.tokens:
            sequence_id, position = token.sequence_id, token.position
            record = open_records.get(sequence_id.request_id)
            if record is None or position != record.num_tokens:
                continue  # a repeat, or of a request that has ended
            note_token(record, seen_s)
            if record.num_tokens == record.request.num_output_tokens:
                passed_on += take_held(record, sequence_id, position)
                passed_on.append(token)
                holding.pop(sequence_id, None)
            elif position == 0:
                passed_on.append(token)
            else:
                if not record.num_held:
                    holding[sequence_id] = record
                record.num_held += 1
        if passed_on or message.prompts:
            rest = EmitTokens(tuple(passed_on), message.prompts)
            self._heap.after(self._message_s, self._hear, worker, rest)

    def take_steps(self, worker: SimWorker, message: EmitTokens, ends_s: Sequence[float]) -> None:
        """What several steps gave that ended then: of each answer one token for each step, none its first or last."""
        seen_s = [end_s + self._message_s for end_s in ends_s]
        gaps_s = [after_s - before_s for before_s, after_s in pairwise(seen_s)]
        most_s = max(gaps_s, default=0.0)
        holding = self._by_worker.setdefault(worker.worker_id, {})
        num_answers = 0
        for token in message.tokens[:: len(ends_s)]:
            record = self._open.get(token.sequence_id.request_id)
            if record is None or token.position != record.num_tokens:
                continue
            if not record.num_held:
                holding[token.sequence_id] = record
            record.num_held += len(ends_s)
            self._records.note_token(record, seen_s[0])
            record.num_tokens += len(gaps_s)
            record.last_s = seen_s[-1]
            record.max_gap_s = max(record.max_gap_s, most_s)
            num_answers += 1
        for gap_s in gaps_s if num_answers else ():
            self._records.gaps.add(gap_s, num_answers)

    def release(self, worker: SimWorker, sequence_id: SequenceId | None = None) -> None:
        """Hand the router what was kept back, of one sequence or of all that this worker writes."""
        worker.catch_up()
        holding = self._by_worker.get(worker.worker_id, {})
        for each in [sequence_id] if sequence_id is not None else list(holding):
            record = holding.pop(each, None)
            if record is not None and record.num_held:
                self._hear(worker, EmitTokens(tuple(take_held(record, each, record.num_tokens))))

    def forget(self, worker_id: WorkerId, sequence_id: SequenceId) -> None:
        """The request has ended."""
        self._by_worker.get(worker_id, {}).pop(sequence_id, None)
