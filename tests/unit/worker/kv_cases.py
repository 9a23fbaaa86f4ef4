"""Values that the worker's tests share: a fingerprint, peers, tickets of an imagined prefill."""

from weir.engine.request import EngineRequest, Mode
from weir.engine.sampling import SamplingParams
from weir.ids import RequestKey, WorkerKey
from weir.transfer.fingerprint import Fingerprint
from weir.transfer.ticket import BlockRef, PeerDescriptor, Ticket, context_digest, sealed

BLOCK = 4
KEY = RequestKey("r-1", 1)
SOURCE = WorkerKey("prefill-a", 7)
OURS = Fingerprint("w", "TestModel", "float32", "float32", 1, 1, 1, BLOCK, 1, "t", "", "none")
NOW_UNIX_S = 1_000.0


def peer(worker: WorkerKey = SOURCE, num_blocks: int = 1_000) -> PeerDescriptor:
    """A source worker's memory."""
    return PeerDescriptor(worker, OURS, b"", "DRAM", 0, 4096, 64, num_blocks, 8192)


def source_block(index: int, lease_id: int = 1) -> BlockRef:
    """Where block ``index`` of the sequence lies at the source, under ``lease_id``."""
    return BlockRef(100 * lease_id + index, 10 * lease_id + index)


def ticket(
    first: int,
    end: int,
    context: int,
    *,
    lease_id: int = 1,
    final: bool | None = None,
    key: RequestKey = KEY,
    deadline_unix_s: float = NOW_UNIX_S + 30.0,
    source: WorkerKey = SOURCE,
) -> Ticket:
    """Blocks [first, end) of a sequence of ``context`` tokens."""
    whole = end * BLOCK >= context
    made = Ticket(
        key=key,
        lease_id=lease_id,
        source=source,
        fingerprint_digest=OURS.digest(),
        first_block=first,
        blocks=tuple(source_block(index, lease_id) for index in range(first, end)),
        num_tokens=min(end * BLOCK, context),
        final=whole if final is None else final,
        deadline_unix_s=deadline_unix_s,
    )
    return sealed(made, context_digest(range(context)))


def request(
    key: RequestKey = KEY,
    mode: Mode = Mode.PREFILL,
    context: int = 10,
    generated: tuple[int, ...] = (),
    max_tokens: int = 8,
) -> EngineRequest:
    """A greedy request over the token ids 0, 1, 2 ..."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(key, tuple(range(context - len(generated))), generated, sampling, mode)
