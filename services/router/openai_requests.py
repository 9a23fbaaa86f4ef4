"""OpenAI's request bodies, with vLLM's extensions, as Asks. Pure.

Nothing is ignored in silence: a field either changes the answer as its documentation says, or cannot change
it, or is refused by name. Ranges are checked once, behind the door (``check_sampling``), under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weir.engine.sampling import MAX_TOP_LOGPROBS, SamplingParams
from weir.errors import InvalidArgument
from weir.services.router.http_labels import Labels
from weir.services.router.intake import Ask, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from weir.services.router.openai_fields import Fields, all_integers

_MAX_TOKEN_DIGITS = 10

_IGNORED = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "user",
)

_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "only 1 answer a request is supported"),
    "best_of": ((1,), "only 1 answer a request is supported"),
    "echo": ((False,), "repeating the prompt is not supported"),
    "use_beam_search": ((False,), "beam search is not supported"),
    "length_penalty": ((1, 1.0), "beam search is not supported: only 1 is accepted"),
    "skip_special_tokens": ((True,), "only true is supported"),
    "detokenize": ((True,), "only true is supported"),
    "return_token_ids": ((False,), "only false is supported"),
    "return_tokens_as_token_ids": ((False,), "only false is supported"),
    "response_format": (({"type": "text"},), 'only {"type": "text"} is supported'),
}

_COMPLETION_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    **_FIXED,
    "suffix": (("",), "text after the completion is not supported"),
    "add_special_tokens": ((True,), "only true is supported"),
}

_CHAT_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    **_FIXED,
    "add_special_tokens": ((False,), "only false is supported: the chat template holds them"),
    "continue_final_message": ((False,), "continuing the last message is not supported"),
    "function_call": (("none", "auto"), "tools are not supported"),
    "functions": (([],), "tools are not supported"),
    "modalities": ((["text"],), "only text is supported"),
    "tool_choice": (("none", "auto"), "tools are not supported"),
    "tools": (([],), "tools are not supported"),
}

_UNSUPPORTED = (
    "allowed_token_ids",
    "audio",
    "bad_words",
    "cache_salt",
    "chat_template",
    "documents",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "prediction",
    "prompt_logprobs",
    "reasoning_effort",
    "structured_outputs",
    "truncate_prompt_tokens",
    "verbosity",
    "web_search_options",
)


@dataclass(slots=True)
class Call:
    """One request: what is asked of the router, and the shape of the answer."""

    ask: Ask
    chat: bool
    stream: bool
    include_usage: bool

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities are wanted."""
        return self.ask.sampling.logprobs is not None


def parse_completion(body: Mapping[str, Any], labels: Labels) -> Call:
    """A body of POST /v1/completions. Raises InvalidArgument naming the field."""
    fields = Fields(body)
    model = _model(fields)
    prompt = _prompt(fields)
    logprobs = fields.integer("logprobs")
    max_tokens = _at_least_one(fields, "max_tokens")
    return _call(fields, labels, model, prompt, logprobs, max_tokens, chat=False)


def parse_chat(body: Mapping[str, Any], labels: Labels) -> Call:
    """A body of POST /v1/chat/completions. Raises InvalidArgument naming the field."""
    fields = Fields(body)
    model = _model(fields)
    prompt = _chat_prompt(fields)
    logprobs = _chat_logprobs(fields)
    max_tokens = _chat_max_tokens(fields)
    return _call(fields, labels, model, prompt, logprobs, max_tokens, chat=True)


def _call(
    fields: Fields,
    labels: Labels,
    model: str,
    prompt: Prompt,
    logprobs: int | None,
    max_tokens: int | None,
    *,
    chat: bool,
) -> Call:
    ask = Ask(
        prompt=prompt,
        model=model,
        sampling=_sampling(fields, logprobs),
        max_tokens=max_tokens,
        tenant=labels.tenant,
        client_request_id=labels.client_request_id,
        priority=_priority(fields),
        slo_ttft_ms=labels.slo_ttft_ms,
        slo_tpot_ms=labels.slo_tpot_ms,
        traceparent=labels.traceparent,
    )
    stream = fields.flag("stream")
    include_usage = _include_usage(fields, stream)
    for name, (allowed, limit) in (_CHAT_FIXED if chat else _COMPLETION_FIXED).items():
        fields.fixed(name, allowed, limit)
    for name in _UNSUPPORTED:
        fields.fixed(name, (), "is not supported")
    fields.ignore(_IGNORED)
    fields.end()
    return Call(ask, chat, stream, include_usage)


