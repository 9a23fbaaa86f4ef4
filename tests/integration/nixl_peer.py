"""A worker's KV side as a process of its own: fills its pool, then does what it is told, line by line.

    python -m tests.integration.nixl_peer NUM_BLOCKS SEED
stdin:  ``ticket 3,4,5`` | ``reuse 4`` | ``flip 4`` | ``unseal 4`` | ``churn 3,4`` | ``completion`` | ``quit``
stdout: one JSON object per command, the first being the peer's descriptor.
``churn`` goes on reusing its blocks, at random moments, until the end; a block is then filled with its generation.
"""

import asyncio
import base64
import json
import random
import sys
import threading
from typing import Any

import numpy as np
import torch

from weir.ids import WorkerKey
from weir.kvcache.layout import LAYOUT_VERSION, KvLayout
from weir.kvcache.pool import KvPool
from weir.transfer.fingerprint import Fingerprint
from weir.transfer.nixl import NixlTransfer

LAYOUT = KvLayout(layers=30, kv_heads=3, head_dim=64, block_size=16, dtype_bytes=4)


def fingerprint(weights: str = "w") -> Fingerprint:
    return Fingerprint(
        weights=weights,
        architecture="LlamaForCausalLM",
        dtype="float32",
        kv_dtype="float32",
        layers=LAYOUT.layers,
        kv_heads=LAYOUT.kv_heads,
        head_dim=LAYOUT.head_dim,
        block_size=LAYOUT.block_size,
        layout_version=LAYOUT_VERSION,
        tokenizer="t",
        adapter="",
        rope="r",
    )


def block_content(seed: int, block: int) -> bytes:
    """The bytes a peer's block holds."""
    return np.random.default_rng([seed, block]).bytes(LAYOUT.block_bytes)


async def main(num_blocks: int, seed: int) -> None:
    pool = KvPool(LAYOUT, num_blocks, torch.float32)
    for block in range(num_blocks):
        pool.block_view(block)[:] = block_content(seed, block)
        pool.guard.invalidate(block)
    pool.seal(range(num_blocks))
    transfer = NixlTransfer(pool, WorkerKey("prefill-peer", seed + 1), fingerprint(), host_id="here")
    peer = transfer.descriptor()
    _say(
        metadata=base64.b64encode(peer.agent_metadata).decode(),
        pool_base=peer.pool_base,
        guard_base=peer.guard_base,
        incarnation=peer.worker.incarnation,
    )
    completions = transfer.notifications()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, _, rest = line.strip().partition(" ")
        if command == "quit":
            break
        if command == "churn":
            churn = [int(block) for block in rest.split(",")]
            threading.Thread(target=_churn, args=(pool, churn, random.Random(seed)), daemon=True).start()
            _say()
        elif command == "completion":
            done = await anext(completions)
            _say(lease_id=done.lease_id, key=str(done.key))
        else:
            _say(generations=[_obey(pool, command, int(block)) for block in rest.split(",")])
    await transfer.close()


def _obey(pool: KvPool, command: str, block: int) -> int:
    if command == "reuse":
        pool.guard.invalidate(block)
    elif command == "flip":
        view = pool.block_view(block)
        view[1000] ^= 1
    elif command == "unseal":
        pool.guard.array[block, 1] = 0
    else:
        assert command == "ticket", command
    return pool.guard.generation(block)


def _churn(pool: KvPool, blocks: list[int], rng: random.Random) -> None:
    pause = threading.Event()
    while True:
        for block in rng.sample(blocks, 2):
            pool.guard.invalidate(block)
            pool.data[block] = float(pool.guard.generation(block))
            pool.seal([block])
        pause.wait(rng.uniform(0.0, 0.004))


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
