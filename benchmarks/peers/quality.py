"""How far an engine's vocabulary scores are from those of the reference on the same text.

The text is prose that every Python brings along: docstrings of its standard library, cut into pieces of equal length.
Its digest is printed, because another Python has other docstrings.
"""

import difflib
import doctest
import hashlib
import heapq
import inspect
import pickletools
import statistics
import string
import textwrap
from pathlib import Path

import msgspec
import numpy as np
import torch

from disagg.modelfiles.tokenizer import load_tokenizer

SOURCES = (difflib, doctest, statistics, textwrap, string)


class Quality(msgspec.Struct, frozen=True):
    """Against the reference, over all places. kl in nats."""

    perplexity: float
    kl: float
    top1_agreement: float


def text() -> str:
    """Several thousand words of English about programs."""
    found = [heapq.__about__, pickletools.__doc__ or ""]
    for module in SOURCES:
        found.append(inspect.getdoc(module) or "")
        members = (value for _, value in sorted(vars(module).items()) if inspect.isclass(value))
        found += [inspect.getdoc(value) or "" for value in members if value.__module__ == module.__name__]
    return "\n\n".join(found)


def pieces(model: Path, num_pieces: int, piece_tokens: int) -> list[list[int]]:
    """Token ids [num_pieces, piece_tokens] from all over the text. Raises SystemExit when it is too short."""
    ids = load_tokenizer(model).encode(text())
    stride = len(ids) // num_pieces
    if stride < piece_tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, {num_pieces} pieces of {piece_tokens} were asked for")
    return [list(ids[start : start + piece_tokens]) for start in range(0, stride * num_pieces, stride)]


def digest() -> str:
    return hashlib.sha256(text().encode()).hexdigest()[:12]


def compare(scores: Path, reference: Path, tokens: list[list[int]]) -> Quality:
    """Both files float32 [S, length, vocab]; the score at a place predicts the token after it."""
    loss = kl = agreed = 0.0
    found, wanted = np.load(scores, mmap_mode="r"), np.load(reference, mmap_mode="r")
    if found.shape != wanted.shape:
        raise ValueError(f"scores of shape {found.shape}, the reference's are {wanted.shape}")
    for piece, ids in enumerate(tokens):
        logs = torch.log_softmax(torch.from_numpy(found[piece].astype(np.float64)), -1)
        true_logs = torch.log_softmax(torch.from_numpy(wanted[piece].astype(np.float64)), -1)
        loss -= float(logs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum())
        kl += float((true_logs.exp() * (true_logs - logs)).sum())
        agreed += float((logs.argmax(-1) == true_logs.argmax(-1)).sum())
    num_places = found.shape[0] * found.shape[1]
    num_predicted = num_places - found.shape[0]
    return Quality(float(np.exp(loss / num_predicted)), kl / num_places, agreed / num_places)
