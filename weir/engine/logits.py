"""What happens to one row of logits between the model and a token; all rows are [vocab] float32.

Order (as in vLLM): log-probabilities are taken from the raw logits; then min_tokens mask, logit bias,
repetition, frequency and presence penalties; then temperature, top-k, min-p, top-p; then the draw.
"""

import math

import torch

from weir.engine.output import TokenLogprobs
from weir.engine.sampling import SamplingParams
from weir.engine.sequence import Sequence

_NUCLEUS_GUESS = 256


class PenaltyState:
    """What a sequence has said, in the form penalties need; follows ``sequence.tokens`` as they grow.

    ``counts``  [vocab] float32: how often each token was generated
    ``seen``    [vocab] bool: in the prompt or generated
    """

    def __init__(self, sequence: Sequence, like: torch.Tensor) -> None:
        self.counts = torch.zeros_like(like)
        self.seen = torch.zeros_like(like, dtype=torch.bool)
        prompt = torch.tensor(sequence.tokens[: sequence.num_prompt], device=like.device)
        self.seen[prompt] = True
        self._followed = sequence.num_prompt

    def follow(self, sequence: Sequence) -> None:
        """Count the tokens generated since the last call."""
        for token in sequence.tokens[self._followed :]:
            self.counts[token] += 1
            self.seen[token] = True
        self._followed = len(sequence.tokens)


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
        state = PenaltyState(sequence, row)
        sequence.sampling_state = state
    state.follow(sequence)
    params = sequence.request.sampling
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        row.copy_(torch.where(state.seen, torch.where(row > 0, row / factor, row * factor), row))
    if params.frequency_penalty:
        row -= params.frequency_penalty * state.counts
    if params.presence_penalty:
        row -= params.presence_penalty * (state.counts > 0)


def pick(row: torch.Tensor, params: SamplingParams, draw: float) -> int | None:
    """The token at ``draw`` in [0, 1) of the distribution's inverse CDF over kept tokens in id order.

    Needs temperature > 0. Tokens exactly as likely as the last kept one are kept too, by top-k and by top-p,
    so that the result never depends on how ties are sorted. None if the logits are not finite.
    """
    scaled = (row - row.max()) / params.temperature
    ids: torch.Tensor | None = None
    if 0 < params.top_k < scaled.numel():
        threshold = torch.topk(scaled, params.top_k).values[-1]
        ids = torch.nonzero(scaled >= threshold).flatten()
        scaled = scaled[ids]
    weights = torch.exp(scaled)  # the largest is 1, so min_p compares directly
    if params.min_p > 0.0:
        weights.masked_fill_(weights < params.min_p, 0.0)
    if params.top_p < 1.0:
        weights.masked_fill_(weights < _nucleus_threshold(weights, params.top_p), 0.0)
    index = _inverse_cdf(weights, draw)
    if index is None:
        return None
    return index if ids is None else int(ids[index])


def _nucleus_threshold(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least weight in the smallest set of most likely tokens that holds ``top_p`` of the mass."""
    size = weights.numel()
    wanted = weights.sum(dtype=torch.float64) * top_p
    guess = min(size, _NUCLEUS_GUESS)
    while True:
        largest = torch.topk(weights, guess).values
        mass = torch.cumsum(largest, 0, dtype=torch.float64)
        index = int(torch.searchsorted(mass, wanted))
        if index < guess:
            return largest[index]
        if guess == size:
            return largest[-1]
        guess = min(size, guess * 16)


def _inverse_cdf(weights: torch.Tensor, draw: float) -> int | None:
    cdf = torch.cumsum(weights, 0, dtype=torch.float64)
    total = float(cdf[-1])
    if not math.isfinite(total) or total <= 0.0:
        return None
    # To the right of equal values: a token of weight 0 is never the first above the target.
    index = int(torch.searchsorted(cdf, draw * total, right=True))
    if index == cdf.numel():  # draw * total was rounded up to total
        index = int(torch.searchsorted(cdf, total))
    return index


def log_probabilities(row: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    """Of ``token`` and of the ``top`` most likely ones, best first, under the raw ``row``."""
    logs = torch.log_softmax(row, dim=0)
    best: tuple[tuple[int, float], ...] = ()
    if top:
        values, ids = torch.topk(logs, min(top, logs.numel()))
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(logs[token]), best)
