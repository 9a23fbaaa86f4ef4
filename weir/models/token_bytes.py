"""What each token id adds to the output, in bytes: the tokenizer's decoder, compiled to a table.

Decoding is then joining bytes and reading them as UTF-8, which can be done piece by piece at a fixed
cost per token. Two families of decoders are understood, and they cover the models Weir serves:

    ByteLevel                                        byte-level BPE: GPT-2, Llama 3, Qwen, SmolLM
    Replace, ByteFallback, Fuse, Strip (any subset)  SentencePiece BPE: Llama 2, Mistral, Mixtral
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from weir.errors import ModelError


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """How the text of one token becomes bytes.

    ``replacements`` are applied in order; ``strip_left`` leading occurrences of ``strip_content`` are
    dropped at the very start of the decoded text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_left: int = 0
    strip_content: str = " "

    def piece_bytes(self, piece: str) -> bytes:
        """The bytes that ``piece`` stands for, before any stripping."""
        if self.byte_level:
            return _byte_level_bytes(piece)
        if self.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        return piece.encode()


class TokenBytes(dict[int, bytes]):
    """Bytes of each token id, filled on first use; an unknown id and a hidden one are empty."""

    def __init__(self, backend: tokenizers.Tokenizer, decoder: PieceDecoder, hidden: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._id_to_token = backend.id_to_token
        self._decoder = decoder

    def __missing__(self, token_id: int) -> bytes:
        piece = self._id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if piece is None:
            return b""  # not kept: ids outside the vocabulary must not grow the table
        data = self[token_id] = self._decoder.piece_bytes(piece)
        return data


def piece_decoder(file: str, config: Mapping[str, Any] | None) -> PieceDecoder:
    """Compile the ``decoder`` section of the tokenizer.json ``file``; ModelError if it is another kind."""
    steps = _steps(config)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceDecoder(byte_level=True)
    known = {"Replace", "ByteFallback", "Fuse", "Strip"}
    strips = [step for step in steps if step.get("type") == "Strip"]
    fused_before_strip = not strips or (kinds[-1] == "Strip" and "Fuse" in kinds and len(strips) == 1)
    if not kinds or not set(kinds) <= known or not fused_before_strip or any(s.get("stop") for s in strips):
        raise ModelError(
            file=file,
            tensor="decoder",
            expectation=f"a ByteLevel decoder, or Replace, ByteFallback, Fuse and a final Strip; got {kinds}",
        )
    return PieceDecoder(
        byte_fallback="ByteFallback" in kinds,
        replacements=tuple(_replacement(file, s) for s in steps if s.get("type") == "Replace"),
        strip_left=int(strips[0]["start"]) if strips else 0,
        strip_content=str(strips[0]["content"]) if strips else " ",
    )


def _steps(config: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if config is None:
        return []
    if config.get("type") == "Sequence":
        return [step for part in config["decoders"] for step in _steps(part)]
    return [config]


def _replacement(file: str, step: Mapping[str, Any]) -> tuple[str, str]:
    pattern = step.get("pattern", {})
    if "String" not in pattern:
        raise ModelError(file=file, tensor="decoder.Replace", expectation="a plain string pattern")
    return str(pattern["String"]), str(step["content"])


def byte_alphabet() -> dict[str, int]:
    """GPT-2's 256 printable stand-ins for bytes, each with the byte it stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTE_OF_CHAR = byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()  # an added token written in plain text
