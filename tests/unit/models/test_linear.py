"""Both linear back ends against plain torch."""

import pytest
import torch
import torch.nn.functional as F

from weir.models.linear import PackedBackend, TorchBackend, choose_backend, joined_bias, packing_works, product

BACKENDS = [TorchBackend(), *([PackedBackend()] if packing_works() else [])]
SEED = 3


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> TorchBackend | PackedBackend:
    torch.manual_seed(SEED)
    chosen: TorchBackend | PackedBackend = request.param
    return chosen


@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_against_torch(backend: TorchBackend | PackedBackend, tokens: int, biased: bool) -> None:
    x, residual = torch.randn(tokens, 48), torch.randn(tokens, 80)
    gate, up = torch.randn(80, 48) / 7, torch.randn(80, 48) / 7
    gate_bias, up_bias = (torch.randn(80), torch.randn(80)) if biased else (None, None)
    linear, gated = backend.linear(gate, gate_bias), backend.gated(gate, up, gate_bias, up_bias)
    plain = F.linear(x, gate, gate_bias)
    torch.testing.assert_close(linear(x), plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(linear.plus(x, residual), plain + residual, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gated(x), F.silu(plain) * F.linear(x, up, up_bias), atol=1e-5, rtol=1e-5)


def test_the_residual_is_not_modified(backend: TorchBackend | PackedBackend) -> None:
    x, residual = torch.randn(3, 48), torch.randn(3, 80)
    kept = residual.clone()
    backend.linear(torch.randn(80, 48), None).plus(x, residual)
    torch.testing.assert_close(residual, kept, atol=0, rtol=0)


def test_choice() -> None:
    cpu = torch.device("cpu")
    assert choose_backend(torch.float32, cpu).name == ("packed" if packing_works() else "torch")
    assert choose_backend(torch.bfloat16, cpu).name == "torch"


@pytest.mark.skipif(not packing_works(), reason="this torch has no oneDNN linear")
def test_product_takes_contiguous_and_transposed() -> None:
    torch.manual_seed(SEED)
    x, y = torch.randn(5, 32), torch.randn(32, 9)
    torch.testing.assert_close(product(x, y.t()), x @ y, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(product(x, y.t().contiguous()), x @ y, atol=1e-5, rtol=1e-5)


def test_joined_bias() -> None:
    assert joined_bias(None, None) is None
    joined = joined_bias(torch.tensor([1.0]), torch.tensor([2.0, 3.0]))
    assert joined is not None
    assert joined.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(AssertionError):
        joined_bias(None, torch.tensor([1.0]))
