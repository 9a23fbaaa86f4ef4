"""The GPU back end on the CPU, through Triton's interpreter: run with TRITON_INTERPRET=1, exits 0 when all agree.

A process of its own, since the interpreter has to be chosen before Triton is first imported.
"""

import random
import sys
import tempfile
from pathlib import Path

import torch

from tests.unit.models import zoo
from tests.unit.models.driver import Sequence, generate, make_pool, step_batch
from weir.models.build import DTYPES, assemble
from weir.models.config import load_config
from weir.models.cuda import CudaAttention, cuda_backend
from weir.models.decode_graphs import DecodeGraphs, DecodeInputs
from weir.models.llama import Model
from weir.models.loader import Weights

CPU = torch.device("cpu")
NEW = 3
LENGTHS = (1, 15, 17)
SEED = 9


def load_interpreted(folder: Path) -> Model:
    """The model on the GPU back end, its tensors on the CPU."""
    config = load_config(folder)
    with torch.inference_mode():
        return assemble(config, Weights(folder, config, DTYPES["float32"], CPU), cuda_backend(config, CPU))


def check_greedy(name: str, folder: Path) -> None:
    """Whole prompts and chunks over a prefix, decodes and prefills mixed, against transformers."""
    reference = zoo.make(name, folder)
    model = load_interpreted(folder)
    rng = random.Random(SEED)
    prompts = [[rng.randrange(zoo.VOCAB) for _ in range(length)] for length in LENGTHS]
    answers = [zoo.greedy(reference, prompt, NEW) for prompt in prompts]
    for chunk in (1 << 20, 7):
        sequences = [Sequence(prompt, [2 * n, 2 * n + 1]) for n, prompt in enumerate(prompts)]
        got = generate(model, make_pool(model, 2 * len(prompts)), sequences, NEW, chunk)
        assert got == answers, (name, chunk, got, answers)


def check_padded_decode(folder: Path) -> None:
    """What a graph captures gives the same logits as a plain step, and touches no other KV."""
    model = load_interpreted(folder)
    assert isinstance(model.attention, CudaAttention)
    pool = make_pool(model, 6)
    sequences = [Sequence([5, 6, 7], [4, 0]), Sequence(list(range(20)), [3, 1])]
    generate(model, pool, sequences, 1)
    batch, _ = step_batch(sequences, 1)
    graphs = DecodeGraphs(model, padded_pool := pool.clone())
    inputs = DecodeInputs.empty(4, 16, CPU)
    inputs.fill(batch)
    with torch.inference_mode():
        padded = graphs.compute(inputs)
    plain = model.forward(batch, pool)
    torch.testing.assert_close(padded[:2], plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(padded_pool, pool, atol=1e-4, rtol=1e-4, equal_nan=True)


def main() -> None:
    print(f"seed {SEED}")
    for name in ("llama", "qwen3", "qwen2-moe"):
        with tempfile.TemporaryDirectory() as folder:
            check_greedy(name, Path(folder))
            if name == "llama":
                check_padded_decode(Path(folder))
        print(f"{name}: same", file=sys.stderr)


if __name__ == "__main__":
    main()
