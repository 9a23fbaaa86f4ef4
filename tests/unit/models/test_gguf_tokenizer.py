from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.models.text_models import (
    demo_folder,
    demo_gguf,
    demo_tokenizer,
    write_byte_level_gguf,
    write_sentencepiece_gguf,
)
from weir.errors import ModelError
from weir.models.chat import ChatTemplate
from weir.models.gguf_tokenizer import write_tokenizer
from weir.models.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Name the planets of the solar system."}]
CHAT_TEXT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nName the planets of the solar system.<|im_end|>\n<|im_start|>assistant\n"
)
# fmt: off
CHAT_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182,
    2, 198, 1, 4093, 198, 5820, 260, 9244, 282, 260, 3693, 817, 30, 2, 198, 1, 520, 9531, 198,
]
ANSWER_IDS = [
    504, 9244, 282, 260, 3693, 817, 359, 42, 198, 198, 61, 9532, 28, 16293, 28, 2591, 28, 7621, 28, 14713,
    28, 16440, 28, 36985, 28, 30461, 28, 284, 24254, 30, 2,
]
# fmt: on
ANSWER = (
    "The planets of the solar system are:\n\nMercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune, and Pluto."
)
CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces and  double  ones ",
    "tabs\tand\n\nnewlines\r\n  indented\n\t\tcode",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 22, 333]}  # 4444\n",
    "I'll can't we've they're he'd it's I'm DON'T",
    "3.14159 1,000,000 2024-07-26 0x1F",
    "Grüße, naïve café, Ångström, Straße, ÀÉÎÕÜ",
    "Кириллица и ελληνικά, עברית, العربية, हिन्दी, ไทย",
    "你好，世界。日本語のテキスト 한국어 문장",
    "🎉👨‍👩‍👧🇸🇪 e\u0301 a\u0308 \u200b\ufeff\u2028",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name> <|im_start|",
    "https://example.org/a?b=c&d=%20#frag user@example.org",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!!!!!??? -------- ______",
    "\x00\x01\x7f control",
]


@cache
def reference(gguf_path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)


def convert(gguf_path: Path) -> Tokenizer:
    write_tokenizer(gguf_path, gguf_path.parent)
    return Tokenizer.load(gguf_path.parent)


@pytest.mark.parametrize("text", CORPUS)
def test_demo_ids_equal_transformers(text: str) -> None:
    tokenizer = demo_tokenizer()
    expected = reference(demo_gguf())
    for special in (False, True):
        assert tokenizer.encode(text, add_special_tokens=special) == expected.encode(text, add_special_tokens=special)


@settings(deadline=None)
@given(text=st.text(max_size=80).filter(lambda text: not any(c.isnumeric() for c in text)))
def test_demo_ids_equal_transformers_on_any_text(text: str) -> None:
    expected = reference(demo_gguf()).encode(text, add_special_tokens=False)
    assert demo_tokenizer().encode(text, add_special_tokens=False) == expected


def test_demo_splits_digits_from_the_spaces_before_them() -> None:
    """SmolLM's own rule, which transformers' reading of the file lacks: "  1" is two spaces, then "1"."""
    tokenizer = demo_tokenizer()
    for text, expected in (("x  12", ["x", "ĠĠ", "1", "2"]), (" ½", ["Ġ", "Â½"])):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.id_to_piece(i) for i in ids] == expected


def test_demo_folder_reads_the_same_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(demo_folder()))
    ours = demo_tokenizer()
    for text in CORPUS:
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
    assert theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False) == CHAT_TEXT


def test_demo_chat_prompt() -> None:
    tokenizer = demo_tokenizer()
    text = ChatTemplate.load(demo_folder(), tokenizer.special_tokens).render(CHAT)
    assert text == CHAT_TEXT
    assert tokenizer.encode(text, add_special_tokens=False) == CHAT_IDS
    expected = reference(demo_gguf()).apply_chat_template(CHAT, add_generation_prompt=True)
    assert list(getattr(expected, "input_ids", None) or expected["input_ids"]) == CHAT_IDS


