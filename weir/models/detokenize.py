"""Token ids to text as they come: never half a character, a fixed cost per token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from weir.models.tokenizer import Tokenizer, strip_start

_LONGEST_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """Text of the tokens that follow ``prompt_ids``.

    All pushes and the flush together equal ``tokenizer.decode(ids)`` for an empty prompt, however the ids
    are cut into pushes. After a prompt they are what ``decode(prompt + ids)`` adds to ``decode(prompt)``: the
    leading space that SentencePiece decoders drop is dropped only when the prompt has no text, and a
    character that the prompt left unfinished is completed here. ``prompt_ids`` is read once and not kept.
    """

    __slots__ = ("_decoder", "_pending", "_started", "_stripped", "_table")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._table = tokenizer.token_bytes(skip_special_tokens)
        self._decoder = tokenizer.decoder
        self._pending = b""  # the start of a character whose end has not come
        self._stripped = 0
        self._started = self._decoder.strip_left == 0
        if not self._started:
            self._skip_prompt_start(prompt_ids)
        self._pending = self._unfinished_character(prompt_ids)

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens; returns the text that is now final (maybe empty)."""
        table = self._table
        return self._take(self._pending + b"".join([table[i] for i in ids]), final=False)

    def flush(self) -> str:
        """End of the output: returns what was held back, U+FFFD for a character that was never finished."""
        return self._take(self._pending, final=True)

    def _take(self, data: bytes, final: bool) -> str:
        text, consumed = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[consumed:]
        if self._started or not text:
            return text
        text, self._stripped = strip_start(text, self._decoder, self._stripped)
        self._started = bool(text) or self._stripped == self._decoder.strip_left
        return text

    def _skip_prompt_start(self, prompt_ids: Sequence[int]) -> None:
        """Find out how much of the start of the text, where spaces are stripped, the prompt has used up."""
        for token_id in prompt_ids:
            self.push([token_id])
            if self._started:
                return

    def _unfinished_character(self, prompt_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._table[token_id] + tail
            if len(tail) >= _LONGEST_CHARACTER_BYTES:
                break
        return tail[codecs.utf_8_decode(tail, "replace", False)[1] :]