def _model(fields: Fields) -> str:
    model = fields.text("model")
    if not model:
        raise fields.wrong("model", model, "is required: the name of a model of /v1/models")
    return model


def _sampling(fields: Fields, logprobs: int | None) -> SamplingParams:
    given: dict[str, Any] = {
        "min_tokens": fields.integer("min_tokens"),
        "temperature": fields.number("temperature"),
        "top_k": fields.integer("top_k"),
        "top_p": fields.number("top_p"),
        "min_p": fields.number("min_p"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "seed": fields.integer("seed"),
    }
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        logit_bias=_logit_bias(fields),
        stop=fields.texts("stop"),
        stop_token_ids=fields.integers("stop_token_ids"),
        include_stop=fields.flag("include_stop_str_in_output"),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
    )


def _logit_bias(fields: Fields) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, value in fields.mapping("logit_bias").items():
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_TOKEN_DIGITS):
            raise fields.wrong("logit_bias", key, "keys must be token ids")
        if type(value) is not float and type(value) is not int:
            raise fields.wrong(f"logit_bias[{key}]", value, "must be a number")
        biases[int(key)] = float(value)
    return biases


def _prompt(fields: Fields) -> TextPrompt | TokenPrompt:
    value = fields.take("prompt")
    if isinstance(value, list) and value and not all_integers(value):
        if len(value) > 1:
            raise fields.wrong("prompt", f"{len(value)} prompts", "only 1 prompt a request is supported")
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, list) and all_integers(value):
        return TokenPrompt(value)
    raise fields.wrong("prompt", value, "must be a string, a list of token ids, or a list of one of them")


def _chat_prompt(fields: Fields) -> ChatPrompt:
    messages = fields.take("messages")
    if not isinstance(messages, list):
        raise fields.wrong("messages", messages, "must be a list of messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise fields.wrong(f"messages[{index}]", message, "must be an object with role and content")
    add = fields.take("add_generation_prompt")
    if add is not None and type(add) is not bool:
        raise fields.wrong("add_generation_prompt", add, "must be true or false")
    variables = fields.mapping("chat_template_kwargs")
    return ChatPrompt(messages, add_generation_prompt=add is not False, variables=variables)


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs")
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise fields.wrong("top_logprobs", top, f"must lie in [0, {MAX_TOP_LOGPROBS}]")
    if top and not wanted:
        raise fields.wrong("top_logprobs", top, "needs logprobs to be true")
    return (top or 0) if wanted else None


def _chat_max_tokens(fields: Fields) -> int | None:
    older = _at_least_one(fields, "max_tokens")
    newer = _at_least_one(fields, "max_completion_tokens")
    if older is not None and newer is not None and older != newer:
        raise fields.wrong("max_completion_tokens", newer, f"differs from max_tokens = {older}: give one of them")
    return older if newer is None else newer


def _at_least_one(fields: Fields, name: str) -> int | None:
    value = fields.integer(name)
    if value is not None and value < 1:
        raise fields.wrong(name, value, "must be at least 1")
    return value


def _priority(fields: Fields) -> int:
    value = fields.integer("priority") or 0
    if not -(1 << 31) < value < 1 << 31:
        raise fields.wrong("priority", value, "must fit 32 bits")
    return -value  # vLLM's clients mean "lower goes first"; the router's priority is the other way round


def _include_usage(fields: Fields, stream: bool) -> bool:
    given = fields.take("stream_options")
    if given is None:
        return False
    if not isinstance(given, dict):
        raise fields.wrong("stream_options", given, "must be an object")
    if not stream:
        raise fields.wrong("stream_options", given, "needs stream to be true")
    options = Fields(given, "stream_options.")
    include = options.flag("include_usage")
    options.fixed("continuous_usage_stats", (False,), "only false is supported")
    options.ignore(("include_obfuscation",))
    options.end()
    return include


def require_object(value: object) -> dict[str, Any]:
    """The body as an object; raises InvalidArgument for any other JSON."""
    if not isinstance(value, dict):
        raise InvalidArgument("body", value, "must be a JSON object")
    return value
