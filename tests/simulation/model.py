"""A model whose tokens are a function of the whole prefix as found in the pool, and what it must answer.

The KV of a token is a hash of the token, its position and the KV before it, 8 bytes in the real pool. The next
token's logits are a function of all KV gathered through the block table: foreign, missing, moved or torn KV
changes what is generated.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from weir.balance.profile import Fit, Profile
from weir.clock import Clock
from weir.config import WorkerConfig
from weir.engine.batch import Batch
from weir.engine.request import EngineRequest, Mode
from weir.engine.sampler import Sampler
from weir.engine.sampling import SamplingParams
from weir.engine.sequence import Sequence
from weir.ids import RequestKey
from weir.kvcache.layout import KvLayout
from weir.kvcache.pool import KvPool
from weir.lifecycle import FinishReason
from weir.services.worker.parts import WorkerParts, assemble
from weir.transfer.fingerprint import Fingerprint

BLOCK = 4
VOCAB = 48
EOS = 2
CONTEXT = 120
MODEL = "sim"
PLANTED = "planted"
"""In the text of failures that are part of the schedule."""
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, block_size=BLOCK, dtype_bytes=4)
TOKENIZER = "t"

_ROWS = np.random.default_rng(20_240_601).standard_normal((512, VOCAB)).astype(np.float32)


_MASK = (1 << 64) - 1


def _mix64(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def kv_of(token: int, position: int, before: int) -> int:
    """The KV of ``token`` after a prefix that ends in the KV ``before``."""
    return _mix64(before ^ (token + 1) * 0x9E3779B97F4A7C15 ^ (position + 1) * 0xC2B2AE3D27D4EB4F)


def root_of(weights: int) -> int:
    """The KV before the first token: other weights, other KV of everything."""
    return _mix64(weights) if weights else 0


def fingerprint_of(weights: int) -> Fingerprint:
    """Of a worker with these weights."""
    return Fingerprint(f"w{weights}", "SimModel", "float32", "float32", 1, 1, 1, BLOCK, 1, TOKENIZER, "", "none")


def logits_of(kv: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """[VOCAB] from the KV of the whole prefix."""
    digest = xxhash.xxh3_64_intdigest(kv)
    row: np.ndarray[tuple[int], np.dtype[np.float32]] = _ROWS[digest % 512] + 0.5 * _ROWS[(digest >> 20) % 512]
    return row


class PoolModel:
    """A Runner on a real pool. ``fail_next``: a step that raises; ``spoil_next``: one without finite logits."""

    def __init__(self, pool: KvPool, weights: int) -> None:
        self._root = root_of(weights)
        self._kv = pool.data.numpy().reshape(-1).view(np.uint64)
        self._guard = pool.guard
        self._written: dict[int, int] = {}
        self.fail_next = False
        self.spoil_next = False

    def run(self, batch: Batch) -> torch.Tensor:
        """Write the batch's KV into its slots; logits of the rows that want them."""
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError(f"{PLANTED} failure of the model")
        at = 0
        for table, query, context in zip(batch.block_tables, batch.query_lens, batch.context_lens, strict=True):
            self._extend(table, batch.token_ids[at : at + query], context - query)
            at += query
        if not batch.logit_rows:
            return torch.empty(0, VOCAB)
        blocks = self._kv.reshape(-1, BLOCK)
        rows = []
        for row in batch.logit_rows:
            found = blocks[batch.block_tables[row]].reshape(-1)[: batch.context_lens[row]]
            rows.append(logits_of(found.tobytes()))
        logits = torch.from_numpy(np.stack(rows))
        if self.spoil_next:
            self.spoil_next = False
            logits[0] = torch.nan
        return logits

    def _extend(self, table: list[int], tokens: list[int], start: int) -> None:
        before = int(self._kv[_slot(table, start - 1)]) if start else self._root
        for position, token in enumerate(tokens, start):
            slot = _slot(table, position)
            generation = self._guard.generation(slot // BLOCK)
            assert self._written.get(slot) != generation, f"slot {slot} is written twice in generation {generation}"
            self._written[slot] = generation
            before = kv_of(token, position, before)
            self._kv[slot] = before


def _slot(table: list[int], position: int) -> int:
    return table[position // BLOCK] * BLOCK + position % BLOCK


def profile_of(step_s: float, batch_tokens: int) -> Profile:
    """What a worker publishes of itself when each of its steps takes ``step_s``."""
    prefill, step = Fit((step_s, step_s / batch_tokens, 0.0), 0.0, 1.0, 9), Fit((step_s, 0.0, 0.0), 0.0, 1.0, 9)
    return Profile("", "cpu", 1, prefill, step, Fit((0.001, 1e-9), 0.0, 1.0, 9))


def make_parts(config: WorkerConfig, clock: Clock, weights: int) -> tuple[WorkerParts, PoolModel]:
    """A worker's engine around the model."""
    pool = KvPool(LAYOUT, config.num_blocks, torch.float32, checksums=config.checksums)
    model = PoolModel(pool, weights)
    parts = assemble(
        config,
        clock,
        runner=model,
        pool=pool,
        fingerprint=fingerprint_of(weights),
        vocab_size=VOCAB,
        context_tokens=CONTEXT,
        eos_token_ids=frozenset({EOS}),
        model_name=MODEL,
        model_path="",
    )
    return parts, model


def text_of(token: int) -> str:
    """A token's text: one character each."""
    return chr(0x41 + token)


def answer(prompt: tuple[int, ...], sampling: SamplingParams, weights: int = 0) -> tuple[list[int], FinishReason]:
    """What a request must be answered with by a model of these weights, whatever happens on the way."""
    request = EngineRequest(RequestKey("reference", 1), prompt, (), sampling, Mode.LOCAL, frozenset({EOS}))
    sequence = Sequence(request, 0, 0.0)
    kv = np.empty(len(prompt) + sampling.max_tokens, dtype=np.uint64)
    before = root_of(weights)
    for position, token in enumerate(prompt):
        kv[position] = before = kv_of(token, position, before)
    text = ""
    while True:
        logits = torch.from_numpy(logits_of(kv[: len(sequence.tokens)].tobytes())[None])
        token = Sampler().sample(logits, [sequence]).tokens[0]
        kv[len(sequence.tokens)] = before = kv_of(token, len(sequence.tokens), before)
        sequence.tokens.append(token)
        generated = sequence.tokens[len(prompt) :]
        text += text_of(token)
        reason = _end(generated, sampling)
        if any(stop in text for stop in sampling.stop) and token not in sequence.stops:
            reason = FinishReason.STOP
        if reason is not None:
            return generated, reason


def _end(generated: list[int], sampling: SamplingParams) -> FinishReason | None:
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
    if len(generated) >= sampling.min_tokens and generated[-1] in stops:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(generated) >= sampling.max_tokens else None
