"""Log-probabilities in OpenAI's two shapes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Piece = Callable[[str, int], bytes]
"""The bytes that a token of a model adds to the text, special tokens spelled out."""

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; the value that OpenAI uses."""


class LogprobWriter:
    """Writes the positions of one answer, in order; keeps the text offset between calls."""

    def __init__(self, piece: Piece, model: str, *, chat: bool) -> None:
        self._piece = piece
        self._model = model
        self._offset = 0
        self.write = self._chat if chat else self._completion
        """``PositionLogprobs`` messages to the value of a choice's ``logprobs``."""

    def _chat(self, positions: Sequence[Any]) -> dict[str, Any]:
        content = []
        for position in positions:
            entry = self._entry(position.chosen)
            entry["top_logprobs"] = [self._entry(candidate) for candidate in position.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, candidate: Any) -> dict[str, Any]:
        raw = self._piece(self._model, candidate.token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": _finite(candidate.logprob),
            "bytes": list(raw),
        }

    def _completion(self, positions: Sequence[Any]) -> dict[str, Any]:
        tokens, logprobs, tops, offsets = [], [], [], []
        for position in positions:
            raw = self._piece(self._model, position.chosen.token_id)
            tokens.append(raw.decode("utf-8", "replace"))
            logprobs.append(_finite(position.chosen.logprob))
            tops.append(self._top(position))
            offsets.append(self._offset)
            self._offset += _characters(raw)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, position: Any) -> dict[str, float]:
        """By text, best first; of tokens with the same text the likeliest; the chosen one always."""
        top: dict[str, float] = {}
        for candidate in (*position.top, position.chosen):
            text = self._piece(self._model, candidate.token_id).decode("utf-8", "replace")
            top.setdefault(text, _finite(candidate.logprob))
        return top


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _characters(raw: bytes) -> int:
    """Characters that begin in ``raw``: exact in sum even where tokens split a character."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)
