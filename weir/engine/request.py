"""What a worker asks the engine to do: one attempt of one request, as plain values."""

import enum
from dataclasses import dataclass

from weir.engine.sampling import SamplingParams
from weir.ids import RequestKey


class Mode(enum.Enum):
    """How the engine takes part in a request.

    ``PREFILL``  compute the context's KV, sample one token, then keep the KV until ``release_kv``
    ``REMOTE``   the context's KV is read from another worker; decode from there
    ``LOCAL``    both here
    """

    PREFILL = "prefill"
    REMOTE = "remote"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One attempt. Its context is ``prompt + generated``.

    ``generated``   tokens that earlier attempts produced: they count towards max_tokens, min_tokens, penalties
                    and the positions of the random stream, exactly as if they had been made here
    ``sampling``    with ``seed`` set unless it is greedy
    ``eos_token_ids`` the model's; they end the sequence unless ``sampling.ignore_eos``
    ``tenant_salt`` seeds the prefix hash: tenants with different salts share no KV
    ``deadline_monotonic_s`` on the engine's clock; no work is done after it
    ``priority``    higher goes first; equal ones in order of arrival
    """

    key: RequestKey
    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    sampling: SamplingParams
    mode: Mode
    eos_token_ids: frozenset[int] = frozenset()
    tenant_salt: bytes = b""
    deadline_monotonic_s: float | None = None
    priority: int = 0

    @property
    def context_len(self) -> int:
        """Tokens known before the first one is sampled here."""
        return len(self.prompt) + len(self.generated)
