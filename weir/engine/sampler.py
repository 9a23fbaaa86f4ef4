"""Tokens from logits, row by row, so that a row's token does not depend on what else is in the batch."""

import math
from dataclasses import dataclass

import torch

from weir.engine.logits import is_plain_greedy, log_probabilities, pick, process
from weir.engine.output import TokenLogprobs
from weir.engine.sequence import Sequence

INVALID_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Samples:
    """One token a row, INVALID_TOKEN where the logits are not finite; logprobs where they were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Stateless but for what it keeps in ``Sequence.sampling_state``."""

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> Samples:
        """The next token of each sequence from its row of ``logits`` [len(sequences), vocab] float32."""
        assert logits.shape[0] == len(sequences), (logits.shape, len(sequences))
        if not sequences:
            return Samples([], [])
        plain = [is_plain_greedy(sequence) for sequence in sequences]
        tokens = _largest(logits) if any(plain) else [INVALID_TOKEN] * len(sequences)
        logprobs: list[TokenLogprobs | None] = [None] * len(sequences)
        for i, sequence in enumerate(sequences):
            if not plain[i]:
                tokens[i] = self._sample_row(logits[i], sequence)
            wanted = sequence.request.sampling.logprobs
            if wanted is not None and tokens[i] != INVALID_TOKEN:
                logprobs[i] = log_probabilities(logits[i], tokens[i], wanted)
        return Samples(tokens, logprobs)

    def _sample_row(self, row: torch.Tensor, sequence: Sequence) -> int:
        params = sequence.request.sampling
        row = process(row, sequence)
        if params.greedy:
            return _largest(row.unsqueeze(0))[0]
        assert params.seed is not None, sequence.key
        token = pick(row, params, sequence.num_generated)
        return INVALID_TOKEN if token is None else token


def _largest(logits: torch.Tensor) -> list[int]:
    """Index of each row's maximum, the first of equals; INVALID_TOKEN for a row with NaN or nothing finite."""
    if logits.device.type == "cpu":  # numpy's argmax is ten times as fast as torch's here
        array = logits.numpy()
        tokens: list[int] = array.argmax(axis=1).tolist()
        values: list[float] = array[range(len(tokens)), tokens].tolist()
    else:
        largest, indices = torch.max(logits, dim=1)
        tokens, values = indices.tolist(), largest.tolist()
    for i, value in enumerate(values):
        if not math.isfinite(value):
            tokens[i] = INVALID_TOKEN
    return tokens
