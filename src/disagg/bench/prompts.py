"""Runs of a workload into what a server is sent: words or token ids. Equal runs give equal beginnings."""

import random
from collections.abc import Sequence
from pathlib import Path

from disagg.bench.workload import ANSWER_LABEL, Run
from disagg.core.errors import ConfigurationError
from disagg.modelfiles.fetch import resolve_model
from disagg.modelfiles.tokenizer import load_tokenizer

# Short and plain: nearly every vocabulary has a token for each, with the blank before it.
WORDS = tuple(Path(__file__).with_name("words.txt").read_text(encoding="ascii").split())
MIN_TOKENS = 512  # a vocabulary's plain words


class PromptSource:
    """Draws a run's tokens by seed and label. ids: from these token ids; none: words."""

    def __init__(self, seed: int, ids: Sequence[int] = ()) -> None:
        self._seed = seed
        self._ids = tuple(ids)

    def text(self, runs: tuple[Run, ...], answers: Sequence[str] = ()) -> str:
        """About one token a word. answers: what earlier turns were told, in place of the answers' runs."""
        parts: list[str] = []
        told = iter(answers)
        for run in runs:
            answer = next(told, None) if run.label == ANSWER_LABEL else None
            parts.append(answer if answer is not None else " ".join(self._rng(run).choices(WORDS, k=run.num_tokens)))
        return "\n".join(parts)

    def token_ids(self, runs: tuple[Run, ...]) -> list[int]:
        """Exactly as many as the runs say."""
        return [token for run in runs for token in self._rng(run).choices(self._ids, k=run.num_tokens)]

    def messages(self, runs: tuple[Run, ...], answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """The same as a conversation: answers are the assistant's, all between them the user's."""
        told = iter(answers)
        found: list[dict[str, str]] = []
        asked: list[Run] = []
        for run in runs:
            if run.label != ANSWER_LABEL:
                asked.append(run)
                continue
            found.append({"role": "user", "content": self.text(tuple(asked))})
            found.append({"role": "assistant", "content": next(told, None) or self.text((run,))})
            asked = []
        return [*found, {"role": "user", "content": self.text(tuple(asked))}]

    def _rng(self, run: Run) -> random.Random:
        return random.Random(f"{self._seed}/{run.label}")


def plain_ids(model: str) -> tuple[int, ...]:
    """Ids of tokens that are a blank and lower-case letters: no two of them merge. Raises ConfigurationError."""
    tokenizer = load_tokenizer(resolve_model(model, report=print))
    pieces = ((index, tokenizer.token_bytes(index)) for index in range(tokenizer.vocab_size))
    found = tuple(i for i, piece in pieces if piece[:1] == b" " and piece[1:].isalpha() and piece[1:].islower())
    if len(found) < MIN_TOKENS:
        raise ConfigurationError(f"{model} has {len(found)} plain words in its vocabulary, token ids need {MIN_TOKENS}")
    return found
