"""The sampler against a plain numpy reference, and its promises about batches, ties and bad logits."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.unit.engine.fake_model import EOS, VOCAB, make_request
from tests.unit.engine.reference import choose, distribution, processed
from weir.engine.logits import log_probabilities, pick, process
from weir.engine.request import EngineRequest
from weir.engine.sampler import INVALID_TOKEN, Sampler
from weir.engine.sampling import SamplingParams
from weir.engine.sequence import Sequence

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=1.0, seed=1),
    "cold": SamplingParams(temperature=0.05, seed=2),
    "hot": SamplingParams(temperature=5.0, seed=3),
    "top_k": SamplingParams(temperature=1.0, top_k=5, seed=4),
    "top_k_off": SamplingParams(temperature=1.0, top_k=-1, seed=4),
    "top_k_all": SamplingParams(temperature=1.0, top_k=10_000, seed=4),
    "top_p": SamplingParams(temperature=1.0, top_p=0.6, seed=5),
    "top_p_tiny": SamplingParams(temperature=1.0, top_p=1e-9, seed=5),
    "min_p": SamplingParams(temperature=1.0, min_p=0.2, seed=6),
    "all_filters": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05, seed=7),
    "presence": SamplingParams(temperature=0.0, presence_penalty=2.0),
    "frequency": SamplingParams(temperature=0.9, frequency_penalty=1.5, seed=8),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.7),
    "encourage": SamplingParams(temperature=0.9, repetition_penalty=0.5, presence_penalty=-1.0, seed=9),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: 5.0, 4: -100.0}, seed=10),
    "min_tokens": SamplingParams(temperature=0.0, min_tokens=9, max_tokens=20, stop_token_ids=(5, 6)),
}


def make_row(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy((np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32))


def make_sequence(params: SamplingParams, generated: tuple[int, ...] = (3, 9, 9, 11, 4)) -> Sequence:
    params = params if params.max_tokens > len(generated) else SamplingParams(temperature=0.0)
    request = make_request("s", [3, 5, 7, 7], generated=generated, sampling=params)
    return Sequence(request, 0, 0.0)


def expected(row: torch.Tensor, sequence: Sequence) -> int:
    return choose(row.numpy(), [3, 5, 7, 7], sequence.tokens[4:], sequence.request)


@pytest.mark.parametrize("name", PARAMS)
def test_rows_agree_with_the_reference(name: str) -> None:
    for seed in range(40):
        sequence, row = make_sequence(PARAMS[name]), make_row(seed)
        assert Sampler().sample(row.unsqueeze(0), [sequence]).tokens == [expected(row, sequence)], seed


@pytest.mark.parametrize("vocab", [700, 20_000])
@pytest.mark.parametrize("name", ["plain", "hot", "top_p", "all_filters", "min_p"])
def test_large_vocabularies_agree_with_the_reference(name: str, vocab: int) -> None:
    flat = SamplingParams(temperature=20.0, top_p=0.97, seed=3)  # a nucleus far beyond the first guess
    for params in (PARAMS[name], flat):
        for seed in range(8):
            sequence, row = make_sequence(params), make_row(seed, vocab)
            assert Sampler().sample(row.unsqueeze(0), [sequence]).tokens == [expected(row, sequence)], seed


def test_a_row_does_not_depend_on_the_batch_around_it() -> None:
    rows = [make_row(seed, 5000) for seed in range(len(PARAMS))]
    alone = [
        Sampler().sample(row.unsqueeze(0), [make_sequence(params)]).tokens[0]
        for row, params in zip(rows, PARAMS.values(), strict=True)
    ]
    sequences = [make_sequence(params) for params in PARAMS.values()]
    assert Sampler().sample(torch.stack(rows), sequences).tokens == alone
    backwards = Sampler().sample(torch.stack(rows[::-1]), sequences[::-1]).tokens
    assert backwards[::-1] == alone


@pytest.mark.parametrize("name", ["plain", "cold", "hot", "top_k", "top_p", "min_p", "all_filters"])
def test_tokens_come_as_often_as_their_probability_says(name: str) -> None:
    row, params, n = make_row(1), PARAMS[name], 5000
    tokens = [pick(row, params, position) for position in range(n)]
    counts = np.bincount(np.array(tokens, dtype=np.int64), minlength=VOCAB)
    expected_counts = distribution(row.numpy(), params) * n
    assert counts[expected_counts == 0].sum() == 0
    rare = expected_counts < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected_counts[~rare], expected_counts[rare].sum() + 1e-9)
    chi_square, freedom = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 1e-3


def test_tokens_of_neighbouring_positions_are_independent() -> None:
    row, params, n = torch.zeros(5), SamplingParams(temperature=1.0, seed=11), 10_000
    tokens = np.array([pick(row, params, position) for position in range(n + 1)])
    pairs = np.bincount(tokens[:-1] * 5 + tokens[1:], minlength=25)
    assert float(((pairs - n / 25) ** 2 / (n / 25)).sum()) < 51.2  # 24 degrees of freedom, p = 0.001


def test_drawn_tokens_are_pinned() -> None:
    row = torch.arange(1000, dtype=torch.float32).remainder(13)
    params = SamplingParams(temperature=1.5, seed=42)
    assert [pick(row, params, position) for position in range(8)] == [805, 701, 51, 64, 987, 943, 207, 467]


def test_filters_do_not_shift_the_noise() -> None:
    """A token that wins among all wins among any that hold it."""
    row, filtered = make_row(4), SamplingParams(temperature=1.0, top_k=9, top_p=0.9, min_p=0.01, seed=1)
    kept = np.flatnonzero(distribution(row.numpy(), filtered))
    same = 0
    for position in range(300):
        token = pick(row, PARAMS["plain"], position)
        if token in kept:
            assert pick(row, filtered, position) == token
            same += 1
    assert 200 < same < 300


def inverse_cdf(row: npt.NDArray[np.float32], draw: float) -> int:
    cdf = np.cumsum(np.exp(row - row.max()), dtype=np.float64)
    return int(np.searchsorted(cdf, draw * cdf[-1]))


@pytest.mark.parametrize("coherent", [False, True])
def test_rounding_in_the_logits_does_not_change_tokens_of_flat_rows(coherent: bool) -> None:
    """As between matrix products of different shapes. An inverse CDF gathers coherent errors over all tokens."""
    vocab = 49_152
    rng = np.random.default_rng(2024)
    wave = np.sin(np.arange(vocab) * (2 * math.pi / vocab)).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=77)
    changed_by_inverse_cdf = 0
    for position in range(200):
        row = (rng.standard_normal(vocab) * 0.3 + 5).astype(np.float32)
        noise = wave if coherent else rng.standard_normal(vocab, dtype=np.float32)
        other = (row + row * noise * np.float32(1e-6)).astype(np.float32)
        draw = rng.random()
        assert not np.array_equal(other, row)
        token = pick(torch.from_numpy(row), params, position)
        assert pick(torch.from_numpy(other), params, position) == token, position
        changed_by_inverse_cdf += inverse_cdf(row, draw) != inverse_cdf(other, draw)
    assert not coherent or changed_by_inverse_cdf > 0, "the test must be able to see what it guards against"


def test_tokens_of_no_weight_are_never_drawn() -> None:
    row = torch.full((10,), -math.inf)
    row[3], row[6] = 1.0, 2.0
    assert {pick(row, SamplingParams(temperature=1.0, seed=1), position) for position in range(200)} == {3, 6}
    row[0], row[9] = -200.0, -90.0
    assert {pick(row, SamplingParams(temperature=1.0, seed=1), position) for position in range(200)} == {3, 6}


@pytest.mark.parametrize("temperature", [1e-30, 1e-46, 1e-300])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_the_coldest_temperatures_take_the_largest(temperature: float, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=1)
    assert {pick(make_row(5), params, position) for position in range(50)} == {int(make_row(5).argmax())}


def test_ties_at_the_edge_of_top_k_and_top_p_are_all_kept() -> None:
    row = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, 0.0])
    for params in (SamplingParams(top_k=2, seed=1), SamplingParams(top_p=0.5, seed=1)):
        kept = {pick(row, params, position) for position in range(200)}
        assert kept == {1, 2, 3, 4}


def test_greedy_takes_the_first_of_equals() -> None:
    row = torch.zeros(2, 9)
    row[0, [4, 7]] = 1.0
    assert Sampler().sample(row, [make_sequence(PARAMS["greedy"])] * 2).tokens == [4, 0]


@pytest.mark.parametrize("name", ["greedy", "plain", "top_p", "top_k", "presence"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_reported(name: str, value: float) -> None:
    row = make_row(1)
    row[5] = value
    assert Sampler().sample(row.unsqueeze(0), [make_sequence(PARAMS[name])]).tokens == [INVALID_TOKEN]


def test_masking_by_the_model_is_not_an_error() -> None:
    row = make_row(1)
    row[:40] = -math.inf
    for name in ("greedy", "plain", "top_p"):
        assert Sampler().sample(row.unsqueeze(0), [make_sequence(PARAMS[name])]).tokens[0] >= 40


def test_processing_agrees_with_the_reference_as_tokens_come() -> None:
    params = SamplingParams(
        max_tokens=50,
        min_tokens=6,
        temperature=0.0,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
        logit_bias={8: 1.0},
    )
    sequence = make_sequence(params, generated=(4,))
    for step in range(10):
        row = make_row(step)
        before = row.clone()
        want = processed(row.numpy(), [3, 5, 7, 7], sequence.tokens[4:], params, {EOS})
        np.testing.assert_allclose(process(row, sequence).numpy(), want, rtol=1e-5, atol=1e-6)
        assert torch.equal(row, before)
        sequence.tokens.append(3 + step % 4)


def test_logprobs_are_of_the_raw_row_whatever_the_sampling() -> None:
    row = make_row(2)
    logs = torch.log_softmax(row, 0)
    for wanted, top in ((0, 0), (4, 4), (20, 20)):
        params = SamplingParams(temperature=3.0, seed=1, top_k=3, logprobs=wanted, logit_bias={2: 50.0})
        samples = Sampler().sample(row.unsqueeze(0), [make_sequence(params)])
        entry = samples.logprobs[0]
        assert samples.tokens == [2]
        assert entry is not None
        assert entry.logprob == float(logs[2])
        assert [token for token, _ in entry.top] == torch.topk(logs, top).indices.tolist()
    assert Sampler().sample(row.unsqueeze(0), [make_sequence(PARAMS["plain"])]).logprobs == [None]


def test_more_top_logprobs_than_tokens_gives_all_tokens() -> None:
    assert len(log_probabilities(make_row(1, 6), 0, 20).top) == 6


def test_no_rows_no_tokens() -> None:
    assert Sampler().sample(torch.empty(0, VOCAB), []).tokens == []


def test_a_request_without_stops_needs_no_mask() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=9, ignore_eos=True)
    request = EngineRequest(make_request("s", [3]).key, (3,), (), params, make_request("s", [3]).mode)
    row = make_row(3)
    assert Sampler().sample(row.unsqueeze(0), [Sequence(request, 0, 0.0)]).tokens == [int(row.argmax())]
