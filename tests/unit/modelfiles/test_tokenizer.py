"""Tokenizers against references: transformers on a tokenizer made here, llama.cpp's ids for the real model."""

import datetime as dt
import os
from pathlib import Path

import gguf
import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from disagg.core.errors import InvalidRequest, ModelLoadError
from disagg.modelfiles.chat_template import ChatMessage, ChatTemplate
from disagg.modelfiles.tokenizer import ModelTokenizer, load_tokenizer
from disagg.modelfiles.vocabulary import Vocabulary, read_vocabulary
from disagg.router.detokenizer import start_detokenizer
from disagg.testing.tokenizer_files import write_tiny_tokenizer

TEXTS = (
    "The capital of France is",
    "1, 2, 3, 45678",
    "def fibonacci(n):\n    return n\n\n\n  x",
    "Héllo wörld 🙂 你好 ďábelské",
    "  leading and trailing  ",
    "It's we'll I'D <|im_start|>user\nhi<|im_end|>\n",
    "",
)

SHARED = Path(os.environ.get("DISAGG_SHARED", Path(__file__).parents[3].parent / "shared"))
MODEL = Path.home() / ".cache/disagg/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"


class GoldenRun(msgspec.Struct):
    model: str
    prompt: str
    prompt_ids: list[int]
    greedy_ids: list[int]
    text: str


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_tokenizer(tmp_path / "model")


