"""A model whose KV lies in a real pool and whose tokens are a function of the whole prefix as found there.

The "KV" of a token is its id. Any foreign, missing or torn KV changes what is generated.
"""

import hashlib
import struct
import threading
from dataclasses import dataclass, field

import torch

from tests.unit.worker.kv_cases import BLOCK, OURS
from weir.clock import Clock
from weir.config import WorkerConfig
from weir.engine.batch import Batch
from weir.kvcache.layout import KvLayout
from weir.kvcache.pool import KvPool
from weir.services.worker.parts import WorkerParts, assemble

VOCAB = 64
EOS = 2
CONTEXT = 400
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, block_size=BLOCK, dtype_bytes=4)


def next_token(tokens: list[int], *, may_end: bool = True) -> int:
    """The greedy continuation of ``tokens``."""
    digest = hashlib.blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=8).digest()
    token = int.from_bytes(digest, "little") % VOCAB
    return token if may_end or token != EOS else EOS + 1


def continuation(prompt: list[int], max_tokens: int) -> list[int]:
    """What a request must answer."""
    tokens: list[int] = []
    while len(tokens) < max_tokens and (not tokens or tokens[-1] != EOS):
        tokens.append(next_token([*prompt, *tokens]))
    return tokens


@dataclass
class PoolRunner:
    """``gate`` cleared holds the model before its next batch; ``entered`` counts batches that reached it."""

    pool: KvPool
    gate: threading.Event = field(default_factory=threading.Event)
    fail: bool = False

    def __post_init__(self) -> None:
        self.gate.set()

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits with one peak each."""
        self.gate.wait()
        if self.fail:
            raise SystemExit("planted")
        flat = self.pool.data.view(-1, 2, BLOCK)
        for token, slot in zip(batch.token_ids, batch.slots, strict=True):
            flat[slot // BLOCK, 0, slot % BLOCK] = float(token)
        logits = torch.zeros(len(batch.logit_rows), VOCAB)
        for number, row in enumerate(batch.logit_rows):
            table, length = batch.block_tables[row], batch.context_lens[row]
            found = [int(flat[table[i // BLOCK], 0, i % BLOCK]) for i in range(length)]
            logits[number, next_token(found)] = 10.0
        return logits


def make_parts(config: WorkerConfig, clock: Clock) -> tuple[WorkerParts, PoolRunner]:
    """An engine around a pool model."""
    pool = KvPool(LAYOUT, config.num_blocks, torch.float32)
    runner = PoolRunner(pool)
    parts = assemble(
        config,
        clock,
        runner=runner,
        pool=pool,
        fingerprint=OURS,
        vocab_size=VOCAB,
        context_tokens=CONTEXT,
        eos_token_ids=frozenset({EOS}),
        model_name="pool-model",
        model_path="",
    )
    return parts, runner
