"""A small worker's layout, fingerprint and tickets, for the tests of this folder."""

from collections.abc import Sequence

from weir.ids import RequestKey, WorkerKey
from weir.kvcache.layout import LAYOUT_VERSION, KvLayout
from weir.transfer.fingerprint import Fingerprint
from weir.transfer.ticket import BlockRef, PeerDescriptor, Ticket

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=4, block_size=4, dtype_bytes=4)
FINGERPRINT = Fingerprint(
    weights="w",
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
SOURCE = WorkerKey("prefill-1", 11)
READER = WorkerKey("decode-1", 12)
NOW_UNIX_S = 1_700_000_000.0


def make_ticket(
    blocks: Sequence[tuple[int, int]], source: WorkerKey = SOURCE, deadline_unix_s: float = NOW_UNIX_S + 10
) -> Ticket:
    """A ticket for (block, generation) pairs from the start of a prompt that fills them."""
    return Ticket(
        key=RequestKey("r-1", 1),
        lease_id=5,
        source=source,
        fingerprint_digest=FINGERPRINT.digest(),
        first_block=0,
        blocks=tuple(BlockRef(*pair) for pair in blocks),
        num_tokens=len(blocks) * LAYOUT.block_size,
        final=True,
        deadline_unix_s=deadline_unix_s,
    )


def make_peer(source: WorkerKey = SOURCE, num_blocks: int = 8) -> PeerDescriptor:
    """What a reader knows of ``source``."""
    return PeerDescriptor(
        worker=source,
        fingerprint=FINGERPRINT,
        agent_metadata=b"",
        memory="DRAM",
        device_id=0,
        pool_base=0,
        block_bytes=LAYOUT.block_bytes,
        num_blocks=num_blocks,
        guard_base=0,
    )
