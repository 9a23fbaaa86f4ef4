"""A Hugging Face tokenizer folder from the metadata of a GGUF file.

Special tokens, defaults and the splitting of text follow llama.cpp, which defines the format; the vocabulary
and merges are the file's. ``gguf`` is imported only when a file is converted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from weir.errors import ModelError

_PREFIX = "tokenizer.ggml."
_END_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})
_SPM_SPACE = "\u2581"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _TokenType(IntEnum):
    """llama.cpp's token types, as far as they matter here."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The ``tokenizer.*`` entries of a GGUF file, read once."""

    file: str
    values: dict[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """The entry ``tokenizer.ggml.<key>``."""
        return self.values.get(_PREFIX + key, default)

    def require(self, key: str) -> Any:
        if _PREFIX + key not in self.values:
            raise self.error(key, "must be present")
        return self.get(key)

    def error(self, key: str, expectation: str) -> ModelError:
        return ModelError(file=self.file, tensor=_PREFIX + key, expectation=expectation)

    def token(self, tokens: list[str], key: str) -> str | None:
        """The token that an id entry points to, None if the entry is absent."""
        token_id: int | None = self.get(key)
        if token_id is None:
            return None
        if not 0 <= token_id < len(tokens):
            raise self.error(key, f"an id below {len(tokens)}, got {token_id}")
        return tokens[token_id]


def write_tokenizer(gguf_path: Path, out_dir: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json of a GGUF into ``out_dir``.

    ``out_dir`` must exist; files of these names are overwritten. Raises ModelError, which names the key, for
    a file that is no GGUF, lacks an entry, or has a tokenizer that is not supported.
    """
    metadata = _read_metadata(gguf_path)
    tokens: list[str] = metadata.require("tokens")
    if len(set(tokens)) != len(tokens):
        raise metadata.error("tokens", "no token twice")
    kind = metadata.require("model")
    if kind not in _BUILDERS:
        raise metadata.error("model", f"one of {sorted(_BUILDERS)}, got {kind!r}")
    backend = _BUILDERS[kind](metadata, tokens)
    _add_special_tokens(backend, metadata, tokens)
    backend.save(str(out_dir / "tokenizer.json"), pretty=False)
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config(metadata, tokens))
    _write_json(out_dir / "generation_config.json", _generation_config(metadata, tokens))


def _read_metadata(path: Path) -> _Metadata:
    import gguf

    try:
        fields = gguf.GGUFReader(path).fields
        values = {k: field.contents() for k, field in fields.items() if k.startswith("tokenizer.")}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(file=str(path), tensor=None, expectation=f"a GGUF file ({error})") from error
    return _Metadata(str(path), values)


def _byte_level_bpe(metadata: _Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    name = metadata.get("pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise metadata.error("pre", f"one of {sorted(_PRE_TOKENIZERS)}, got {name!r}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata.require("merges")]
    for merge in merges:
        if len(merge) != 2 or not vocabulary.keys() >= {*merge, "".join(merge)}:
            raise metadata.error("merges", f"two tokens whose sum is a token, got {' '.join(merge)!r}")
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _LLAMA3_NAMES))
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()  # Qwen2 was trained on composed text
    backend.pre_tokenizer = _PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "qwen2": lambda: _split(_QWEN2_SPLIT),
    **dict.fromkeys(_LLAMA3_NAMES, lambda: _split(_LLAMA3_SPLIT)),
}


def _sentencepiece_bpe(metadata: _Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    scores = metadata.require("scores")
    if len(scores) != len(tokens):
        raise metadata.error("scores", f"{len(tokens)} scores, got {len(scores)}")
    unknown = metadata.token(tokens, "unknown_token_id")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _merges_from_scores(vocabulary, scores)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    # Each stretch of text between special tokens gets a space in front, even if it starts with one.
    prefix = bool(metadata.get("add_space_prefix", True))
    to_space_marks = normalizers.Replace(" ", _SPM_SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPM_SPACE), to_space_marks]) if prefix else to_space_marks
    )
    steps = [decoders.Replace(_SPM_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges_from_scores(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose sum scores best: every split of every token, best score first."""
    merges = [
        (-scores[i], -cut, cut - len(token), token[:cut], token[cut:])
        for token, i in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in merges]


_BUILDERS: dict[str, Callable[[_Metadata, list[str]], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
}


def _add_special_tokens(backend: tokenizers.Tokenizer, metadata: _Metadata, tokens: list[str]) -> None:
    """Tokens matched whole in a text: control and unknown ones are hidden in output, user-defined are not."""
    types = metadata.get("token_type", [])
    hidden = (_TokenType.CONTROL, _TokenType.UNKNOWN)
    for token, kind in zip(tokens, types, strict=False):
        if kind in hidden:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _TokenType.USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False, special=False)])


def _tokenizer_config(metadata: _Metadata, tokens: list[str]) -> dict[str, Any]:
    """What surrounds a text is stated by add_bos_token and add_eos_token, with llama.cpp's defaults."""
    bos_by_default = metadata.require("model") == "llama" or metadata.get("pre") in _LLAMA3_NAMES
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("add_bos_token", bos_by_default)),
        "add_eos_token": bool(metadata.get("add_eos_token", False)),
        "bos_token": metadata.token(tokens, "bos_token_id"),
        "eos_token": metadata.token(tokens, "eos_token_id"),
        "unk_token": metadata.token(tokens, "unknown_token_id"),
        "pad_token": metadata.token(tokens, "padding_token_id"),
        "chat_template": metadata.values.get("tokenizer.chat_template"),
    }
    return {key: value for key, value in config.items() if value is not None}


def _generation_config(metadata: _Metadata, tokens: list[str]) -> dict[str, Any]:
    """The ids that end a text: EOS, and ends of a turn that the file or, failing that, llama.cpp names."""
    ends = {metadata.get(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")} - {None}
    if metadata.get("eot_token_id") is None:
        types = metadata.get("token_type", [])
        ends |= {i for i, kind in enumerate(types) if kind == _TokenType.CONTROL and tokens[i] in _END_OF_TURN}
    config = {
        "bos_token_id": metadata.get("bos_token_id"),
        "eos_token_id": sorted(int(i) for i in ends),
        "pad_token_id": metadata.get("padding_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
