"""GGUF files of SentencePiece models, against the sentencepiece library itself."""

import io
import random
from pathlib import Path

import gguf
import pytest
import sentencepiece

from disagg.core.errors import ModelLoadError
from disagg.modelfiles.sentencepiece import merges_of_scores
from disagg.modelfiles.tokenizer import ModelTokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def corpus() -> list[str]:
    files = sorted(Path(__file__).parents[3].glob("src/disagg/*/*.py"))
    return [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def reference() -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        vocab_size=2000,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_gguf(path: Path, reference: sentencepiece.SentencePieceProcessor, num_scores: int | None = None) -> Path:
    ids = range(reference.get_piece_size())
    kinds = {
        id_: UNKNOWN
        if reference.is_unknown(id_)
        else CONTROL
        if reference.is_control(id_)
        else BYTE
        if reference.is_byte(id_)
        else NORMAL
        for id_ in ids
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([reference.id_to_piece(id_) for id_ in ids])
    writer.add_token_scores([reference.get_score(id_) for id_ in ids][:num_scores])
    writer.add_token_types([kinds[id_] for id_ in ids])
    writer.add_bos_token_id(reference.bos_id())
    writer.add_eos_token_id(reference.eos_id())
    writer.add_unk_token_id(reference.unk_id())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def ours(reference: sentencepiece.SentencePieceProcessor, tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("spm") / "model.gguf", reference))


def test_same_ids_as_the_library(reference: sentencepiece.SentencePieceProcessor, ours: ModelTokenizer) -> None:
    chance = random.Random(0)
    noise = ["".join(chance.choice("abc déf  𐍈🙂\n019") for _ in range(chance.randint(1, 40))) for _ in range(300)]
    for text in [*corpus()[:1500], *noise, "", "  two  spaces", "Ünïcode 你好 🙂"]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text), text
        assert ours.decode(ids) == (f" {text}" if text else "")


def test_begins_with_bos_and_ends_at_eos(reference: sentencepiece.SentencePieceProcessor, ours: ModelTokenizer) -> None:
    ours.check_invariants()
    assert ours.is_bytewise
    assert ours.encode("a")[0] == reference.bos_id() == ours.bos_id
    assert ours.eos_ids == (reference.eos_id(),)
    assert ours.encode("</s>", add_special_tokens=False) == [reference.eos_id()]
    assert ours.special_ids == {reference.bos_id(), reference.eos_id(), reference.unk_id()}


def test_a_piece_without_a_score_is_refused(reference: sentencepiece.SentencePieceProcessor, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", reference, num_scores=5)
    with pytest.raises(ModelLoadError, match="a score and a type for each"):
        load_tokenizer(file)


def test_every_way_to_spell_a_piece_is_a_merge_best_first() -> None:
    tokens = ["a", "b", "ab", "ba", "aba", ""]
    scores = [0.0, 0.0, -1.0, -2.0, -0.5, 9.0]
    assert merges_of_scores(tokens, scores) == [("a", "ba"), ("ab", "a"), ("a", "b"), ("b", "a")]