def test_demo_answer_and_special_tokens() -> None:
    tokenizer = demo_tokenizer()
    assert tokenizer.decode(ANSWER_IDS) == ANSWER
    assert tokenizer.decode(ANSWER_IDS, skip_special_tokens=False) == ANSWER + "<|im_end|>"
    assert tokenizer.encode(ANSWER + "<|im_end|>", add_special_tokens=False) == ANSWER_IDS
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.special_token_ids == set(range(17))


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Path:
    return write_sentencepiece_gguf(tmp_path / "m.gguf")


def test_sentencepiece_pieces(sentencepiece: Path) -> None:
    tokenizer = convert(sentencepiece)

    def pieces(text: str) -> list[str | None]:
        return [tokenizer.id_to_piece(i) for i in tokenizer.encode(text, add_special_tokens=True)]

    assert pieces("the weir holds") == ["<s>", "▁the", "▁weir", "▁holds"]
    assert pieces(" the") == ["<s>", "▁", "▁the"]
    assert pieces("the</s>the") == ["<s>", "▁the", "</s>", "▁the"]
    assert pieces("the<tool>!")[:3] == ["<s>", "▁the", "<tool>"]
    assert pieces("the你")[-1] == "你"
    assert pieces("theé")[-2:] == ["<0xC3>", "<0xA9>"]
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.parametrize("text", ["the weir holds", "weir", "the 你好 é🎉 holds!", "theweir 123 {x}", "a  b   c", ""])
def test_sentencepiece_ids_equal_transformers(sentencepiece: Path, text: str) -> None:
    tokenizer = convert(sentencepiece)
    expected = reference(sentencepiece)
    ids = expected.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text, add_special_tokens=True) == [1, *ids]
    assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)


def test_sentencepiece_without_prefix_space(tmp_path: Path) -> None:
    tokenizer = convert(write_sentencepiece_gguf(tmp_path / "m.gguf", add_space_prefix=False))
    ids = tokenizer.encode("weir the", add_special_tokens=False)
    assert [tokenizer.id_to_piece(i) for i in ids] == ["weir", "▁the"]
    assert tokenizer.decode(ids) == "weir the"
    assert tokenizer.decode(ids[1:]) == " the"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["he", "Ġthe", "12", "Ġ", "Ġ", "3"]),
        ("default", ["he", "Ġthe", "12", "Ġ", "Ġ", "3"]),
        ("smollm", ["he", "Ġthe", "1", "2", "ĠĠ", "3"]),
        ("qwen2", ["he", "Ġthe", "1", "2", "Ġ", "Ġ", "3"]),
        ("llama-bpe", ["<|begin|>", "he", "Ġthe", "12", "Ġ", "Ġ", "3"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = convert(write_byte_level_gguf(tmp_path / "m.gguf", pre))
    ids = tokenizer.encode("he the12  3", add_special_tokens=True)
    assert [tokenizer.id_to_piece(i) for i in ids] == pieces
    if pre in ("gpt-2", "qwen2", "llama-bpe"):
        theirs = reference(tmp_path / "m.gguf").encode("he the12  3", add_special_tokens=False)
        assert tokenizer.encode("he the12  3", add_special_tokens=False) == theirs


def test_qwen2_composes_unicode(tmp_path: Path) -> None:
    tokenizer = convert(write_byte_level_gguf(tmp_path / "m.gguf", "qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301", add_special_tokens=False)) == "é"


def test_unknown_kinds_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre: one of .*got 'tekken'"):
        write_tokenizer(write_byte_level_gguf(tmp_path / "a.gguf", "tekken"), tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.model: one of \['gpt2', 'llama'\], got 'bert'"):
        write_tokenizer(write_sentencepiece_gguf(tmp_path / "b.gguf", model="bert"), tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"nothing of the kind" * 10])
def test_other_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=r"x\.gguf: a GGUF file"):
        write_tokenizer(path, tmp_path)
