"""Greedy parity with transformers in float32, token for token, for every architecture."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.models import zoo
from tests.unit.models.driver import Sequence, generate, make_pool
from weir.models.build import load_model
from weir.models.llama import Model

BLOCK = 16
NEW = 8
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1)
PROMPT_SEED = 7


class Pair:
    """Our model, and transformers' answers to fixed prompts."""

    def __init__(self, name: str, folder: Path) -> None:
        reference: Any = zoo.make(name, folder)
        self.model: Model = load_model(folder)
        rng = random.Random(PROMPT_SEED)
        print(f"prompt seed {PROMPT_SEED}")
        self.prompts = [[rng.randrange(zoo.VOCAB) for _ in range(length)] for length in LENGTHS]
        self.answers = [zoo.greedy(reference, prompt, NEW) for prompt in self.prompts]


@pytest.fixture(scope="module", params=sorted(zoo.ZOO))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    return Pair(request.param, tmp_path_factory.mktemp("model"))


def _blocks(rng: random.Random, free: list[int], tokens: int) -> list[int]:
    """Scattered blocks, so that order and adjacency cannot help."""
    return [free.pop(rng.randrange(len(free))) for _ in range(-(-tokens // BLOCK))]


def _sequences(prompts: list[list[int]], pool_blocks: int) -> list[Sequence]:
    rng, free = random.Random(3), list(range(pool_blocks))
    return [Sequence(prompt, _blocks(rng, free, len(prompt) + NEW)) for prompt in prompts]


@pytest.mark.parametrize("chunk", [1 << 20, 7])
def test_alone(pair: Pair, chunk: int) -> None:
    pool = make_pool(pair.model, 8)
    for prompt, answer in zip(pair.prompts, pair.answers, strict=True):
        assert generate(pair.model, pool, _sequences([prompt], 8), NEW, chunk) == [answer], len(prompt)


@pytest.mark.parametrize("chunk", [1 << 20, 7])
def test_in_a_batch_of_16_mixed_lengths(pair: Pair, chunk: int) -> None:
    order = [n % len(LENGTHS) for n in range(16)]
    sequences = _sequences([pair.prompts[n] for n in order], 64)
    answers = generate(pair.model, make_pool(pair.model, 64), sequences, NEW, chunk)
    assert answers == [pair.answers[n] for n in order]


@pytest.mark.parametrize("cached", [BLOCK, 2 * BLOCK, 3 * BLOCK])
def test_over_a_shared_prefix(pair: Pair, cached: int) -> None:
    """Partial and full hits: the second sequence starts with the first one's blocks and their KV."""
    prompt, answer = pair.prompts[-1], pair.answers[-1]
    pool = make_pool(pair.model, 16)
    (first,) = _sequences([prompt], 8)
    assert generate(pair.model, pool, [first], NEW) == [answer]
    shared = first.blocks[: cached // BLOCK]
    second = Sequence(prompt, shared + [8, 11, 9, 10][: len(first.blocks) - len(shared)], computed=cached)
    assert generate(pair.model, pool, [second], NEW) == [answer]
