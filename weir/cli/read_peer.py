"""The far side of the doctor's READ self-test: a process with a small pool of known bytes.

Prints its descriptor and a ticket (base64 of their wire forms) and lives until its standard input ends.
"""

from __future__ import annotations

import base64
import sys

import torch

from weir.clock import SystemClock
from weir.ids import RequestKey, WorkerKey
from weir.kvcache.layout import LAYOUT_VERSION, KvLayout
from weir.kvcache.pool import KvPool
from weir.rpc.convert import descriptor_to_pb, ticket_to_pb
from weir.transfer.fingerprint import Fingerprint
from weir.transfer.nixl import NixlTransfer
from weir.transfer.ticket import BlockRef, Ticket

BLOCKS = 16
BLOCK_SIZE = 16
LAYOUT = KvLayout(layers=8, kv_heads=4, head_dim=64, block_size=BLOCK_SIZE, dtype_bytes=4)
FINGERPRINT = Fingerprint(
    weights="self-test",
    architecture="none",
    dtype="float32",
    kv_dtype="float32",
    layers=LAYOUT.layers,
    kv_heads=LAYOUT.kv_heads,
    head_dim=LAYOUT.head_dim,
    block_size=BLOCK_SIZE,
    layout_version=LAYOUT_VERSION,
    tokenizer="none",
    adapter="",
    rope="none",
)
LEASE_S = 60.0


def make_pool() -> KvPool:
    """A pool of the self-test's size."""
    return KvPool(LAYOUT, BLOCKS, torch.float32, torch.device("cpu"))


def fill(pool: KvPool) -> None:
    """Bytes that differ in every block."""
    values = torch.arange(pool.data.numel(), dtype=torch.float32)
    pool.data.copy_(values.view_as(pool.data))


def main() -> None:
    """Serve reads until standard input ends."""
    pool = make_pool()
    fill(pool)
    pool.seal(range(BLOCKS))
    worker = WorkerKey("doctor-far", 1)
    transfer = NixlTransfer(pool, worker, FINGERPRINT)
    ticket = Ticket(
        key=RequestKey("r-doctor", 1),
        lease_id=1,
        source=worker,
        fingerprint_digest=FINGERPRINT.digest(),
        first_block=0,
        blocks=tuple(BlockRef(block, pool.guard.generation(block)) for block in range(BLOCKS)),
        num_tokens=BLOCKS * BLOCK_SIZE,
        final=True,
        deadline_unix_s=SystemClock().unix_s() + LEASE_S,
    )
    for message in (descriptor_to_pb(transfer.descriptor()), ticket_to_pb(ticket)):
        print(base64.b64encode(message.SerializeToString()).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
