"""Prompts of every awkward length and script, as token ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from disagg.modelfiles.chat_template import ChatMessage
from disagg.modelfiles.tokenizer import ModelTokenizer, load_tokenizer
from disagg.router.text import ModelText

BLOCK = 16  # tokens, the workers' default
CHUNK = 512
BORDERS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 100)
CHUNK_BORDERS = (CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + BLOCK - 1, CHUNK + BLOCK, CHUNK + BLOCK + 1)
LONG = (2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 1500)

_TEXT = (
    "The harbour master counted the boats again. Eleven had come home before the storm, and the twelfth, the small "
    "blue one with the patched sail, was still somewhere behind the point. He lit the second lamp, wrote the hour into "
    "the book and asked the boy to ring the bell. Each stroke went out over the water and came back a little later, "
    "thinner and from another side, as if someone over there had a bell of their own. Toward four the rain stopped. A "
    "gull sat down on the rail, looked at both of them and left. Then the boy pointed: a light, low and yellow, that "
    "rose and sank with the swell. It took an hour until they could hear voices, and in that hour neither of them said "
    "a word. "
)
_SCRIPTS = {
    "German": "Erkläre bitte in zwei Sätzen, warum der Himmel tagsüber blau und abends rötlich ist.",
    "Chinese": "请用两句话解释为什么天空在白天是蓝色的,而在傍晚是红色的。",
    "emoji": "👩‍🚀🚀🌍 → 🌕? 🤷🏽‍♀️ 🇩🇪🇯🇵 1️⃣2️⃣3️⃣",
    "Arabic": "اشرح في جملتين لماذا تبدو السماء زرقاء في النهار وحمراء عند الغروب.",
}


class Prompt(NamedTuple):
    """What it tests, and its token ids."""

    name: str
    ids: tuple[int, ...]


class Spelling:
    """Token ids from the way in which completions spell tokens."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
        assert len(self._ids) == tokenizer.vocab_size, "two tokens are spelled alike: ids cannot be told from spellings"

    def ids(self, tokens: Sequence[str]) -> tuple[int, ...]:
        return tuple(self._ids[_bytes_of(token)] for token in tokens)


def _bytes_of(token: str) -> bytes:
    escaped = token.removeprefix("bytes:")
    if escaped != token and escaped.startswith("\\x"):
        return bytes.fromhex(escaped.replace("\\x", ""))
    return token.encode()


def make_prompts(path: Path, lengths: Sequence[int]) -> list[Prompt]:
    """One prompt per length, one per script, and a conversation whose system prompt is empty."""
    tokenizer = load_tokenizer(path)
    text = tokenizer.encode(_TEXT * 12)
    # Each begins elsewhere in the text, so that most share no prefix; the last two share one on purpose.
    starts = [7 * index for index in range(len(lengths) - 1)]
    starts.append(starts[-1])
    prompts = [
        Prompt(f"{length} tokens", tuple(text[start : start + length]))
        for length, start in zip(lengths, starts, strict=True)
    ]
    assert [len(prompt.ids) for prompt in prompts] == list(lengths)
    prompts += [Prompt(name, tuple(tokenizer.encode(words))) for name, words in _SCRIPTS.items()]
    conversation = (ChatMessage("system", ""), ChatMessage("user", "Name three colours of the sea."))
    prompts.append(Prompt("empty system prompt", ModelText(tokenizer).chat_ids(conversation)))
    return prompts
