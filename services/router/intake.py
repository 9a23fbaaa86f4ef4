"""The door: what a caller asks for, checked and tokenised once. Every refusal names field, value and limit."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from weir.engine.sampling import MAX_SEED, SamplingParams, check_prompt, check_sampling
from weir.errors import InvalidArgument
from weir.services.router.catalog import Catalog, ServedModel

COMPLETION_MAX_TOKENS = 16
MAX_LABEL_CHARS = 256
INLINE_CHARS = 2048
"""Texts up to this length are tokenised on the event loop: cheaper than a thread's round trip."""

_SALT_KEY = b"weir.prefix.tenant.v1"  # the same in every router, or their prefix caches would not meet


@dataclass(slots=True)
class TextPrompt:
    """Plain text."""

    text: str


@dataclass(slots=True)
class TokenPrompt:
    """Token ids."""

    token_ids: Sequence[int]


@dataclass(slots=True)
class ChatPrompt:
    """A chat for the model's own template. ``variables`` are further names that the template may read."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(slots=True)
class Ask:
    """What a caller wants.

    ``model`` empty means the only one served. ``max_tokens`` replaces that of ``sampling``; None is 16 for text
    and tokens, the rest of the context for a chat. ``timeout_s`` None takes the router's default.
    """

    prompt: Prompt
    model: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    tenant: str = ""
    client_request_id: str = ""
    timeout_s: float | None = None
    priority: int = 0
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    traceparent: str = ""


@dataclass(slots=True)
class Checked:
    """An Ask that may be admitted: ``sampling`` has its seed, ``prompt`` its token ids."""

    model: ServedModel
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tenant_salt: bytes
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """Bounds of what may be asked for, and what holds when nothing is asked for; 0 is none.

    ``slo_limit_ms``: largest SLO; ``max_output_tokens``: most tokens that one request may generate.
    """

    max_prompt_bytes: int
    slo_limit_ms: float = math.inf
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    max_output_tokens: int = 0


class Intake:
    """Checks and tokenises. ``executor`` takes long texts; its bound is its number of threads."""

    def __init__(
        self,
        catalog: Catalog,
        executor: Executor,
        *,
        limits: IntakeLimits,
        random_bits: Callable[[int], int],
    ) -> None:
        self._catalog = catalog
        self._executor = executor
        self._limits = limits
        self._random_bits = random_bits
        self._salts: dict[str, bytes] = {}

    async def check(self, ask: Ask) -> Checked:
        """Raises InvalidArgument; Unavailable when no model is known yet."""
        _check_labels(ask, self._limits.slo_limit_ms)
        model = self._catalog.find(ask.model)
        prompt = await self._tokenise(ask.prompt, model)
        limit = self._catalog.token_limit(model)
        sampling = self._complete(ask, len(prompt), limit)
        check_sampling(sampling, vocab_size=model.vocab_size)
        check_prompt(prompt, max_tokens=sampling.max_tokens, vocab_size=model.vocab_size, context=model.context_tokens)
        _check_room(len(prompt), sampling.max_tokens, limit)
        return Checked(
            model,
            prompt,
            sampling,
            self._salt(ask.tenant),
            ask.slo_ttft_ms or self._limits.slo_ttft_ms,
            ask.slo_tpot_ms or self._limits.slo_tpot_ms,
        )

    def _complete(self, ask: Ask, prompt_tokens: int, limit: int) -> SamplingParams:
        seed = ask.sampling.seed
        return dataclasses.replace(
            ask.sampling,
            max_tokens=self._max_tokens(ask, prompt_tokens, limit),
            seed=self._random_bits(62) & MAX_SEED if seed is None else seed,
        )

    def _max_tokens(self, ask: Ask, prompt_tokens: int, limit: int) -> int:
        """Most tokens to generate: the run-time budget, which holds whatever a worker sends."""
        bound = self._limits.max_output_tokens
        wanted = _max_tokens(ask, prompt_tokens, limit)
        if not bound or wanted <= bound:
            return wanted
        if ask.max_tokens is not None:
            raise InvalidArgument("max_tokens", wanted, f"at most {bound}")
        return bound

    async def _tokenise(self, prompt: Prompt, model: ServedModel) -> tuple[int, ...]:
        if isinstance(prompt, TokenPrompt):
            self._check_size("prompt", 4 * len(prompt.token_ids))
            return tuple(prompt.token_ids)
        size = _size(prompt)
        self._check_size("messages" if isinstance(prompt, ChatPrompt) else "prompt", size)
        if size <= INLINE_CHARS:
            return _encode(prompt, model)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, _encode, prompt, model)

    def _check_size(self, name: str, size: int) -> None:
        most = self._limits.max_prompt_bytes
        if size > most:
            raise InvalidArgument(name, f"{size} bytes", f"at most {most} bytes")

    def _salt(self, tenant: str) -> bytes:
        salt = self._salts.get(tenant)
        if salt is None:
            if len(self._salts) >= 1024:
                self._salts.clear()
            salt = hashlib.blake2b(tenant.encode(), key=_SALT_KEY, digest_size=16).digest() if tenant else b""
            self._salts[tenant] = salt
        return salt


def _check_labels(ask: Ask, slo_limit_ms: float) -> None:
    for name in ("client_request_id", "tenant", "model"):
        value = getattr(ask, name)
        if len(value) > MAX_LABEL_CHARS:
            raise InvalidArgument(name, value, f"at most {MAX_LABEL_CHARS} characters")
    for name in ("slo_ttft_ms", "slo_tpot_ms"):
        value = getattr(ask, name)
        if not 0.0 <= value < math.inf:
            raise InvalidArgument(name, value, "must be a finite number of at least 0")
        if value > slo_limit_ms:
            raise InvalidArgument(name, value, f"at most {slo_limit_ms:g} milliseconds")
    if ask.timeout_s is not None and not ask.timeout_s > 0:
        raise InvalidArgument("timeout_s", ask.timeout_s, "must be more than 0")


def _check_room(prompt_tokens: int, max_tokens: int, limit: int) -> None:
    total = prompt_tokens + max_tokens
    if total > limit:
        what = f"{prompt_tokens} prompt tokens + {max_tokens} max_tokens; the worker with most room takes {limit}"
        raise InvalidArgument("prompt + max_tokens", total, what)


def _max_tokens(ask: Ask, prompt_tokens: int, limit: int) -> int:
    if ask.max_tokens is not None:
        return ask.max_tokens
    if isinstance(ask.prompt, ChatPrompt):
        return max(1, limit - prompt_tokens)
    return COMPLETION_MAX_TOKENS


def _size(prompt: TextPrompt | ChatPrompt) -> int:
    """Bytes of a text in UTF-8, near enough for a bound; refuses text that has none."""
    if isinstance(prompt, TextPrompt):
        return len(_utf8("prompt", prompt.text))
    total = 0
    for index, message in enumerate(prompt.messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            total += len(_utf8(f"messages[{index}].content", content))
        elif content is not None:
            total += len(_utf8(f"messages[{index}].content", repr(content)))
    return total


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise InvalidArgument(name, text[at : at + 1], f"must be valid Unicode (position {at})") from error


def _encode(prompt: TextPrompt | ChatPrompt, model: ServedModel) -> tuple[int, ...]:
    if isinstance(prompt, TextPrompt):
        return tuple(model.tokenizer.encode(prompt.text, add_special_tokens=True))
    text = model.template.render(
        prompt.messages, add_generation_prompt=prompt.add_generation_prompt, variables=prompt.variables
    )
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))
