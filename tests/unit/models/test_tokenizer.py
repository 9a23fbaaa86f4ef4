import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.models.text_models import byte_level_folder, write_sentencepiece_gguf
from weir.errors import InvalidArgument, ModelError
from weir.models.gguf_tokenizer import write_tokenizer
from weir.models.tokenizer import Tokenizer

A, END = 97, 259  # ids of "a" and <|end|> in the tiny byte-level vocabulary


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_level_folder(tmp_path)


def test_encode_and_decode(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("he the<|end|>é", add_special_tokens=True)
    assert [tokenizer.id_to_piece(i) for i in ids] == ["he", "Ġthe", "<|end|>", "Ã", "©"]
    assert tokenizer.decode(ids) == "he theé"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he the<|end|>é"
    assert tokenizer.vocab_size == 261
    assert tokenizer.bos_token_id == END
    assert tokenizer.special_tokens == {"bos_token": "<|end|>", "eos_token": "<|end|>"}


def test_pieces_and_ids_outside_the_vocabulary_are_none(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.id_to_piece(261) is None
    assert tokenizer.id_to_piece(-1) is None
    assert tokenizer.piece_to_id("nothing") is None
    assert tokenizer.piece_to_id("Ġthe") == 258


def test_plain_text_added_token_is_decoded_as_written(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("a<｜工具▁call｜>b", add_special_tokens=False)
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "a<｜工具▁call｜>b"


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=40), skip=st.booleans())
def test_byte_level_decode_equals_the_library(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], skip: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "byte-level"
    if not folder.exists():
        byte_level_folder(folder)
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(text=st.text(max_size=40), skip=st.booleans())
def test_byte_fallback_decode_equals_the_library(
    tmp_path_factory: pytest.TempPathFactory, text: str, skip: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "byte-fallback"
    if not folder.exists():
        folder.mkdir()
        write_tokenizer(write_sentencepiece_gguf(folder / "m.gguf"), folder)
    tokenizer = Tokenizer.load(folder)
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_valid_characters_survive_invalid_bytes_in_a_fallback_run(tmp_path: Path) -> None:
    write_tokenizer(write_sentencepiece_gguf(tmp_path / "m.gguf"), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    ids = [3 + byte for byte in "é".encode() + b"\xff"]
    assert tokenizer.decode(ids) == "é\ufffd"


def test_eos_ids_come_from_generation_config_before_config(folder: Path) -> None:
    assert Tokenizer.load(folder).eos_token_ids == {END}
    write(folder, "config.json", {"eos_token_id": 7})
    assert Tokenizer.load(folder).eos_token_ids == {7, END}
    write(folder, "generation_config.json", {"eos_token_id": [8, 9]})
    assert Tokenizer.load(folder).eos_token_ids == {8, 9, END}


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({}, [A]),
        ({"add_bos_token": True}, [END, A]),
        ({"add_bos_token": True, "add_eos_token": True}, [END, A, END]),
        ({"add_bos_token": False}, [A]),
    ],
)
def test_bos_and_eos_flags(folder: Path, flags: dict[str, bool], ids: list[int]) -> None:
    write(folder, "tokenizer_config.json", {"bos_token": "<|end|>", "eos_token": "<|end|>", **flags})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("a", add_special_tokens=True) == ids
    assert tokenizer.encode("a", add_special_tokens=False) == [A]


def test_digest_tells_what_changes_ids_apart(folder: Path) -> None:
    first = Tokenizer.load(folder).digest()
    assert len(first) == 64
    assert Tokenizer.load(folder).digest() == first
    write(
        folder,
        "tokenizer_config.json",
        {"bos_token": "<|end|>", "eos_token": "<|end|>", "add_bos_token": True},
    )
    assert Tokenizer.load(folder).digest() != first
    write(folder, "tokenizer_config.json", {"bos_token": "<|end|>"})
    assert Tokenizer.load(folder).digest() != first


def test_lone_surrogate_is_the_callers_mistake(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="lone surrogates"):
        Tokenizer.load(folder).encode("a\ud800", add_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json: a readable file"),
        ("tokenizer.json", b"{", "tokenizer.json: valid JSON"),
        ("tokenizer.json", b"\xff", "tokenizer.json: valid JSON"),
        ("tokenizer.json", b"[]", "tokenizer.json: a JSON object"),
        ("tokenizer.json", b'{"version": "1.0"}', "tokenizer.json: a tokenizer definition"),
        ("tokenizer_config.json", b"nonsense", "tokenizer_config.json: valid JSON"),
        ("generation_config.json", b'{"eos_token_id": "2"}', "eos_token_id: an id or a list of ids, got '2'"),
        (
            "tokenizer_config.json",
            b'{"add_bos_token": true, "bos_token": "<x>"}',
            "<x>: a token of the vocabulary",
        ),
    ],
)
def test_unusable_files_are_named(folder: Path, name: str, content: bytes | None, message: str) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(folder)
    assert message in str(caught.value)
    assert str(folder / name) == caught.value.file


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {
            "type": "Sequence",
            "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}, {"type": "Fuse"}],
        },
    ],
)
def test_unsupported_decoder_is_named(folder: Path, decoder: object) -> None:
    settings = json.loads((folder / "tokenizer.json").read_text())
    write(folder, "tokenizer.json", settings | {"decoder": decoder})
    with pytest.raises(ModelError, match=r"decoder: a ByteLevel decoder.*got"):
        Tokenizer.load(folder)


def test_text_side_needs_neither_torch_nor_transformers_nor_gguf() -> None:
    modules = "tokenizer, chat, detokenize, stops, gguf_tokenizer"
    code = (
        f"import sys; from weir.models import {modules}; print(sorted("
        + "{'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
