"""The door: what is refused, with which words, and what is made of the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.text_models import byte_level_folder
from weir.engine.sampling import SamplingParams
from weir.errors import InvalidArgument, ModelError, Unavailable
from weir.services.router.catalog import Catalog, load_model
from weir.services.router.intake import (
    INLINE_CHARS,
    Ask,
    ChatPrompt,
    Checked,
    Intake,
    IntakeLimits,
    TextPrompt,
    TokenPrompt,
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 261, "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "max_position_embeddings": 100, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = byte_level_folder(tmp_path / "toy")
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return made


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Intake]]:
    with ThreadPoolExecutor(1) as executor:

        def build(*names: str, limit: int = 0, max_prompt_bytes: int = 1 << 20, **limits: Any) -> Intake:
            catalog = Catalog(lambda name: limit)
            for name in names or ("toy",):
                catalog.add(load_model(name, folder, 5.0))
            bounds = IntakeLimits(max_prompt_bytes, **limits)
            return Intake(catalog, executor, limits=bounds, random_bits=lambda bits: (1 << bits) - 1)

        yield build


async def check(intake: Intake, prompt: Any = TokenPrompt((1, 2, 3)), **ask: Any) -> Checked:
    return await intake.check(Ask(prompt, **ask))


async def test_defaults_of_max_tokens(make: Callable[..., Intake]) -> None:
    intake = make()
    assert (await check(intake)).sampling.max_tokens == 16
    assert (await check(intake, max_tokens=5)).sampling.max_tokens == 5
    chat = ChatPrompt([{"role": "user", "content": "abc"}])
    assert (await check(intake, chat)).sampling.max_tokens == 97
    assert (await check(make(limit=50), chat)).sampling.max_tokens == 47


async def test_a_seed_is_minted_once_and_a_given_one_kept(make: Callable[..., Intake]) -> None:
    intake = make()
    assert (await check(intake)).sampling.seed == (1 << 62) - 1
    assert (await check(intake, sampling=SamplingParams(seed=7))).sampling.seed == 7


async def test_tenants_get_salts_that_any_router_would_give(make: Callable[..., Intake]) -> None:
    one, other = make(), make()
    salts = [(await check(intake, tenant=name)).tenant_salt for name in ("a", "b") for intake in (one, other)]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert len(salts[0]) == 16
    assert (await check(one)).tenant_salt == b""


async def test_long_texts_give_the_same_tokens_as_short_ones(make: Callable[..., Intake]) -> None:
    intake = make(limit=0)
    short = await check(intake, TextPrompt("the weir"), max_tokens=1)
    assert short.prompt == tuple(short.model.tokenizer.encode("the weir", add_special_tokens=True))
    text = "the" * INLINE_CHARS
    with pytest.raises(InvalidArgument, match="exceed the context of 100"):
        await check(intake, TextPrompt(text), max_tokens=1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"prompt": TextPrompt("")}, "prompt = .*at least 1 token"),
        ({"prompt": TokenPrompt(())}, "prompt = .*at least 1 token"),
        ({"prompt": TokenPrompt((261,))}, r"prompt = 261: token ids lie in \[0, 261\)"),
        ({"prompt": TextPrompt("a\ud800")}, r"prompt = '\\ud800': must be valid Unicode \(position 1\)"),
        ({"prompt": ChatPrompt([])}, "messages"),
        ({"prompt": ChatPrompt([{"role": "user", "content": "\udc00"}])}, r"messages\[0\].content"),
        ({"max_tokens": 98}, r"prompt \+ max_tokens = 101: 3 prompt tokens \+ 98 max_tokens"),
        ({"max_tokens": 0}, "max_tokens = 0: must be at least 1"),
        ({"model": "other"}, "model = 'other': must be one of: toy"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"slo_ttft_ms": float("nan")}, "slo_ttft_ms"),
        ({"client_request_id": "x" * 257}, "client_request_id"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p = 0.0"),
    ],
)
async def test_bad_input_names_field_value_and_limit(
    make: Callable[..., Intake], ask: dict[str, Any], message: str
) -> None:
    prompt = ask.pop("prompt", TokenPrompt((1, 2, 3)))
    with pytest.raises(InvalidArgument, match=message):
        await check(make(), prompt, **ask)


async def test_the_size_of_a_prompt_is_bounded(make: Callable[..., Intake]) -> None:
    intake = make(max_prompt_bytes=10)
    for prompt in (TextPrompt("x" * 11), TokenPrompt((1, 2, 3)), ChatPrompt([{"role": "u", "content": "x" * 11}])):
        with pytest.raises(InvalidArgument, match="at most 10 bytes"):
            await check(intake, prompt, max_tokens=1)


async def test_a_name_is_needed_when_there_are_two_models(make: Callable[..., Intake]) -> None:
    intake = make("one", "two")
    assert (await check(intake, model="two")).model.name == "two"
    with pytest.raises(InvalidArgument, match="must be one of: one, two"):
        await check(intake)


async def test_without_any_model_nothing_can_be_served(make: Callable[..., Intake]) -> None:
    intake = make()
    intake._catalog.remove("toy")
    with pytest.raises(Unavailable, match="no model is served yet"):
        await check(intake)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model("", tmp_path, 0.0)


async def test_slos_by_default_and_impossible_ones(make: Callable[..., Intake]) -> None:
    intake = make(slo_limit_ms=1_000.0, slo_ttft_ms=300.0)
    checked = await check(intake)
    assert (checked.slo_ttft_ms, checked.slo_tpot_ms) == (300.0, 0.0)
    checked = await check(intake, slo_ttft_ms=100.0, slo_tpot_ms=20.0)
    assert (checked.slo_ttft_ms, checked.slo_tpot_ms) == (100.0, 20.0)
    for name in ("slo_ttft_ms", "slo_tpot_ms"):
        for value in (-1.0, float("nan"), float("inf"), 1_000.5):
            with pytest.raises(InvalidArgument) as caught:
                await check(intake, **{name: value})
            assert caught.value.field == name


async def test_the_budget_of_generated_tokens(make: Callable[..., Intake]) -> None:
    intake = make(max_output_tokens=20)
    assert (await check(intake)).sampling.max_tokens == 16
    chat = ChatPrompt([{"role": "user", "content": "abc"}])
    assert (await check(intake, chat)).sampling.max_tokens == 20
    with pytest.raises(InvalidArgument, match="max_tokens = 21: at most 20"):
        await check(intake, max_tokens=21)
