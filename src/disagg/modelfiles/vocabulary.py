"""What a model's files say of its vocabulary: tokens, merges, special tokens, chat templates.

Workers need only the digest; the router builds a tokenizer from the same value.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from disagg.core.errors import ModelLoadError
from disagg.modelfiles.gguf_file import Value, is_gguf, open_gguf
from disagg.modelfiles.sentencepiece import merges_of_scores

# Special tokens that end a turn or a text in the published chat formats. Where a vocabulary marks one of them as
# special, the model was trained to stop there, whatever its configuration file forgot.
END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
)

_T = TypeVar("_T")

_GGUF_NORMAL = 1
_GGUF_UNKNOWN = 2
_GGUF_CONTROL = 3
_GGUF_USER_DEFINED = 4


class AddedToken(msgspec.Struct, frozen=True):
    """A token matched whole in the text, before any splitting. Special ones are never shown to people."""

    id: int
    content: str
    special: bool = False


class Vocabulary(msgspec.Struct, frozen=True):
    """One model's vocabulary, the same value for a GGUF file and a folder of the same model."""

    tokens: tuple[str, ...]  # by id, as spelled in the file; "" where an id has no token
    merges: tuple[tuple[str, str], ...]
    added: tuple[AddedToken, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]  # every id that ends an answer, ascending
    named_tokens: Mapping[str, str]  # "bos_token" → its text, for chat templates
    chat_templates: Mapping[str, str]  # "default" and others by name
    pre_tokenizer: str = ""  # GGUF only: name of the splitting rule
    adds_bos: bool = False  # GGUF only: encode() puts bos first
    is_sentencepiece: bool = False  # GGUF only: a space is U+2581, a byte without a token is <0x..>
    adds_space: bool = False  # GGUF only: a text is read as if a space stood before it

    @property
    def digest(self) -> str:
        """sha256 (hex) over tokens with their ids, merges, special tokens and chat templates."""
        added = sorted((token.id, token.special) for token in self.added)
        templates = sorted(self.chat_templates.items())
        parts = (self.tokens, self.merges, added, templates)
        return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a Hugging Face folder or a GGUF file. Raises ModelLoadError saying what is missing."""
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise ModelLoadError(f"{path} does not exist; give a model folder or a GGUF file")
    if not is_gguf(path):
        raise ModelLoadError(f"{path} is neither a folder nor a GGUF file; give one of the two")
    return _read_gguf(path, open_gguf(path).fields)


# Hugging Face folders


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    merges: list[str | tuple[str, str]] = []


class _TokenizerJson(msgspec.Struct):
    model: _Model
    added_tokens: list[AddedToken] = []


class _TokenText(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    bos_token: str | _TokenText | None = None
    eos_token: str | _TokenText | None = None
    unk_token: str | _TokenText | None = None
    pad_token: str | _TokenText | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _ModelConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | list[int] | None = None


def _read_json(path: Path, kind: type[_T], missing: _T | None = None) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise ModelLoadError(
            f"{path} is missing; a model folder needs {path.name}, or give a GGUF file instead"
        ) from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} is damaged or of an unknown shape: {error}") from error


def _read_folder(folder: Path) -> Vocabulary:
    tokenizer = _read_json(folder / "tokenizer.json", _TokenizerJson)
    config = _read_json(folder / "tokenizer_config.json", _TokenizerConfig, _TokenizerConfig())
    declared = [
        _read_json(folder / name, _ModelConfig, _ModelConfig()) for name in ("generation_config.json", "config.json")
    ]
    vocab = tokenizer.model.vocab
    ids = vocab if isinstance(vocab, dict) else {token: id_ for id_, (token, _) in enumerate(vocab)}
    ids = ids | {token.content: token.id for token in tokenizer.added_tokens}
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    for token, id_ in ids.items():
        tokens[id_] = token
    named = {
        name: text if isinstance(text, str) else text.content
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := getattr(config, name)) is not None
    }
    eos = {id_ for each in declared for id_ in _as_ids(each.eos_token_id)}
    if named.get("eos_token") in ids:
        eos.add(ids[named["eos_token"]])
    bos = [id_ for each in declared for id_ in _as_ids(each.bos_token_id)]
    if named.get("bos_token") in ids:
        bos.insert(0, ids[named["bos_token"]])
    return Vocabulary(
        tokens=tuple(tokens),
        merges=tuple(_merge(each) for each in tokenizer.model.merges),
        added=tuple(sorted(tokenizer.added_tokens, key=lambda token: token.id)),
        bos_id=bos[0] if bos else None,
        eos_ids=_all_eos(eos, tokenizer.added_tokens),
        named_tokens=named,
        chat_templates=_folder_templates(folder, config),
    )


def _folder_templates(folder: Path, config: _TokenizerConfig) -> dict[str, str]:
    declared = config.chat_template
    templates: dict[str, str] = {}
    if isinstance(declared, str):
        templates["default"] = declared
    elif declared is not None:
        templates.update({each.name: each.template for each in declared})
    # A file of its own wins over the configuration's copy.
    files = [("default", folder / "chat_template.jinja")]
    files += [(file.stem, file) for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for name, file in files:
        if file.is_file():
            templates[name] = file.read_text(encoding="utf-8")
    return templates


def _merge(merge: str | tuple[str, str]) -> tuple[str, str]:
    if not isinstance(merge, str):
        return merge
    left, _, right = merge.partition(" ")
    return left, right


def _as_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _all_eos(declared: set[int], added: Sequence[AddedToken]) -> tuple[int, ...]:
    by_name = {token.id for token in added if token.special and token.content in END_TOKENS}
    return tuple(sorted(declared | by_name))


# GGUF files


def _read_gguf(path: Path, metadata: Mapping[str, Value]) -> Vocabulary:
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ModelLoadError(
            f"{path} has a tokenizer of kind {model!r}; supported in GGUF are 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece BPE): use the model's Hugging Face folder instead"
        )
    is_sentencepiece = model == "llama"
    tokens = _strings(path, metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type", [])
    kinds = types if isinstance(types, list) else []
    special = (_GGUF_CONTROL, _GGUF_UNKNOWN) if is_sentencepiece else (_GGUF_CONTROL,)
    added = tuple(
        AddedToken(id=id_, content=token, special=kind in special)
        for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (*special, _GGUF_USER_DEFINED)
    )
    named = {
        f"{name}_token": tokens[id_]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (id_ := _token_id(metadata, key, len(tokens))) is not None
    }
    eos = {id_ for key in ("eos", "eot", "eom") if (id_ := _token_id(metadata, key, len(tokens))) is not None}
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).removeprefix(".") or "default": text
        for key, text in metadata.items()
        if (key == prefix or key.startswith(prefix + ".")) and isinstance(text, str)
    }
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    return Vocabulary(
        tokens=tuple(tokens),
        merges=tuple(_gguf_merges(path, metadata, tokens, kinds, is_sentencepiece)),
        added=added,
        bos_id=_token_id(metadata, "bos", len(tokens)),
        eos_ids=_all_eos(eos, added),
        named_tokens=named,
        chat_templates=templates,
        pre_tokenizer=pre,
        # Files of early converters leave the flags out; Llama models expect both.
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece or pre == "llama-bpe")),
        is_sentencepiece=is_sentencepiece,
        adds_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", is_sentencepiece)),
    )


def _gguf_merges(
    path: Path, metadata: Mapping[str, Value], tokens: list[str], kinds: Sequence[object], is_sentencepiece: bool
) -> list[tuple[str, str]]:
    if not is_sentencepiece:
        return [_merge(each) for each in _strings(path, metadata, "tokenizer.ggml.merges")]
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or len(kinds) != len(tokens):
        raise ModelLoadError(
            f"{path} has {len(tokens)} tokens, but not a score and a type for each; its tokenizer cannot be rebuilt"
        )
    mergeable = [token if kind == _GGUF_NORMAL else "" for token, kind in zip(tokens, kinds, strict=True)]
    return merges_of_scores(mergeable, [float(str(score)) for score in scores])


def _strings(path: Path, metadata: Mapping[str, Value], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise ModelLoadError(f"{path} has no list of texts under {key}; its tokenizer cannot be rebuilt")
    texts = [str(value) for value in values]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        # Bytes that are no UTF-8 arrive as lone surrogates, which no tokenizer takes.
        texts = [text.encode(errors="surrogateescape").decode(errors="replace") for text in texts]
    return texts


def _token_id(metadata: Mapping[str, Value], name: str, num_tokens: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < num_tokens else None
