"""What was seen of one request, at the client."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times are seconds from the start of the run, on the generator's clock.

    ``scheduled_s`` was planned, ``fired_s`` is when the generator got to it, ``sent_s`` when it was sent (later
    than ``fired_s`` only under ``--max-concurrency``). ``token_times_s`` has an entry per token for the gRPC back
    end (tokens of one message share a time) and per streamed chunk for the OpenAI ones. ``error`` is empty or
    the kind of failure.
    """

    index: int
    kind: str
    scheduled_s: float
    fired_s: float
    sent_s: float
    ended_s: float
    token_times_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    error: str = ""
    detail: str = ""
    text: str = ""

    @property
    def ok(self) -> bool:
        """Whether it completed."""
        return not self.error

    @property
    def ttft_s(self) -> float:
        """Sent until the first token; 0 when there was none."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else 0.0

    @property
    def e2e_s(self) -> float:
        """Sent until the end of the answer."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """(e2e - ttft) / (output tokens - 1); 0 for a single token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Gaps between tokens."""
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]
