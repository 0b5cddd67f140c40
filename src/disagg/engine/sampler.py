"""Choosing the next token from vocabulary scores.

    edit          single scores of the rows that want it (`penalties`)
    likeliest     answers greedy rows; the others look on, all rows of a kind together:
    first cut     top_k, else top_p, else min_p, else the tokens that noise can bring to the top: from the whole
                  vocabulary to a list (`scans`)
    second cut    top_p and min_p within the list
    race          argmax over the list of score / temperature + noise (`noise`)

That is the Gumbel-max trick: the winner of the race has the distribution of softmax over the kept tokens. Rows are
independent bit for bit: sums that pick tokens are of integers, so that it does not matter how they are added up.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from disagg.core.request import SamplingParams, TokenLogprobs
from disagg.engine.noise import Floats, Ids, Keys, gumbel_noise, noise_keys
from disagg.engine.penalties import Edit, Tally, edit, is_edited
from disagg.engine.scans import Places, Rows, Scan, scan_of

TILE_ENTRIES: Final = 1 << 16  # scores looked at in one go on a CPU: what a core's cache holds
DEVICE_TILE_ENTRIES: Final = 1 << 24
_WHOLE: Final = 2.0**60  # probability 1 in units of mass: sums of up to 4 of it fit into 64 bits
_ROUNDED: Final = 1.0 - 1e-6  # floors of a first cut are this much too low; the second cut is exact
_LIKELIEST: Final = 2.0**44  # weight of the likeliest token of a top_k list, which may hold 2**18 tokens


class SampleRequest(NamedTuple):
    """What one row wants to draw, and where in its answer."""

    params: SamplingParams
    choice: int
    output_position: int
    tally: Tally | None = None  # tokens so far, where the parameters have a penalty


class Sample(NamedTuple):
    """The token drawn for one row."""

    token_id: int
    logprobs: TokenLogprobs | None


def sample(logits: Tensor, requests: Sequence[SampleRequest]) -> list[Sample]:
    """One token per row of logits [S, vocab_size] (float32). Greedy ties go to the lowest token id."""
    if not requests:
        return []
    edited = [row for row, request in enumerate(requests) if is_edited(request.params, request.output_position)]
    if len(edited) < len(requests):
        token_ids = _choose(logits, requests)
    else:
        token_ids = np.empty(len(requests), np.int64)
    if edited:
        scores = logits[edited]  # a copy
        wishes = [requests[row] for row in edited]
        edit(scores, [Edit(wish.params, wish.output_position, wish.tally) for wish in wishes])
        token_ids[edited] = _choose(scores, wishes)
    chosen = token_ids.tolist()
    logprobs = _logprobs(logits, _wanted(requests), token_ids)
    return [Sample(token_id, logprobs.get(row)) for row, token_id in enumerate(chosen)]


def _choose(scores: Tensor, requests: Sequence[SampleRequest]) -> Ids:
    scan = scan_of(scores)
    token_ids = scan.likeliest()
    drawn = [row for row, request in enumerate(requests) if not request.params.is_greedy]
    if not drawn:
        return token_ids
    draws = _draws([requests[row] for row in drawn], np.array(drawn), token_ids, scores.shape[1])
    for kind in np.unique(draws.kinds).tolist():
        of_kind = draws.take(np.flatnonzero(draws.kinds == kind))
        for tile in _tiles(len(of_kind.rows), scores):
            part = of_kind.take(tile)
            with np.errstate(divide="ignore", invalid="ignore"):  # min_p may be 0, and scores infinite or no numbers
                token_ids[part.rows] = _race(_cut(scan, part, kind, scores.shape[1]), part)
    return token_ids


_TOP_K, _TOP_P, _MIN_P, _UNCUT = range(4)  # how a row's vocabulary becomes a list


class _Draws(NamedTuple):
    """What rows want that are not greedy; arrays with one entry per row."""

    rows: Ids
    kinds: Ids
    temperatures: Floats
    top_k: Ids
    top_p: Floats
    min_p: Floats
    keys: Keys
    likeliest: Ids

    def take(self, index: Rows) -> "_Draws":
        return _Draws(*(column[index] for column in self))  # type: ignore[arg-type]  # each keeps its type


def _draws(requests: Sequence[SampleRequest], rows: Ids, likeliest: Ids, vocab_size: int) -> _Draws:
    params = [request.params for request in requests]
    seeds, choices = (each.seed for each in params), (request.choice for request in requests)
    top_k = np.array([each.top_k for each in params])
    top_p = np.array([each.top_p for each in params])
    min_p = np.array([each.min_p for each in params])
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    return _Draws(
        rows=rows,
        kinds=np.where(has_top_k, _TOP_K, np.where(top_p < 1.0, _TOP_P, np.where(min_p > 0.0, _MIN_P, _UNCUT))),
        temperatures=np.array([each.temperature for each in params]),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        keys=noise_keys(seeds, choices, (request.output_position for request in requests)),
        likeliest=likeliest[rows],
    )


def _tiles(num_rows: int, scores: Tensor) -> list[slice]:
    entries = TILE_ENTRIES if scores.device.type == "cpu" else DEVICE_TILE_ENTRIES
    step = max(1, entries // scores.shape[1])
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def _run(rows: Ids) -> Rows:
    """A slice where the rows follow each other: it copies nothing."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


