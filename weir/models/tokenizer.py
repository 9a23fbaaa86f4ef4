"""A model's tokenizer, from the files in its folder; needs no torch, so that the router can hold one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from weir.errors import InvalidArgument, ModelError
from weir.models.token_bytes import PieceDecoder, TokenBytes, piece_decoder

_TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """Text to token ids and back. Immutable after ``load``; safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        decoder: PieceDecoder,
        special_tokens: Mapping[str, str],
        eos_token_ids: frozenset[int],
        digest: str,
    ) -> None:
        self._backend = backend
        self._digest = digest
        self.decoder = decoder
        self.special_tokens = dict(special_tokens)
        """Named special tokens as templates see them: ``bos_token``, ``eos_token``, ..."""
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = _named_id(backend, special_tokens, "bos_token")
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the highest token id. The model's own vocabulary may be padded beyond it."""
        self._visible_bytes = TokenBytes(backend, decoder, hidden=self.special_token_ids)
        self._all_bytes = TokenBytes(backend, decoder, hidden=frozenset())

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, and the special tokens from tokenizer_config, generation_config and config.

        Raises ModelError, which names the file, when tokenizer.json is missing, a file is not what it should
        be, or the decoder is of a kind that is not supported.
        """
        path = folder / _TOKENIZER_FILE
        raw = _read(path)
        settings = _parse(path, raw)
        backend = _build_backend(path, raw)
        config = _read_optional(folder / "tokenizer_config.json")
        special = _named_special_tokens(config)
        _apply_bos_and_eos_flags(folder / "tokenizer_config.json", backend, config, special)
        eos = _eos_token_ids(folder, backend, special)
        decoder = piece_decoder(str(path), settings.get("decoder"))
        return cls(backend, decoder, special, eos, _digest(raw, backend, eos))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``. Special tokens spelled out in it become their own ids, as in transformers.

        ``add_special_tokens`` also adds what the model expects around a text (usually BOS); a rendered chat
        already holds its own and wants False. Raises InvalidArgument for text that is no valid Unicode.
        """
        assert isinstance(text, str), text
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:  # which one depends on the library's version
            limit = "must be valid Unicode, without lone surrogates"
            raise InvalidArgument(field="text", value=text, limit=limit) from error
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids outside the vocabulary add nothing, invalid UTF-8 becomes U+FFFD.

        Equal to ``tokenizers``' decode, except that it keeps the valid characters of a byte-fallback run that
        also holds invalid bytes: text already streamed could not be taken back.
        """
        table = self.token_bytes(skip_special_tokens)
        text = b"".join([table[i] for i in ids]).decode("utf-8", "replace")
        return strip_start(text, self.decoder)[0]

    def token_bytes(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Bytes that each token id adds to the text; with ``skip_special_tokens``, special ones add none."""
        return self._visible_bytes if skip_special_tokens else self._all_bytes

    def id_to_piece(self, token_id: int) -> str | None:
        """The vocabulary entry (not text: spaces and bytes are spelled the vocabulary's way), or None."""
        if not 0 <= token_id < self.vocab_size:
            return None
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        token_id: int | None = self._backend.token_to_id(piece)
        return token_id

    def digest(self) -> str:
        """Hex SHA-256 of all that decides ids and text; equal digests tokenize alike."""
        return self._digest


def strip_start(text: str, decoder: PieceDecoder, stripped: int = 0) -> tuple[str, int]:
    """Drop the decoder's leading spaces from ``text``, which starts an output and lost ``stripped`` already.

    Returns what is left, and the number of spaces dropped so far; once text is left, stripping is over.
    """
    while stripped < decoder.strip_left and text.startswith(decoder.strip_content):
        text = text[len(decoder.strip_content) :]
        stripped += 1
    return text, stripped


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(file=str(path), tensor=None, expectation=f"a readable file ({error.strerror})") from error


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise ModelError(file=str(path), tensor=None, expectation=f"valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(file=str(path), tensor=None, expectation="a JSON object")
    return value


def _read_optional(path: Path) -> dict[str, Any]:
    return _parse(path, _read(path)) if path.exists() else {}


def _build_backend(path: Path, raw: bytes) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises bare Exception for anything wrong in the file
        raise ModelError(file=str(path), tensor=None, expectation=f"a tokenizer definition ({error})") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``*_token`` entries of tokenizer_config.json, which are strings or AddedToken objects."""
    named = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            named[name] = content
    return named


def _named_id(backend: tokenizers.Tokenizer, special: Mapping[str, str], name: str) -> int | None:
    return backend.token_to_id(special[name]) if name in special else None


def _apply_bos_and_eos_flags(
    path: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Let add_bos_token/add_eos_token, when stated, overrule the post-processor, as transformers does."""
    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return
    bos = special.get("bos_token") if config.get("add_bos_token") else None
    eos = special.get("eos_token") if config.get("add_eos_token") else None
    ids = []
    for token in (bos, eos):
        if token is None:
            continue
        token_id = backend.token_to_id(token)
        if token_id is None:
            raise ModelError(file=str(path), tensor=token, expectation="a token of the vocabulary")
        ids.append((token, token_id))
    single = [token for token in (bos, "$A", eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> frozenset[int]:
    """generation_config's ids (else config's) and the tokenizer's own EOS: any of them ends a text."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_optional(folder / name).get("eos_token_id")
        if value is not None:
            ids.update(_id_list(folder / name, value))
            break
    eos_id = _named_id(backend, special, "eos_token")
    return frozenset(ids | ({eos_id} if eos_id is not None else set()))


def _id_list(path: Path, value: object) -> list[int]:
    ids: list[Any] = value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ModelError(file=str(path), tensor="eos_token_id", expectation=f"an id or a list of ids, got {value!r}")
    return ids


def _digest(raw: bytes, backend: tokenizers.Tokenizer, eos: frozenset[int]) -> str:
    around: list[int] = backend.encode("", add_special_tokens=True).ids  # what the flags add around a text
    settings = json.dumps([sorted(eos), around]).encode()
    return hashlib.sha256(len(raw).to_bytes(8, "big") + raw + settings).hexdigest()