def write_gguf(path: Path, vocabulary: Vocabulary, pre: str, *, kind: str = "gpt2") -> Path:
    """The same vocabulary as a GGUF file without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(vocabulary.tokens))
    special = {token.id for token in vocabulary.added}
    writer.add_token_types([3 if id_ in special else 1 for id_ in range(len(vocabulary.tokens))])
    writer.add_token_merges([" ".join(merge) for merge in vocabulary.merges])
    writer.add_eos_token_id(2)
    if "default" in vocabulary.chat_templates:
        writer.add_chat_template(vocabulary.chat_templates["default"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_same_ids_as_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours = load_tokenizer(folder)
    ours.check_invariants()
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_same_template_text_as_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = load_tokenizer(folder)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=ours.chat_template
    )
    messages = [ChatMessage("system", "Be <brief> & kind"), ChatMessage("user", "hi\n")]
    assert ours.chat_template is not None
    rendered = ChatTemplate(ours.chat_template, ours.named_tokens).render(messages)
    dicts = [{"role": message.role, "content": message.content} for message in messages]
    assert rendered == theirs.apply_chat_template(dicts, tokenize=False, add_generation_prompt=True)


def test_ends_come_from_every_file(folder: Path) -> None:
    assert load_tokenizer(folder).eos_ids == (0, 2)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text('{"eos_token_id": 5, "bos_token_id": 1}')
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == (0, 2, 5)  # two by their names, one by the configuration
    assert tokenizer.bos_id == 1


def test_gguf_gives_the_same_tokenizer_and_digest_as_the_folder(folder: Path, tmp_path: Path) -> None:
    ours = load_tokenizer(folder)
    file = write_gguf(tmp_path / "model.gguf", ours.vocabulary, "gpt-2")
    theirs = load_tokenizer(file)
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text)
    assert theirs.eos_ids == ours.eos_ids
    assert theirs.digest == ours.digest == read_vocabulary(file).digest == read_vocabulary(folder).digest


def test_digest_covers_template_and_tokens(folder: Path, tmp_path: Path) -> None:
    digest = read_vocabulary(folder).digest
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert read_vocabulary(folder).digest != digest
    assert read_vocabulary(write_tiny_tokenizer(tmp_path / "other", vocab_size=280)).digest != digest


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "ab 12", ["ab", " ", "1", "2"]),
        ("qwen2", "ab 12!\n x", ["ab", " ", "1", "2", "!\n", " x"]),
        ("llama-bpe", "ab 12345", ["ab", " ", "123", "45"]),
        ("gpt-2", "ab 12345", ["ab", " 12345"]),
    ],
)
def test_splitting_rules(folder: Path, tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    file = write_gguf(tmp_path / "model.gguf", read_vocabulary(folder), pre)
    splitter = load_tokenizer(file).backend.pre_tokenizer
    assert splitter is not None
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in splitter.pre_tokenize_str(text)] == pieces


def test_llama_files_begin_with_bos(folder: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    vocabulary = read_vocabulary(folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types([3] * 3 + [1] * (len(vocabulary.tokens) - 3))
    writer.add_token_merges([" ".join(merge) for merge in vocabulary.merges])
    writer.add_bos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path / "model.gguf")
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 1


def test_what_cannot_be_read_is_said_plainly(folder: Path, tmp_path: Path) -> None:
    vocabulary = read_vocabulary(folder)
    cases = {
        tmp_path / "none": "does not exist",
        write_gguf(tmp_path / "spm.gguf", vocabulary, "default", kind="llama"): "a score and a type for each",
        write_gguf(tmp_path / "wordpiece.gguf", vocabulary, "default", kind="bert"): "kind 'bert'",
        write_gguf(tmp_path / "pre.gguf", vocabulary, "tekken"): "rule 'tekken'",
    }
    empty = tmp_path / "empty"
    empty.mkdir()
    cases[empty] = "tokenizer.json is missing"
    (tmp_path / "text").write_text("hello")
    cases[tmp_path / "text"] = "neither a folder nor a GGUF file"
    damaged = write_tiny_tokenizer(tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text("{")
    cases[damaged] = "damaged"
    for path, words in cases.items():
        with pytest.raises(ModelLoadError, match=words) as caught:
            load_tokenizer(path)
        assert "\n" not in str(caught.value)


def test_limits_of_a_training_script_are_ignored(folder: Path) -> None:
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("x y z w v")) > 2
    assert len(load_tokenizer(folder).encode("x")) == 1


def sentencepiece_like() -> ModelTokenizer:
    """Words with a marked start and bytes for the rest, as in Llama 2 and Gemma."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "s"]
    vocab = {word: id_ for id_, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return ModelTokenizer(backend, Vocabulary(tuple(words), (), (), None, (), {}, {}))


def test_byte_fallback_is_bytewise_and_keeps_spaces() -> None:
    tokenizer = sentencepiece_like()
    assert tokenizer.is_bytewise
    ids = [258, 259, 260, *(1 + byte for byte in "ď🙂".encode())]
    assert tokenizer.decode(ids) == " Hello worldsď🙂"
    detokenizer = start_detokenizer(tokenizer)
    deltas = [detokenizer.push(id_) for id_ in ids] + [detokenizer.flush()]
    assert "".join(deltas) == " Hello worldsď🙂"
    assert all("\N{REPLACEMENT CHARACTER}" not in delta for delta in deltas)


def test_word_pieces_are_joined_by_the_library() -> None:
    words = ["[UNK]", "un", "##able", "to", "!"]
    backend = Tokenizer(models.WordPiece({word: id_ for id_, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    tokenizer = ModelTokenizer(backend, Vocabulary(tuple(words), (), (), None, (), {}, {}))
    assert not tokenizer.is_bytewise
    detokenizer = start_detokenizer(tokenizer)
    deltas = [detokenizer.push(id_) for id_ in (1, 2, 3, 1)] + [detokenizer.flush()]
    assert "".join(deltas) == tokenizer.decode([1, 2, 3, 1]) == "unable to un"


def render(source: str, *messages: ChatMessage) -> str:
    clock = lambda: dt.datetime(2024, 2, 3)  # noqa: E731, DTZ001
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, clock).render(messages)


def test_template_environment() -> None:
    user = ChatMessage("user", "<a> & 'b' é")
    assert render("{{ messages[0].content | tojson }}", user) == "\"<a> & 'b' é\""
    assert render("{{ strftime_now('%d %b %Y') }}{{ bos_token }}", user) == "03 Feb 2024<s>"
    assert render("{% for m in messages %}\n  {% if m.role == 'user' %}\nx\n  {% endif %}\n{% endfor %}", user) == "x\n"
    assert render("{% for m in messages %}{% break %}{% endfor %}y", user) == "y"
    assert render("{% generation %}z{% endgeneration %}", user) == "z"
    assert render("{{ tools is none }}{{ add_generation_prompt }}", user) == "TrueTrue"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content.x }}", "refused"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused"),
    ],
)
def test_template_errors_are_the_clients(source: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        render(source, ChatMessage("user", "x"))
    assert caught.value.param == "messages"


def test_real_model_has_llama_cpps_ids() -> None:
    golden = SHARED / "models/golden_llamacpp_greedy.jsonl"
    if not golden.is_file():
        pytest.skip(f"{golden} is not here: set DISAGG_SHARED to the folder that holds models/")
    if not MODEL.is_file():
        pytest.skip(f"{MODEL} is not here: run `make serve` once to fetch it")
    tokenizer = load_tokenizer(MODEL)
    runs = [msgspec.json.decode(line, type=GoldenRun) for line in golden.read_bytes().splitlines()]
    ours = [run for run in runs if run.model == "smollm2-135m"]
    assert len(ours) >= 6
    for run in ours:
        assert tokenizer.encode(run.prompt) == run.prompt_ids
        assert tokenizer.decode(run.greedy_ids) == run.text
    assert tokenizer.eos_ids == (0, 2)
    assert tokenizer.chat_template is not None