class _Lists(NamedTuple):
    """One list of tokens for each row, in order of their ids, filled up with nothing to the longest."""

    token_ids: Ids  # [R, K]
    scaled: Floats  # [R, K] score / temperature; -inf where there is nothing
    probabilities: Floats  # [R, K] 0 where there is nothing or the scan gave none
    is_kept: npt.NDArray[np.bool_]  # [R, K]


def _lists(places: Places, temperatures: Floats) -> _Lists:
    """places of R rows, temperatures [R]."""
    counts = np.bincount(places.rows, minlength=len(temperatures))
    scaled = places.scores / temperatures[places.rows]
    probabilities = np.zeros(len(scaled)) if places.probabilities is None else places.probabilities
    if len(scaled) and counts.min() == counts.max():
        shape = (len(counts), int(counts[0]))
        is_kept = np.ones(shape, np.bool_)
        return _Lists(places.token_ids.reshape(shape), scaled.reshape(shape), probabilities.reshape(shape), is_kept)
    places_in_row = np.arange(len(places.rows)) - (np.cumsum(counts) - counts)[places.rows]
    shape = (len(counts), max(int(counts.max()), 1))
    lists = _Lists(np.zeros(shape, np.int64), np.full(shape, -np.inf), np.zeros(shape), np.zeros(shape, np.bool_))
    index = (places.rows, places_in_row)
    lists.token_ids[index] = places.token_ids
    lists.scaled[index] = scaled
    lists.probabilities[index] = probabilities
    lists.is_kept[index] = True
    return lists


def _cut(scan: Scan, draws: _Draws, kind: int, vocab_size: int) -> _Lists:
    """The tokens that each row draws from; of an uncut row those that can win."""
    rows, temperatures = _run(draws.rows), draws.temperatures
    if kind == _UNCUT:
        return _lists(scan.contenders(rows, temperatures, draws.keys, draws.likeliest), temperatures)
    if kind == _TOP_P:
        # Tokens below weigh less than 1 - top_p together, so the nucleus lies among the others.
        floors = (1.0 - draws.top_p) * (_ROUNDED / vocab_size)
        lists = _lists(scan.likely(rows, temperatures, floors), temperatures)
        is_kept = nucleus((lists.probabilities * _WHOLE).astype(np.int64), np.full(len(floors), _WHOLE), draws.top_p)
        lists = lists._replace(is_kept=lists.is_kept & is_kept)
    elif kind == _TOP_K:
        lists = _lists(scan.not_below(rows, scan.kth_largest(rows, draws.top_k)), temperatures)
        if (draws.top_p < 1.0).any():
            masses = (np.exp(_below_best(lists)) * _LIKELIEST).astype(np.int64)
            is_kept = nucleus(masses, masses.sum(axis=1).astype(np.float64), draws.top_p)
            lists = lists._replace(is_kept=lists.is_kept & is_kept)
    else:
        best = scan.kth_largest(rows, np.ones(len(temperatures), np.int64))
        floors = best + temperatures * np.log(draws.min_p)
        floors -= (1.0 - _ROUNDED) * (np.abs(best) + np.abs(floors))
        lists = _lists(scan.not_below(rows, floors), temperatures)
    if draws.min_p.any():
        lists = lists._replace(is_kept=lists.is_kept & (_below_best(lists) >= np.log(draws.min_p)[:, None]))
    return lists


