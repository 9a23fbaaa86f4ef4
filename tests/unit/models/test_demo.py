"""The real demo model gives the very tokens that transformers gives in float32."""

import importlib.metadata
import os
import random
from pathlib import Path

import pytest
import torch

from tests.unit.models.driver import Sequence, generate, make_pool
from weir.errors import ModelError
from weir.models import demo
from weir.models.build import load_model
from weir.models.llama import Model

EOS = 2
# "<|im_start|>user\nName the planets of the solar system.<|im_end|>\n<|im_start|>assistant\n"
QUESTION = [1, 4093, 198, 5820, 260, 9244, 282, 260, 3693, 817, 30, 2, 198, 1, 520, 9531, 198]
# The same behind the system message that the model's own template puts before a chat that has none.
SYSTEM = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
WITH_SYSTEM = [*SYSTEM, 2, 198, *QUESTION]
# Made with transformers 5.24, float32, greedy.
ANSWER = [504, 9244, 282, 260, 3693, 817, 359, 42, 198, 198, 61, 9532, 28, 16293, 28, 2591, 28, 7621, 28, 14713]
ANSWER += [28, 16440, 28, 36985, 28, 30461, 28, 284, 24254, 30, 2]
ANSWER_WITH_SYSTEM = [504, 9244, 282, 260, 3693, 817, 359, 42, 1116, 33, 30, 2591, 42, 378, 805, 3925, 338, 6569]
ANSWER_WITH_SYSTEM += [1029, 28, 23440, 260, 5430, 30, 1116, 34, 30, 7621, 42, 378]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kept between runs when CI names a cache."""
    root = os.environ.get("WEIR_TEST_CACHE")
    return demo.demo_model_dir(Path(root) if root else tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1 << 20, 7])
def test_the_demo_chat(model: Model, chunk: int) -> None:
    pool = make_pool(model, 16)
    alone = generate(model, pool, [Sequence(QUESTION, [5, 3, 9])], 40, chunk, EOS)
    assert alone == [ANSWER]
    together = [Sequence(QUESTION, [5, 3, 9]), Sequence(WITH_SYSTEM, [0, 8, 2, 11, 7])]
    assert generate(model, pool, together, len(ANSWER_WITH_SYSTEM), chunk, EOS) == [
        ANSWER[: len(ANSWER_WITH_SYSTEM)],
        ANSWER_WITH_SYSTEM,
    ]


@pytest.mark.slow
def test_logits_equal_transformers_on_the_converted_folder(model: Model, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = random.Random(11)
    print("seed 11")
    prompt = [rng.randrange(49152) for _ in range(150)]
    answer = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None)
    ours = generate(model, make_pool(model, 16), [Sequence(prompt, list(range(16))[::-1])], 12, chunk=64)
    assert ours == [answer[0, 150:].tolist()]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ModelError, match=r'pip install "weir\[demo\]"'):
        demo.demo_model_dir(tmp_path)
