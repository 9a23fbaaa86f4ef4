from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.models.text_models import byte_level_folder, demo_tokenizer, write_sentencepiece_gguf
from weir.models.detokenize import IncrementalDetokenizer
from weir.models.gguf_tokenizer import write_tokenizer
from weir.models.tokenizer import Tokenizer

TEXTS = st.text(max_size=60) | st.text(alphabet="é́👨‍👩‍👧🇸🇪你好한न ऩ the weir", max_size=60)
CUTS = st.lists(st.integers(0, 400), max_size=20)
IDS = st.lists(st.integers(0, 380) | st.integers(0, 50_000), max_size=40)


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", "sentencepiece_no_prefix", "demo"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "demo":
        return demo_tokenizer()
    if request.param == "byte_level":
        return Tokenizer.load(byte_level_folder(folder))
    prefix = request.param == "sentencepiece"
    write_tokenizer(write_sentencepiece_gguf(folder / "m.gguf", add_space_prefix=prefix), folder)
    return Tokenizer.load(folder)


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int], cuts: list[int], skip: bool = True) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    parts = [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)]
    if skip:
        assert not any("\ufffd" in part for part in parts) or "\ufffd" in tokenizer.decode(prompt + ids)
    return "".join(parts) + detokenizer.flush()


@settings(deadline=None)
@given(text=TEXTS, cuts=CUTS)
def test_streamed_text_is_the_text(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.vocab_size < 1000:  # the demo model's vocabulary lacks a few rare bytes
        assert tokenizer.decode(ids) == text
    assert streamed(tokenizer, [], ids, cuts) == tokenizer.decode(ids)


@settings(deadline=None)
@given(ids=IDS, cuts=CUTS, skip=st.booleans())
def test_any_ids_in_any_chunks_equal_the_whole(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    assert streamed(tokenizer, [], ids, cuts, skip) == tokenizer.decode(ids, skip)


@settings(deadline=None)
@given(prompt=IDS, ids=IDS, cuts=CUTS)
def test_after_a_prompt_only_what_it_lacks(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], cuts: list[int]
) -> None:
    before = streamed(tokenizer, [], prompt, [])
    whole = tokenizer.decode(prompt + ids)
    started = IncrementalDetokenizer(tokenizer, [])
    final_before = started.push(prompt)  # what the prompt says for certain, without an unfinished character
    assert before.startswith(final_before)
    assert final_before + streamed(tokenizer, prompt, ids, cuts) == whole


def test_one_emoji_comes_whole(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path))
    ids = tokenizer.encode("🎉!", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "🎉", "!"]
    assert detokenizer.flush() == ""


def test_cut_off_character_is_replaced_at_the_end_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path))
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert detokenizer.push(tokenizer.encode("a🎉", add_special_tokens=False)[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_sentencepiece_space_is_kept_after_a_prompt_and_dropped_without_one(tmp_path: Path) -> None:
    write_tokenizer(write_sentencepiece_gguf(tmp_path / "m.gguf"), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    word = tokenizer.piece_to_id("▁weir")
    bos = tokenizer.bos_token_id
    assert word is not None
    assert bos == 1
    assert IncrementalDetokenizer(tokenizer, []).push([word, word]) == "weir weir"
    assert IncrementalDetokenizer(tokenizer, [bos]).push([word]) == "weir"
    assert IncrementalDetokenizer(tokenizer, [bos, word]).push([word]) == " weir"
    assert IncrementalDetokenizer(tokenizer, [bos], skip_special_tokens=False).push([word]) == " weir"


def test_unknown_ids_add_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path))
    assert IncrementalDetokenizer(tokenizer, []).push([10**6, 2**40, -1, 65]) == tokenizer.decode([65])