def _below_best(lists: _Lists) -> Floats:
    below: Floats = lists.scaled - lists.scaled.max(axis=1, keepdims=True)
    return below


def nucleus(masses: Ids, wholes: Floats, top_p: Floats) -> npt.NDArray[np.bool_]:
    """Which of masses [R, K] make up the smallest set of largest ones with at least top_p of the whole; at least one.

    Of equal ones the first are taken. wholes [R], top_p [R]; all are taken where top_p is 1 or more.
    """
    ordered = np.sort(masses, axis=1)[:, ::-1]
    before = (np.cumsum(ordered, axis=1) - ordered).astype(np.float64)
    num_kept = np.maximum((before < (wholes * top_p)[:, None]).sum(axis=1), 1)
    least = ordered[np.arange(len(masses)), num_kept - 1][:, None]
    is_above, is_least = masses > least, masses == least
    num_spare = num_kept - is_above.sum(axis=1)
    is_kept: npt.NDArray[np.bool_] = is_above | (is_least & (np.cumsum(is_least, axis=1) <= num_spare[:, None]))
    return is_kept | (top_p >= 1.0)[:, None]


def _race(lists: _Lists, draws: _Draws) -> Ids:
    """The winner of each row [R]; a row of scores that are no numbers gives its likeliest token."""
    index = np.nonzero(lists.is_kept)
    token_ids = lists.token_ids[index]
    noisy = np.full(lists.scaled.shape, -np.inf)
    noisy[index] = lists.scaled[index] + gumbel_noise(draws.keys[index[0]], token_ids)
    winners = lists.token_ids[np.arange(len(noisy)), noisy.argmax(axis=1)]
    return np.where(noisy.max(axis=1) > -np.inf, winners, draws.likeliest)


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Of one known token per row of logits [S, vocab_size], and of the num_top likeliest at its place."""
    asked = np.array([(row, num_top) for row in range(len(token_ids))], np.int64).reshape(-1, 2)
    return tuple(_logprobs(logits, asked, np.array(token_ids, np.int64)).values())


def _wanted(requests: Sequence[SampleRequest]) -> Ids:
    """(row, how many of the likeliest) of the rows that want log probabilities."""
    wanted = [(row, each.params.num_logprobs) for row, each in enumerate(requests)]
    return np.array([(row, number) for row, number in wanted if number is not None], np.int64).reshape(-1, 2)


def _logprobs(logits: Tensor, asked: Ids, token_ids: Ids) -> dict[int, TokenLogprobs]:
    """Natural logs of the softmax of unchanged scores, likeliest first, ties to lower ids; by row, in order."""
    found: dict[int, TokenLogprobs] = {}
    for tile in _tiles(len(asked), logits):
        rows, numbers = asked[tile].T
        logs = torch.log_softmax(logits[_run(rows)].double(), dim=-1)
        chosen = logs[torch.arange(len(rows)), torch.from_numpy(token_ids[rows])].tolist()
        top = _top(scan_of(logs), np.minimum(numbers, logits.shape[1]))
        found |= {
            row: TokenLogprobs(*pair) for row, pair in zip(rows.tolist(), zip(chosen, top, strict=True), strict=True)
        }
    return found


def _top(scan: Scan, numbers: Ids) -> list[tuple[tuple[int, float], ...]]:
    """The numbers[r] largest entries of each row with their token ids."""
    if not numbers.any():
        return [()] * len(numbers)
    every = slice(0, len(numbers))
    lists = _lists(scan.not_below(every, scan.kth_largest(every, np.maximum(numbers, 1))), np.ones(len(numbers)))
    order = np.argsort(-lists.scaled, axis=1, kind="stable")
    token_ids = np.take_along_axis(lists.token_ids, order, axis=1).tolist()
    values = np.take_along_axis(lists.scaled, order, axis=1).tolist()
    counts = np.minimum(lists.is_kept.sum(axis=1), numbers).tolist()
    return [
        tuple(zip(ids[:count], logs[:count], strict=True))
        for ids, logs, count in zip(token_ids, values, counts, strict=True)
    ]
