"""Plain references for the tests: the sampler in numpy, row by row, and generation as a bare loop."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from weir.engine.randomness import random_bits
from weir.engine.request import EngineRequest
from weir.engine.sampling import SamplingParams

Row = npt.NDArray[np.float32]


def stops_of(request: EngineRequest) -> set[int]:
    """Tokens that end the request."""
    eos = set() if request.sampling.ignore_eos else set(request.eos_token_ids)
    return eos | set(request.sampling.stop_token_ids)


def processed(row: Row, prompt: list[int], generated: list[int], params: SamplingParams, stops: set[int]) -> Row:
    """Mask, bias and penalties, one token at a time."""
    out = row.astype(np.float32).copy()
    if len(generated) < params.min_tokens:
        for token in stops:
            out[token] = -np.inf
    for token, bias in params.logit_bias.items():
        out[token] += np.float32(bias)
    for token in set(prompt) | set(generated):
        if params.repetition_penalty != 1.0:
            factor = np.float32(params.repetition_penalty)
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(generated):
        out[token] -= np.float32(params.frequency_penalty * generated.count(token))
        out[token] -= np.float32(params.presence_penalty)
    return out


def distribution(row: Row, params: SamplingParams) -> npt.NDArray[np.float64]:
    """Probabilities after temperature and filters, by full sorts; float64."""
    x = (row.astype(np.float64) - row.max()) / params.temperature
    keep = np.ones(len(x), dtype=bool)
    if 0 < params.top_k < len(x):
        keep &= x >= np.sort(x)[::-1][params.top_k - 1]
    weights = np.where(keep, np.exp(x), 0.0)
    weights[weights < params.min_p] = 0.0
    if params.top_p < 1.0:
        descending = np.sort(weights)[::-1]
        mass = np.cumsum(descending)
        last = int(np.argmax(mass >= params.top_p * mass[-1]))
        weights[weights < descending[last]] = 0.0
    probabilities: npt.NDArray[np.float64] = weights / weights.sum()
    return probabilities


def choose(row: Row, prompt: list[int], generated: list[int], request: EngineRequest) -> int:
    """The next token."""
    params = request.sampling
    row = processed(row, prompt, generated, params, stops_of(request))
    if params.greedy:
        return int(np.argmax(row))
    assert params.seed is not None
    return gumbel_max(distribution(row, params), params.seed, len(generated))


def gumbel_max(probabilities: npt.NDArray[np.float64], seed: int, position: int) -> int:
    """The token with the largest log-probability plus Gumbel noise; float64."""
    u = (random_bits(seed, position, len(probabilities)).astype(np.float64) + 0.5) / 2.0**32
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(probabilities) - np.log(-np.log(u))))


def generate(model: Callable[[list[int]], Row], request: EngineRequest) -> list[int]:
    """All generated tokens of the request, those it came with included."""
    prompt, generated = list(request.prompt), list(request.generated)
    while len(generated) < request.sampling.max_tokens:
        token = choose(model(prompt + generated), prompt, generated, request)
        generated.append(token)
        if token in stops_of(request):
            break
    return generated
