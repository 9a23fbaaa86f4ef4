"""CPU attention over the paged pool against a loop over tokens."""

import random

import pytest
import torch
from torch import Tensor

from weir.engine.batch import Batch
from weir.models.attention import CpuAttention, _groups
from weir.models.config import ModelConfig, RopeConfig

LAYERS, HEADS, KV_HEADS, DIM = 3, 6, 2, 8
SEED = 5


def _config(window: int | None) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=10,
        hidden_size=48,
        intermediate_size=1,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        rms_norm_eps=1e-5,
        max_position=512,
        tie_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope=RopeConfig(1.0),
        windows=(window, None, window),
        moe=None,
        eos_token_ids=(),
        bos_token_id=None,
    )


def _batch(queries: list[int], contexts: list[int], block_size: int, rng: random.Random) -> tuple[Batch, int]:
    counts = [-(-context // block_size) for context in contexts]
    blocks = list(range(sum(counts) + 3))
    rng.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    positions = [p for q, c in zip(queries, contexts, strict=True) for p in range(c - q, c)]
    rows = [row for row, q in enumerate(queries) for _ in range(q)]
    slots = [tables[row][p // block_size] * block_size + p % block_size for row, p in zip(rows, positions, strict=True)]
    decodes = next((n for n, q in enumerate(queries) if q > 1), len(queries))
    ids = [0] * len(positions)
    return Batch(ids, positions, slots, queries, contexts, tables, [0], decodes), sum(counts) + 3


def _expected(batch: Batch, pool: Tensor, layer: int, q: Tensor, window: int | None) -> Tensor:
    """Softmax attention token by token, straight from the definition; ``pool`` already holds the new KV."""
    out, token = torch.zeros_like(q), 0
    for sequence, count in enumerate(batch.query_lens):
        for _ in range(count):
            position = batch.positions[token]
            first = max(0, position - window + 1) if window else 0
            size = pool.shape[4]
            table = batch.block_tables[sequence]
            seen = [pool[table[p // size], layer, :, :, p % size] for p in range(first, position + 1)]
            keys, values = torch.stack(seen).unbind(1)
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                weights = torch.softmax(keys[:, kv] @ q[token, head] / DIM**0.5, 0)
                out[token, head] = weights @ values[:, kv]
            token += 1
    return out.flatten(1)


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [
        ([1], [1]),
        ([1, 1, 1], [33, 2, 32]),
        ([1, 1, 1, 1], [70, 69, 5, 6]),
        ([16], [16]),
        ([20], [64]),
        ([3], [17]),
        ([1, 1, 40, 5, 1], [9, 17, 90, 5, 1]),
        ([300], [310]),
    ],
)
def test_against_the_definition(
    tiles: bool, window: int | None, block_size: int, queries: list[int], contexts: list[int]
) -> None:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    batch, blocks = _batch(queries, contexts, block_size, random.Random(SEED))
    pool = torch.full((blocks, LAYERS, 2, KV_HEADS, block_size, DIM), float("nan"))
    for sequence, table in enumerate(batch.block_tables):
        for position in range(contexts[sequence] - queries[sequence]):
            block = table[position // block_size]
            pool[block, :, :, :, position % block_size] = torch.randn(LAYERS, 2, KV_HEADS, DIM)
    step = CpuAttention(_config(window), tiles).step(batch, pool)
    for layer in range(LAYERS):
        q, k = torch.randn(batch.num_tokens, HEADS, DIM), torch.randn(batch.num_tokens, KV_HEADS, DIM)
        v = torch.randn(batch.num_tokens, KV_HEADS, DIM)
        before = pool.clone()
        out = step(layer, q, k, v)
        for token, slot in enumerate(batch.slots):
            before[slot // block_size, layer, 0, :, slot % block_size] = k[token]
            before[slot // block_size, layer, 1, :, slot % block_size] = v[token]
        torch.testing.assert_close(pool, before, atol=0, rtol=0, equal_nan=True)
        expected = _expected(batch, pool, layer, q, window if layer != 1 else None)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


def test_decodes_group_by_length_and_bytes() -> None:
    batch, _ = _batch([1] * 5, [100, 8, 90, 60, 7], 4, random.Random(1))
    assert _groups(batch, bytes_per_token=1) == [[0, 2, 3], [1, 4]]
    # At 64 KiB a token, 8 MiB hold 128 tokens: one row of 100, 90 or 60, or two of 8.
    assert _groups(batch, bytes_per_token=64 << 10) == [[0], [2], [3], [1, 4]]
