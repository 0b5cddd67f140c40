"""Text to token ids and token ids to bytes, from a Hugging Face folder or a GGUF file. Needs no torch."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from disagg.core.errors import ModelLoadError
from disagg.modelfiles.sentencepiece import WORD_START
from disagg.modelfiles.vocabulary import Vocabulary, read_vocabulary

# Splitting rules of the models themselves, as published with them.
_GPT2_SPLIT: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT: Final = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SPLITS: Final[Mapping[str, str]] = {
    "gpt-2": _GPT2_SPLIT,
    "default": _GPT2_SPLIT,
    "smollm": _GPT2_SPLIT,  # after cutting out single digits
    "qwen2": _QWEN2_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
}

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ModelTokenizer:
    """One model's tokenizer. Immutable; every method may be called from any thread."""

    def __init__(self, backend: Tokenizer, vocabulary: Vocabulary) -> None:
        self.backend = backend
        self.vocabulary = vocabulary
        self.digest = vocabulary.digest
        self.special_ids = frozenset(token.id for token in vocabulary.added if token.special)
        self.byte_table = _bytes_of_tokens(backend, vocabulary)  # by id; None where a text is more than they

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. A model's output may be padded beyond it."""
        return len(self.vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer, ascending."""
        return self.vocabulary.eos_ids

    @property
    def chat_template(self) -> str | None:
        """Source of the model's own chat template, or None."""
        return self.vocabulary.chat_templates.get("default")

    @property
    def is_bytewise(self) -> bool:
        """Whether a text is the plain concatenation of its tokens' bytes."""
        return self.byte_table is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens spelled out in the text are taken as such."""
        # Of the three ways to encode, this one lets other threads run meanwhile and records no offsets.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, specials spelled out; b"" for an id without a token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        if self.byte_table is not None:
            return self.byte_table[token_id]
        return self.vocabulary.tokens[token_id].encode()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of an answer: nothing is stripped from its start. Broken UTF-8 becomes U+FFFD."""
        if self.byte_table is None:
            text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            return text
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(id_) for id_ in token_ids if id_ not in hidden).decode(errors="replace")

    @cached_property
    def named_tokens(self) -> Mapping[str, str]:
        """Texts of bos_token, eos_token, … as chat templates ask for them; "" where the model has none."""
        return {"bos_token": "", "eos_token": "", **self.vocabulary.named_tokens}

    def check_invariants(self) -> None:
        """Raises AssertionError when ids, tokens and bytes do not fit together."""
        assert self.byte_table is None or len(self.byte_table) == self.vocab_size
        assert all(0 <= id_ < self.vocab_size for id_ in (*self.eos_ids, *self.special_ids))


def load_tokenizer(path: Path, vocabulary: Vocabulary | None = None) -> ModelTokenizer:
    """Tokenizer of a Hugging Face folder or GGUF file. Raises ModelLoadError with one plain line.

    vocabulary: what read_vocabulary(path) gave, where that has been done.
    """
    vocabulary = vocabulary or read_vocabulary(path)
    backend = _from_folder(path) if path.is_dir() else _from_tables(path, vocabulary)
    beyond = [id_ for id_ in vocabulary.eos_ids if id_ >= len(vocabulary.tokens)]
    if beyond:
        raise ModelLoadError(
            f"{path} names end-of-text id {beyond[0]}, but its vocabulary has {len(vocabulary.tokens)} tokens; "
            "its configuration and its tokenizer are of different models"
        )
    return ModelTokenizer(backend, vocabulary)


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(
            f"{file} is not a tokenizer that tokenizers {tokenizers.__version__} reads: {error}"
        ) from error
    # Limits stored by a training script are no part of the model.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _from_tables(path: Path, vocabulary: Vocabulary) -> Tokenizer:
    """Rebuild a BPE tokenizer from the tables in a GGUF file."""
    build = _sentencepiece if vocabulary.is_sentencepiece else _byte_level
    backend = build(path, vocabulary)
    for token in vocabulary.added:
        added = tokenizers.AddedToken(token.content, special=token.special, normalized=False)
        (backend.add_special_tokens if token.special else backend.add_tokens)([added])
    if vocabulary.adds_bos and vocabulary.bos_id is not None:
        bos = vocabulary.tokens[vocabulary.bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=None, special_tokens=[(bos, vocabulary.bos_id)]
        )
    return backend


def _byte_level(path: Path, vocabulary: Vocabulary) -> Tokenizer:
    pre = vocabulary.pre_tokenizer
    if pre not in _SPLITS:
        raise ModelLoadError(
            f"{path} splits text by the rule {pre!r}; supported are {', '.join(sorted(_SPLITS))}: "
            "use the model's Hugging Face folder instead"
        )
    backend = Tokenizer(_bpe(path, vocabulary, ignore_merges=pre == "llama-bpe"))
    splits: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")]
    if pre == "smollm":
        splits.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(path: Path, vocabulary: Vocabulary) -> Tokenizer:
    unknown = vocabulary.named_tokens.get("unk_token")
    backend = Tokenizer(_bpe(path, vocabulary, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    spell_space = normalizers.Replace(" ", WORD_START)
    if vocabulary.adds_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_START), spell_space])
    else:
        backend.normalizer = spell_space
    backend.decoder = decoders.Sequence([decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _bpe(path: Path, vocabulary: Vocabulary, **options: bool | str | None) -> models.BPE:
    ids = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    try:
        return models.BPE(vocab=ids, merges=list(vocabulary.merges), **options)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path} has merges that do not fit its tokens: {error}") from error


# Bytes of tokens


class _Pattern(msgspec.Struct):
    String: str = ""


class _Decoder(msgspec.Struct):
    type: str
    decoders: list["_Decoder"] = []
    pattern: _Pattern | None = None
    content: str = ""


def _bytes_of_tokens(backend: Tokenizer, vocabulary: Vocabulary) -> list[bytes] | None:
    """Bytes by id where this tokenizer's decoder is a concatenation, else None."""
    steps = _decoder_steps(backend)
    kinds = {step.type for step in steps}
    if "ByteLevel" in kinds:
        spell = _byte_level_bytes
    elif kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and _replaces_spaces(steps):
        spell = _sentencepiece_bytes
    else:
        return None
    table = [spell(token) for token in vocabulary.tokens]
    for token in vocabulary.added:
        table[token.id] = token.content.encode()
    return table


def _decoder_steps(backend: Tokenizer) -> list[_Decoder]:
    if backend.decoder is None:
        return []
    state = backend.decoder.__getstate__()
    decoder = msgspec.json.decode(state, type=_Decoder)
    return decoder.decoders if decoder.type == "Sequence" else [decoder]


def _replaces_spaces(steps: Sequence[_Decoder]) -> bool:
    replaced = [(step.pattern.String if step.pattern else "", step.content) for step in steps if step.type == "Replace"]
    has_metaspace = any(step.type == "Metaspace" for step in steps)
    return all(pair == (WORD_START, " ") for pair in replaced) and (bool(replaced) or has_metaspace)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: the printable Latin-1 ones stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # not spelled in the byte alphabet: literal text
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(WORD_START, " ").encode()
