"""OpenAI's bodies to Asks: every field that is known lands where it should; the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.engine.sampling import SamplingParams
from weir.errors import InvalidArgument
from weir.services.router.http_labels import Labels, parse_labels
from weir.services.router.intake import Ask, ChatPrompt, TextPrompt, TokenPrompt
from weir.services.router.openai_requests import parse_chat, parse_completion, require_object

MESSAGES = [{"role": "user", "content": "hi", "name": "x"}]

SAMPLING: dict[str, Any] = {
    "min_tokens": 2,
    "temperature": 1,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.25,
    "presence_penalty": -1.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.25,
    "logit_bias": {"5": -100, "0": 1.5},
    "seed": 11,
    "stop": ["a", "b"],
    "stop_token_ids": [3, 4],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
}
PARSED = SamplingParams(
    min_tokens=2,
    temperature=1.0,
    top_k=7,
    top_p=0.5,
    min_p=0.25,
    presence_penalty=-1.5,
    frequency_penalty=0.5,
    repetition_penalty=1.25,
    logit_bias={5: -100.0, 0: 1.5},
    seed=11,
    stop=("a", "b"),
    stop_token_ids=(3, 4),
    include_stop=True,
    ignore_eos=True,
    logprobs=3,
)
HARMLESS: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "response_format": {"type": "text"},
    "metadata": {"a": "b"},
    "store": True,
    "user": "u",
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "parallel_tool_calls": True,
}


def test_every_field_of_a_completion() -> None:
    body = {
        **SAMPLING,
        **HARMLESS,
        "model": "m",
        "prompt": "hi",
        "max_tokens": 9,
        "logprobs": 3,
        "priority": 4,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": False, "include_obfuscation": False},
        "echo": False,
        "suffix": "",
        "add_special_tokens": True,
    }
    labels = Labels("c", "t", 100.0, 20.0, "")
    call = parse_completion(body, labels)
    assert call.ask == Ask(
        TextPrompt("hi"),
        model="m",
        sampling=PARSED,
        max_tokens=9,
        tenant="t",
        client_request_id="c",
        priority=-4,
        slo_ttft_ms=100.0,
        slo_tpot_ms=20.0,
    )
    assert (call.chat, call.stream, call.include_usage, call.logprobs) == (False, True, True, True)


def test_every_field_of_a_chat() -> None:
    body = {
        **SAMPLING,
        **HARMLESS,
        "model": "m",
        "messages": MESSAGES,
        "max_completion_tokens": 9,
        "logprobs": True,
        "top_logprobs": 3,
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "add_special_tokens": False,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    call = parse_chat(body, Labels())
    prompt = ChatPrompt(MESSAGES, add_generation_prompt=False, variables={"enable_thinking": False})
    assert call.ask == Ask(prompt, model="m", sampling=PARSED, max_tokens=9)
    assert (call.chat, call.stream, call.include_usage, call.logprobs) == (True, False, False, True)


@pytest.mark.parametrize("extra", [*SAMPLING, *HARMLESS, "max_tokens", "logprobs", "stream_options", "priority"])
def test_null_is_absent(extra: str) -> None:
    body = {"model": "m", "prompt": "hi", "messages": MESSAGES}
    text = {name: value for name, value in body.items() if name != "messages"}
    chat = {name: value for name, value in body.items() if name != "prompt"}
    assert parse_completion({**text, extra: None}, Labels()) == parse_completion(text, Labels())
    assert parse_chat({**chat, extra: None}, Labels()) == parse_chat(chat, Labels())


def test_defaults() -> None:
    call = parse_completion({"model": "m", "prompt": "hi"}, Labels())
    assert call.ask == Ask(TextPrompt("hi"), model="m")
    assert (call.stream, call.include_usage, call.logprobs) == (False, False, False)


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("", TextPrompt("")),
        (["hi"], TextPrompt("hi")),
        ([1, 2], TokenPrompt([1, 2])),
        ([[1, 2]], TokenPrompt([1, 2])),
        ([], TokenPrompt([])),
        ([[]], TokenPrompt([])),
    ],
)
def test_forms_of_a_prompt(prompt: Any, parsed: Any) -> None:
    assert parse_completion({"model": "m", "prompt": prompt}, Labels()).ask.prompt == parsed


def test_max_tokens_of_a_chat_has_two_names() -> None:
    body = {"model": "m", "messages": MESSAGES}
    for given_names in (["max_tokens"], ["max_completion_tokens"], ["max_tokens", "max_completion_tokens"]):
        assert parse_chat({**body, **dict.fromkeys(given_names, 5)}, Labels()).ask.max_tokens == 5


def test_logprobs_without_alternatives() -> None:
    chat = {"model": "m", "messages": MESSAGES}
    assert parse_chat({**chat, "logprobs": True}, Labels()).ask.sampling.logprobs == 0
    assert parse_chat({**chat, "logprobs": False, "top_logprobs": 0}, Labels()).ask.sampling.logprobs is None
    assert parse_completion({"model": "m", "prompt": "", "logprobs": 0}, Labels()).ask.sampling.logprobs == 0


def test_error_names_field_value_and_limit() -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_completion({"model": "m", "prompt": "hi", "temperature": "hot"}, Labels())
    assert str(caught.value) == "temperature = 'hot': must be a number"
    with pytest.raises(InvalidArgument) as caught:
        parse_completion({"model": "m", "prompt": ["a", "b"]}, Labels())
    assert str(caught.value) == "prompt = '2 prompts': only 1 prompt a request is supported"
    with pytest.raises(InvalidArgument) as caught:
        parse_chat({"model": "m", "messages": MESSAGES, "hello": 1}, Labels())
    assert str(caught.value) == "hello = 1: is not a known field"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 64) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    [*SAMPLING, *HARMLESS, "model", "prompt", "messages", "stream", "stream_options", "tools", "logprobs", "priority"]
)


@given(st.dictionaries(names, json_values, max_size=6))
def test_any_json_is_parsed_or_refused_by_name(change: dict[str, Any]) -> None:
    for parse, base in (
        (parse_completion, {"model": "m", "prompt": "hi"}),
        (parse_chat, {"model": "m", "messages": MESSAGES}),
    ):
        try:
            parse({**base, **change}, Labels())
        except InvalidArgument as error:
            name = error.field.partition("[")[0].partition(".")[0]
            assert name in change


def test_body_must_be_an_object() -> None:
    with pytest.raises(InvalidArgument, match=r"^body = \[\]: must be a JSON object$"):
        require_object([])


def test_labels() -> None:
    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {
        b"x-request-id": "käse".encode(),
        b"x-weir-tenant": b"t",
        b"x-slo-ttft-ms": b"250",
        b"x-slo-tpot-ms": b"12.5",
        b"traceparent": trace,
    }
    assert parse_labels(headers) == Labels("käse", "t", 250.0, 12.5, trace.decode())
    assert parse_labels({b"traceparent": b"nonsense"}) == Labels()
