"""What has to look at every token of the vocabulary, and finds the few that matter.

On a CPU numpy does it, a few times faster than torch and without its work per call; elsewhere torch, on the device.
Both give the same places. A row's places never depend on other rows.
"""

from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from disagg.engine.noise import Floats, Ids, Keys, complements, gumbel_noise, token_steps, torch_noise

Rows = slice | Ids  # which rows of the scores
_MARGIN: Final = 1.001  # far more than float32 loses in a contender's weight
_LEAST_SCORE: Final = -69.0  # of a contender's weight exp(score): below it float32 ends


class Places(NamedTuple):
    """Some tokens of some rows, ordered by row, then by token id."""

    rows: Ids  # [C] counted from the first row that was asked for
    token_ids: Ids  # [C]
    scores: Floats  # [C] as they were scanned
    probabilities: Floats | None = None  # [C] by `likely` only


class Scan(Protocol):
    """Looks through scores [S, vocab_size]. `rows` names R of them; other arguments have an entry for each of the R."""

    def likeliest(self) -> Ids:
        """The token with the highest score of each row [S]; ties go to the lowest id."""

    def kth_largest(self, rows: Rows, counts: Ids) -> Floats:
        """The score that counts[r] tokens reach, counts in 1 .. vocab_size."""

    def not_below(self, rows: Rows, floors: Floats) -> Places:
        """Tokens whose score is at least floors[r]."""

    def likely(self, rows: Rows, temperatures: Floats, floors: Floats) -> Places:
        """Tokens whose probability, softmax(score / temperature), is at least floors[r]."""

    def contenders(self, rows: Rows, temperatures: Floats, keys: Keys, likeliest: Ids) -> Places:
        """Tokens that include the one with the highest score / temperature + noise."""


def scan_of(scores: Tensor) -> Scan:
    """scores [S, vocab_size], float32 or float64."""
    return HostScan(scores) if scores.device.type == "cpu" else DeviceScan(scores)


class HostScan:
    """Scores in this process's memory."""

    def __init__(self, scores: Tensor) -> None:
        self._scores: npt.NDArray[np.floating] = scores.numpy()

    def likeliest(self) -> Ids:
        token_ids: Ids = self._scores.argmax(axis=1)
        return token_ids

    def kth_largest(self, rows: Rows, counts: Ids) -> Floats:
        scores = self._scores[rows]
        places = scores.shape[1] - counts
        ordered = np.partition(scores, np.unique(places), axis=1)
        kth: Floats = ordered[np.arange(len(counts)), places].astype(np.float64)
        return kth

    def not_below(self, rows: Rows, floors: Floats) -> Places:
        scores = self._scores[rows]
        return _places(scores, scores >= floors.astype(scores.dtype)[:, None])

    def likely(self, rows: Rows, temperatures: Floats, floors: Floats) -> Places:
        scores = self._scores[rows]
        scaled = scores.astype(np.float64)
        scaled /= temperatures[:, None]
        probabilities: Floats = torch.softmax(torch.from_numpy(scaled), dim=-1).numpy()
        places = _places(scores, probabilities >= floors[:, None])
        return places._replace(probabilities=probabilities[places.rows, places.token_ids])

    def contenders(self, rows: Rows, temperatures: Floats, keys: Keys, likeliest: Ids) -> Places:
        """The token with the highest noisy score is the one with the least -log(u) / w, w = exp(score / temperature).

        (1 - u) / w is never more than that, and cheap. So a token whose (1 - u) / w exceeds the -log(u) / w of any
        other one, here the one with the least (1 - u) / w, cannot win.
        """
        scores = self._scores[rows]
        order = np.arange(len(keys))
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # scores may be infinite
            weights = np.subtract(scores, scores[order, likeliest][:, None], dtype=np.float32)
            weights *= (1.0 / temperatures).astype(np.float32)[:, None]
            np.maximum(weights, _LEAST_SCORE, out=weights)
            np.exp(weights, out=weights)
            ratios = complements(keys, _token_steps(scores.shape[1]))
            ratios /= weights
            rivals = ratios.argmin(axis=1)
            waits = np.exp(-gumbel_noise(keys, rivals)) / weights[order, rivals]  # -log(u) / w
            limits = (waits * (_MARGIN * 2.0**32)).astype(np.float32)
        return _places(scores, ratios <= limits[:, None])


def _places(scores: npt.NDArray[np.floating], is_wanted: npt.NDArray[np.bool_]) -> Places:
    flat = np.flatnonzero(is_wanted)
    rows, token_ids = np.divmod(flat, scores.shape[1]) if len(scores) > 1 else (np.zeros_like(flat), flat)
    return Places(rows, token_ids, scores[rows, token_ids].astype(np.float64))


@lru_cache(maxsize=2)
def _token_steps(vocab_size: int) -> Keys:
    return token_steps(vocab_size)


class DeviceScan:
    """Scores on a device; only places come back."""

    def __init__(self, scores: Tensor) -> None:
        self._scores = scores

    def likeliest(self) -> Ids:
        # Not argmax: which of two equal scores it finds is not promised.
        last = self._scores.shape[1] - 1
        token_ids = torch.arange(last + 1, device=self._scores.device)
        is_best = self._scores == self._scores.amax(dim=1, keepdim=True)
        return _host_ids(torch.where(is_best, token_ids, last).amin(dim=1))

    def kth_largest(self, rows: Rows, counts: Ids) -> Floats:
        largest = self._rows(rows).topk(int(counts.max()), dim=1).values
        kth: Floats = largest.gather(1, self._tensor(counts - 1)[:, None])[:, 0].double().cpu().numpy()
        return kth

    def not_below(self, rows: Rows, floors: Floats) -> Places:
        scores = self._rows(rows)
        return self._places(scores, scores >= self._tensor(floors).to(scores.dtype)[:, None])

    def likely(self, rows: Rows, temperatures: Floats, floors: Floats) -> Places:
        scores = self._rows(rows)
        probabilities = torch.softmax(scores.double() / self._tensor(temperatures)[:, None], dim=-1)
        return self._places(scores, probabilities >= self._tensor(floors)[:, None], probabilities)

    def contenders(self, rows: Rows, temperatures: Floats, keys: Keys, likeliest: Ids) -> Places:
        scores = self._rows(rows)
        token_ids = torch.arange(scores.shape[1], device=scores.device)
        noisy = scores.double() / self._tensor(temperatures)[:, None]
        noisy += torch_noise(self._tensor(keys.view(np.int64))[:, None], token_ids)
        return self._places(scores, noisy == noisy.amax(dim=1, keepdim=True))

    def _rows(self, rows: Rows) -> Tensor:
        return self._scores[rows] if isinstance(rows, slice) else self._scores[self._tensor(rows)]

    def _tensor(self, values: Ids | Floats) -> Tensor:
        return torch.from_numpy(values).to(self._scores.device)

    def _places(self, scores: Tensor, is_wanted: Tensor, probabilities: Tensor | None = None) -> Places:
        rows, token_ids = is_wanted.nonzero(as_tuple=True)
        found: Floats | None = None if probabilities is None else probabilities[rows, token_ids].cpu().numpy()
        values: Floats = scores[rows, token_ids].double().cpu().numpy()
        return Places(_host_ids(rows), _host_ids(token_ids), values, found)


def _host_ids(values: Tensor) -> Ids:
    ids: Ids = values.cpu().numpy()
    return ids
