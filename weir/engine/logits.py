"""What happens to one row of logits between the model and a token; all rows are [vocab] float32.

Order (as in vLLM): log-probabilities are taken from the raw logits; then min_tokens mask, logit bias,
repetition, frequency and presence penalties; then temperature, top-k, min-p, top-p; then the draw.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from weir.engine.output import TokenLogprobs
from weir.engine.randomness import exponentials, random_bits
from weir.engine.sampling import SamplingParams
from weir.engine.sequence import Sequence

_COLDEST = 1e-30  # float32 can hold it; 0 / 0 would leave nothing to draw


class PenaltyState:
    """What a sequence has said, in the form penalties need; follows ``sequence.tokens`` as they grow.

    Sparse, because a row has many times more tokens than a sequence: each token seen (in the prompt or
    generated) has a slot with its id and how often it was generated.
    """

    def __init__(self, sequence: Sequence) -> None:
        prompt = sorted(set(sequence.tokens[: sequence.num_prompt]))
        size = len(prompt) + sequence.request.sampling.max_tokens
        self._slots = {token: slot for slot, token in enumerate(prompt)}
        self._ids = np.zeros(size, dtype=np.int64)
        self._ids[: len(prompt)] = prompt
        self._counts = np.zeros(size, dtype=np.float32)
        self._followed = sequence.num_prompt

    def follow(self, sequence: Sequence) -> None:
        """Count the tokens generated since the last call."""
        for token in sequence.tokens[self._followed :]:
            slot = self._slots.setdefault(token, len(self._slots))
            self._ids[slot] = token
            self._counts[slot] += 1
        self._followed = len(sequence.tokens)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of the tokens seen, and how often each was generated: int64 and float32, the same length."""
        size = len(self._slots)
        ids, counts = torch.from_numpy(self._ids[:size]), torch.from_numpy(self._counts[:size])
        return ids.to(device), counts.to(device)


def has_penalties(params: SamplingParams) -> bool:
    """Whether any of the three penalties is on."""
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0


def is_plain_greedy(sequence: Sequence) -> bool:
    """Whether the token is the largest raw logit."""
    params = sequence.request.sampling
    if not params.greedy or params.logit_bias or has_penalties(params):
        return False
    return not (params.min_tokens > sequence.num_generated and sequence.stops)


def process(row: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """The row with mask, bias and penalties of ``sequence`` applied; ``row`` itself stays as it is."""
    params = sequence.request.sampling
    row = row.clone()
    if params.min_tokens > sequence.num_generated and sequence.stops:
        row[torch.tensor(sorted(sequence.stops), device=row.device)] = -math.inf
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    if has_penalties(params):
        _penalise(row, sequence)
    return row


def _penalise(row: torch.Tensor, sequence: Sequence) -> None:
    state = sequence.sampling_state
    if not isinstance(state, PenaltyState):
        state = PenaltyState(sequence)
        sequence.sampling_state = state
    state.follow(sequence)
    ids, counts = state.tensors(row.device)
    params, seen = sequence.request.sampling, row[ids]
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        seen = torch.where(seen > 0, seen / factor, seen * factor)
    seen = seen - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    row[ids] = seen


def pick(row: torch.Tensor, params: SamplingParams, position: int) -> int | None:
    """The token drawn from the row's distribution by the randomness of (``params.seed``, ``position``).

    Needs temperature > 0 and a seed. Tokens exactly as likely as the last kept one are kept too, by top-k and
    by top-p, so that the result never depends on how ties are sorted. None if the logits are not finite.
    """
    assert params.seed is not None
    largest = float(row.max())
    if not math.isfinite(largest):
        return None
    bits = random_bits(params.seed, position, row.numel())
    ids: torch.Tensor | None = None
    if 0 < params.top_k < row.numel():
        ids = _top_k(row, params.top_k)
        row = row[ids]
    temperature = max(params.temperature, _COLDEST)
    weights = row.sub(largest).div_(temperature).exp_()  # the largest is 1: min_p compares directly
    if params.min_p > 0.0:
        weights.masked_fill_(weights < params.min_p, 0.0)
    if params.top_p < 1.0:
        kept = _top_p(weights, params.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    if ids is None:
        return _first_to_arrive(weights, bits)
    return int(ids[_first_to_arrive(weights, bits.take(ids.cpu().numpy()))])


def _top_k(row: torch.Tensor, top_k: int) -> torch.Tensor:
    """Ids, ascending, of the ``top_k`` largest and of those equal to the least of them."""
    values, ids = torch.topk(row, top_k + 1)
    if values[-1] < values[-2]:
        return ids[:-1].sort().values
    return torch.nonzero(row >= values[-2]).flatten()


def _top_p(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Ids, ascending, of the smallest set of most likely tokens with ``top_p`` of the mass, and of those equal
    to the least of them.

    Only few tokens are sorted: those below (1 - top_p) / vocab of the mass hold less than 1 - top_p together,
    so none of them is in the set.
    """
    total = float(weights.sum(dtype=torch.float64))
    ids = torch.nonzero(weights >= total * (1.0 - top_p) / weights.numel()).flatten()
    candidates = weights[ids]
    descending = _sorted_descending(candidates)
    mass = torch.cumsum(descending, 0, dtype=torch.float64)
    last = min(int(torch.searchsorted(mass, total * top_p)), descending.numel() - 1)
    return ids[candidates >= descending[last]]


def _sorted_descending(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu":  # numpy sorts float32 with SIMD: thirty times as fast as torch here
        return torch.from_numpy(np.sort(values.numpy())).flip(0)
    return values.sort(descending=True).values


def _first_to_arrive(weights: torch.Tensor, bits: npt.NDArray[np.uint32]) -> int:
    """Index drawn with probability in proportion to ``weights``, whose largest is 1.

    The exponential race, the Gumbel-max draw without its second logarithm: index i arrives after
    exponential / weight. Each has its own randomness, so a rounding error in the weights changes the winner
    only where the first two arrive that close together, whatever the shape of the distribution. Weight 0
    never wins: the largest arrives.
    """
    times = torch.from_numpy(exponentials(bits))
    if weights.device.type == "cpu":  # numpy's argmax is ten times as fast as torch's here
        return int(weights.div_(times).numpy().argmax())
    return int(weights.div_(times.to(weights.device)).argmax())


def log_probabilities(row: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    """Of ``token`` and of the ``top`` most likely ones, best first, under the raw ``row``."""
    logs = torch.log_softmax(row, dim=0)
    best: tuple[tuple[int, float], ...] = ()
    if top:
        values, ids = torch.topk(logs, min(top, logs.numel()))
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(logs[token]), best)
