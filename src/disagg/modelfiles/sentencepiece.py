"""SentencePiece's BPE, as Llama 2 and Mistral files carry it: pieces with scores instead of a list of merges."""

from collections.abc import Sequence
from typing import Final

WORD_START: Final = "\N{LOWER ONE EIGHTH BLOCK}"  # a space is spelled so


def merges_of_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges in the order in which SentencePiece applies them: the piece of the highest score first.

    A piece can be made of any two pieces that spell it, so each way is a merge; ways of one piece go by the ids of
    their halves. `tokens` holds "" where an id can never be made by merging (specials, single bytes).
    """
    ids = {token: id_ for id_, token in enumerate(tokens) if token}
    ways: list[tuple[float, int, int, int]] = []  # (-score, piece, left, right): sorts as wanted
    for token, piece in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ways.append((-scores[piece], piece, left, right))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(ways)]
