"""Changes to single scores before a token is drawn: bias, penalties on tokens so far, no end before min_tokens.

They are a pure function of parameters and token ids, so a sequence can go on on another worker. What is kept from step
to step is only the count of each token, and is made anew from the ids where it is missing.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from disagg.core.errors import InternalFault
from disagg.core.ids import SequenceId
from disagg.core.request import SamplingParams
from disagg.scheduler.engine import TokenHistory

MAX_IDLE_TALLIES = 64  # kept besides those of the running step
_FIRST_ROOM = 64


class Tally:
    """The different tokens of one sequence, and how often each is in its answer."""

    __slots__ = ("_counts", "_places", "_token_ids", "attempt", "num_answer_tokens")

    def __init__(self, history: TokenHistory) -> None:
        self.attempt = history.attempt
        self.num_answer_tokens = len(history.answer_ids)
        token_ids, counts = np.unique(np.array(history.answer_ids, np.int64), return_counts=True)
        only_read = np.setdiff1d(np.array(history.prompt_ids, np.int64), token_ids)
        self._token_ids = np.concatenate([token_ids, only_read])
        self._counts = np.concatenate([counts, np.zeros(len(only_read))]).astype(np.float32)
        self._places = {token_id: place for place, token_id in enumerate(self._token_ids.tolist())}

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Tokens of prompt and answer, each once."""
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of them is in the answer."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """The answer's next token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            room = max(_FIRST_ROOM, place)
            self._token_ids = np.concatenate([self._token_ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._token_ids[place] = token_id
        self._counts[place] += 1.0
        self.num_answer_tokens += 1

    def check_invariants(self) -> None:
        """Counts add up to the answer's length, and every token has one place."""
        if self.counts.sum() != self.num_answer_tokens or self.token_ids.tolist() != list(self._places):
            raise InternalFault(f"{self.counts.sum():g} tokens counted in an answer of {self.num_answer_tokens}")


class TallyTable:
    """Tallies of the sequences in flight: one more token is counted, anything else is counted anew."""

    def __init__(self) -> None:
        self._tallies: dict[SequenceId, Tally] = {}  # least lately used first

    def tally(self, sequence_id: SequenceId, history: TokenHistory) -> Tally:
        """The counts of these tokens."""
        tally = self._tallies.pop(sequence_id, None)
        num_new = -1 if tally is None else len(history.answer_ids) - tally.num_answer_tokens
        if tally is None or tally.attempt != history.attempt or not 0 <= num_new <= 1:
            tally = Tally(history)
        elif num_new:
            tally.add(history.answer_ids[-1])
        self._tallies[sequence_id] = tally
        return tally

    def forget(self, num_used: int) -> None:
        """Drop what has not been used for long; num_used tallies were in the step just now."""
        while len(self._tallies) > num_used + MAX_IDLE_TALLIES:
            self._tallies.pop(next(iter(self._tallies)))

    def check_invariants(self) -> None:
        for tally in self._tallies.values():
            tally.check_invariants()


class Edit(NamedTuple):
    """What one row wants changed."""

    params: SamplingParams
    output_position: int
    tally: Tally | None  # there if the parameters have a penalty


def is_edited(params: SamplingParams, output_position: int) -> bool:
    """Whether a row's scores are to be changed at all."""
    is_held_open = output_position < params.min_tokens and bool(params.stop_token_ids)
    return bool(params.logit_bias) or params.has_penalty or is_held_open


def edit(scores: Tensor, edits: Sequence[Edit]) -> None:
    """Change scores [R, vocab_size] (float32, any device), one row for each edit. Ids past the vocabulary are void."""
    _add_bias(scores, edits)
    _penalise(scores, edits)
    _mask_stops(scores, edits)


class _Entries(NamedTuple):
    """Single scores of several rows."""

    rows: npt.NDArray[np.int64]  # [E]
    token_ids: npt.NDArray[np.int64]  # [E]
    kept: npt.NDArray[np.bool_]  # [E before those past the vocabulary were dropped]

    def read(self, scores: Tensor) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = scores[self._index()].cpu().numpy()
        return values

    def write(self, scores: Tensor, values: npt.NDArray[np.float32]) -> None:
        scores[self._index()] = torch.from_numpy(values).to(scores.device)

    def _index(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.rows), torch.from_numpy(self.token_ids)


def _entries(scores: Tensor, ids_of_rows: Iterable[tuple[int, npt.NDArray[np.int64]]]) -> _Entries | None:
    listed = [(row, ids) for row, ids in ids_of_rows if len(ids)]
    if not listed:
        return None
    rows = np.repeat([row for row, _ in listed], [len(ids) for _, ids in listed])
    token_ids = np.concatenate([ids for _, ids in listed])
    kept = (token_ids >= 0) & (token_ids < scores.shape[1])
    return _Entries(rows[kept], token_ids[kept], kept)


def _add_bias(scores: Tensor, edits: Sequence[Edit]) -> None:
    biases = [(row, edit.params.logit_bias) for row, edit in enumerate(edits) if edit.params.logit_bias]
    entries = _entries(scores, ((row, np.array([token_id for token_id, _ in bias])) for row, bias in biases))
    if entries is not None:
        added = np.array([value for _, bias in biases for _, value in bias], np.float32)
        entries.write(scores, entries.read(scores) + added[entries.kept])


def _penalise(scores: Tensor, edits: Sequence[Edit]) -> None:
    tallies = {row: edit.tally for row, edit in enumerate(edits) if edit.tally is not None}
    entries = _entries(scores, ((row, tally.token_ids) for row, tally in tallies.items()))
    if entries is None:
        return
    counts = np.concatenate([tally.counts for tally in tallies.values()])[entries.kept]
    params = (edit.params for edit in edits)
    columns = [(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in params]
    repetition, frequency, presence = np.array(columns, np.float32).T[:, entries.rows]
    values = entries.read(scores)
    values = np.where(values > 0.0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0.0)
    entries.write(scores, values)


def _mask_stops(scores: Tensor, edits: Sequence[Edit]) -> None:
    masked = (
        (row, np.array(edit.params.stop_token_ids, np.int64))
        for row, edit in enumerate(edits)
        if edit.output_position < edit.params.min_tokens
    )
    entries = _entries(scores, masked)
    if entries is not None:
        entries.write(scores, np.full(len(entries.rows), -np.inf, np.float32))
