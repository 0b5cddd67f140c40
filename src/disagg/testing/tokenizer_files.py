"""A small real tokenizer on disk: byte-level BPE in the Hugging Face layout, trained on the spot in milliseconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS: Final = (
    "the quick brown fox jumps over the lazy dog",
    "once upon a time there was a little house on a hill",
    "hello world, how are you today? I am fine, thank you!",
    "def main(): return 1 + 2 * 3  # numbers 0123456789",
    "Žluťoučký kůň úpěl ďábelské ódy, 你好 🙂",
)


class _Config(msgspec.Struct):
    tokenizer_class: str
    bos_token: str | None
    eos_token: str
    chat_template: str | None


def write_tiny_tokenizer(
    folder: Path,
    *,
    vocab_size: int = 512,
    chat_template: str | None = CHAT_TEMPLATE,
    words: Sequence[str] = (),
) -> Path:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into `folder`; returns it.

    `vocab_size` is a limit of at least 259 (special tokens and bytes); the corpus has 422 tokens in it. The tokenizer
    adds no bos. Each of `words` becomes a token of its own, as marks of calls and thoughts are in many models.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _Config("PreTrainedTokenizerFast", None, "<|im_end|>", chat_template)
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    (folder / "generation_config.json").write_bytes(b'{"eos_token_id": [0, 2]}')
    return folder
