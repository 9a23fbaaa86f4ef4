"""One engine step as the model sees it: plain integers, no tensors, so that planning stays pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batch:
    """S sequences with T new tokens in all, sequence after sequence; decode sequences come first.

    ``token_ids``, ``positions``  [T]; a position counts from 0 at the start of its sequence
    ``slots``         [T] where a token's K and V go: block * block_size + offset
    ``query_lens``    [S] new tokens of each sequence in this step, >= 1; the first ``num_decodes`` are 1
    ``context_lens``  [S] tokens whose KV is in the pool after this step (cached + new)
    ``block_tables``  [S] the sequence's blocks in order; covers context_lens
    ``logit_rows``    the sequences (indices in [0, S), ascending) whose last token needs logits
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    query_lens: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    logit_rows: list[int]
    num_decodes: int

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.positions) == len(self.slots) == sum(self.query_lens)
        assert len(self.query_lens) == len(self.context_lens) == len(self.block_tables)
        assert all(q == 1 for q in self.query_lens[: self.num_decodes])

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)
