"""Copies KV between two engines' fake pools, as a read by tickets would."""

from tests.unit.engine.fake_model import Harness
from weir.engine.request import EngineRequest
from weir.ids import RequestKey


def copy_kv(source: Harness, target: Harness, key: RequestKey, num_tokens: int, first_token: int = 0) -> None:
    """Copy KV of tokens [first_token, num_tokens) that the target lacks, if the source's promise still holds."""
    size = source.blocks.block_size
    started = target.seen[key].started[-1]
    for index in range(max(first_token, started.cached_tokens) // size, -(-num_tokens // size)):
        block, generation = source.seen[key].sealed[index]
        assert source.blocks.generation(block) == generation, f"block {block} is no longer promised"
        for offset in range(min(size, num_tokens - index * size)):
            position = index * size + offset
            if position >= max(first_token, started.cached_tokens):
                token = source.runner.pool[block * size + offset]
                target.runner.write(started.block_table[index] * size + offset, token)


def deliver(source: Harness, target: Harness, request: EngineRequest) -> None:
    """Read all of a prefilled context, prove it, then bring the first token."""
    key = request.key
    assert target.engine.reads_started(key)
    copy_kv(source, target, key, request.context_len)
    assert target.engine.kv_arrived(key, request.context_len)
    target.engine.reads_done(key)
    assert target.engine.first_token(key, source.seen[key].tokens[0])
