"""The runner checks that pool and model fit, and runs steps."""

from pathlib import Path

import pytest
import torch

from tests.unit.models import zoo
from tests.unit.models.driver import Sequence, make_pool, step_batch
from weir.engine.runner import ModelRunner
from weir.models.build import load_model


def test_logits_of_the_wanted_rows_only(tmp_path: Path) -> None:
    reference = zoo.make("llama", tmp_path)
    model = load_model(tmp_path)
    runner = ModelRunner(model, make_pool(model, 8))
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [11]]
    sequences = [Sequence(prompt, [2 * n]) for n, prompt in enumerate(prompts)]
    # The second prompt is longer than the chunk, so it gets no logits yet.
    logits = runner.run(step_batch(sequences, chunk=4)[0])
    assert (logits.shape, logits.dtype) == ((2, zoo.VOCAB), torch.float32)
    for row, prompt in ((0, prompts[0]), (1, prompts[2])):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)


def test_no_logits_wanted(tmp_path: Path) -> None:
    zoo.make("llama", tmp_path)
    model = load_model(tmp_path)
    batch, _ = step_batch([Sequence([1] * 9, [0])], chunk=4)
    assert batch.logit_rows == []
    assert ModelRunner(model, make_pool(model, 1)).run(batch).shape == (0, zoo.VOCAB)


def test_a_pool_of_another_shape_or_dtype_is_a_programmers_error(tmp_path: Path) -> None:
    zoo.make("llama", tmp_path)
    model = load_model(tmp_path)
    pool = make_pool(model, 4)
    for wrong in (pool[:, :1].contiguous(), pool.bfloat16(), pool.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(AssertionError):
            ModelRunner(model, wrong)
