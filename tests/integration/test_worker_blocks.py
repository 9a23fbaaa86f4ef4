"""What a worker's cache has, for routers that start late or missed an event."""

import grpc.aio
import pytest

from tests.integration.test_worker import Rig, lasting, rig
from weir.kvcache.prefix import block_hashes, chain_seed
from weir.rpc.v1 import worker_pb2

__all__ = ["rig"]


async def test_the_blocks_of_the_cache_are_listed(rig: Rig) -> None:
    prompt = lasting(21)
    await rig.pair.begin("r-1", prompt)
    await rig.pair.tokens("r-1")
    parts = rig.p.host.parts
    answer = await rig.p.admin.ListBlocks(worker_pb2.ListBlocksRequest())
    seed = chain_seed(parts.fingerprint.digest(), b"")
    assert set(block_hashes(prompt, parts.blocks.block_size, seed)) <= set(answer.hashes)
    assert len((await rig.p.admin.ListBlocks(worker_pb2.ListBlocksRequest(limit=2))).hashes) == 2
    with pytest.raises(grpc.aio.AioRpcError, match="limit = -1"):
        await rig.p.admin.ListBlocks(worker_pb2.ListBlocksRequest(limit=-1))
