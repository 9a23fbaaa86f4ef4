"""What a load run sends, when and where to: the values that go to the generator's process."""

from __future__ import annotations

from dataclasses import dataclass

BACKENDS = ("weir", "openai", "openai-chat", "vllm-pd")
REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: ``token_ids`` or ``text``, and how many tokens to ask for.

    ``at_s`` is the arrival that a trace names, in seconds from its start; ``kind`` groups requests in a report.
    """

    output_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    at_s: float | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        assert bool(self.token_ids) != bool(self.text), "a prompt is token ids or text, not both and not neither"
        assert self.output_tokens >= 1, self.output_tokens


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to send to. ``address`` is host:port for ``weir``, base URLs for the others; ``model`` may be empty."""

    backend: str
    address: str
    model: str = ""
    endpoint: str = ""
    api_key: str = ""

    def __post_init__(self) -> None:
        assert self.backend in BACKENDS, self.backend


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A whole run. ``arrivals_s`` has one time per prompt, from the start of the run, in order.

    ``warmups`` run before it, one at a time, and are not measured. ``max_concurrency`` 0 is no limit.
    """

    target: Target
    prompts: tuple[Prompt, ...]
    arrivals_s: tuple[float, ...]
    warmups: tuple[Prompt, ...] = ()
    max_concurrency: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    timeout_s: float = REQUEST_TIMEOUT_S
    keep_text: bool = False

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.arrivals_s), (len(self.prompts), len(self.arrivals_s))
        assert list(self.arrivals_s) == sorted(self.arrivals_s), "arrivals are in order"
