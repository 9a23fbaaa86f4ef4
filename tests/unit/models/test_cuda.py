"""The GPU back end's index and padding logic, without a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unit.models import zoo
from weir.engine.batch import Batch
from weir.errors import InvalidArgument
from weir.models.build import load_model

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_interpreted_kernels_give_the_tokens_of_transformers() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unit.models.interpreted_cuda"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line for line in result.stderr.splitlines() if line.endswith("same")] == [
        "llama: same",
        "qwen3: same",
        "qwen2-moe: same",
    ]


@needs_triton
def test_graph_sizes() -> None:
    from weir.models.decode_graphs import graph_size, is_plain_decode

    assert [graph_size(n) for n in (1, 3, 17, 128, 129)] == [1, 4, 24, 128, None]
    decode = Batch([1, 2], [3, 4], [3, 20], [1, 1], [4, 5], [[0], [1]], [0, 1], 2)
    mixed = Batch([1, 2, 3], [3, 0, 1], [3, 16, 17], [1, 2], [4, 2], [[0], [1]], [0, 1], 1)
    assert (is_plain_decode(decode), is_plain_decode(mixed)) == (True, False)


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_device_that_is_not_there(tmp_path: Path, device: str) -> None:
    import torch

    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    zoo.make("llama", tmp_path)
    with pytest.raises(InvalidArgument, match="must be cpu, or cuda on a machine where torch finds a GPU"):
        load_model(tmp_path, device=device)


@needs_triton
def test_windows_are_refused(tmp_path: Path) -> None:
    import torch

    from weir.models.config import load_config
    from weir.models.cuda import cuda_backend

    zoo.make("mistral-window", tmp_path)
    with pytest.raises(InvalidArgument, match=r"a sliding window \(21 tokens\) needs device cpu"):
        cuda_backend(load_config(tmp_path), torch.device("cpu"))
