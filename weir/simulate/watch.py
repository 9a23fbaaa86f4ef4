"""The facts that a balance controller's traffic window takes in, as the cluster tells them."""

from __future__ import annotations

from typing import Protocol


class Watcher(Protocol):
    """Lifecycle facts, each with its moment."""

    def arrived(self, now_s: float, prompt_tokens: float) -> None:
        """A request came."""
        ...

    def refused(self, now_s: float) -> None:
        """A request was rejected."""
        ...

    def prefilled(self, now_s: float, prompt_tokens: float, cached_tokens: float) -> None:
        """A prompt's KV is finished."""
        ...

    def decode_began(self, now_s: float, prompt_tokens: float) -> None:
        """Decode has the prompt's KV."""
        ...

    def finished(self, now_s: float, output_tokens: float, ttft_s: float, decode_s: float) -> None:
        """A request ended well, ``decode_s`` after its first token."""
        ...


class _Nobody:
    """Watcher that forgets."""

    def arrived(self, now_s: float, prompt_tokens: float) -> None:
        pass

    def refused(self, now_s: float) -> None:
        pass

    def prefilled(self, now_s: float, prompt_tokens: float, cached_tokens: float) -> None:
        pass

    def decode_began(self, now_s: float, prompt_tokens: float) -> None:
        pass

    def finished(self, now_s: float, output_tokens: float, ttft_s: float, decode_s: float) -> None:
        pass


NOBODY: Watcher = _Nobody()
