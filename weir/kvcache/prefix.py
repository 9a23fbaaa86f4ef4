"""The prefix cache's names and index: blocks are found again by a hash chain over token ids.

A block's hash covers its tokens and, through its parent's hash, all before it, the worker's fingerprint and
the tenant's salt. Hashes are equal in every process (never Python's ``hash``), so the router can match
prompts against the blocks that workers announce.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence

HASH_BYTES = 16


def chain_seed(fingerprint_digest: bytes, tenant_salt: bytes) -> bytes:
    """What a chain starts from: KV is shared only within one fingerprint and one tenant. 16 bytes."""
    length = len(fingerprint_digest).to_bytes(4, "little")
    return hashlib.blake2b(length + fingerprint_digest + tenant_salt, digest_size=HASH_BYTES).digest()


def block_hashes(tokens: Sequence[int], block_size: int, seed: bytes, parent: bytes | None = None) -> list[bytes]:
    """Hashes of the full blocks of ``tokens``, in order; a last partial block has none.

    To extend a chain, pass only the tokens after the last hashed block and that block's hash as ``parent``:
    the cost is that of the new tokens. Token ids are in [0, 2**32).
    """
    assert block_size >= 1, block_size
    link = seed if parent is None else parent
    assert len(link) == HASH_BYTES, len(link)
    pack = struct.Struct(f"<{block_size}I").pack
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        packed = pack(*tokens[start : start + block_size])
        link = hashlib.blake2b(link + packed, digest_size=HASH_BYTES).digest()
        hashes.append(link)
    return hashes


class PrefixIndex:
    """One block per hash and one hash per block; the first to store a hash keeps it."""

    def __init__(self) -> None:
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def __iter__(self) -> Iterator[bytes]:
        """All hashes known: the snapshot from which a gap in the event stream is repaired."""
        return iter(self._block_by_hash)

    def block_of(self, block_hash: bytes) -> int | None:
        """The block that holds ``block_hash``, or None."""
        return self._block_by_hash.get(block_hash)

    def hash_of(self, block: int) -> bytes | None:
        """The hash ``block`` is stored under, or None."""
        return self._hash_by_block.get(block)

    def put(self, block_hash: bytes, block: int) -> bool:
        """Store ``block`` under ``block_hash``; True if it is (now) found there, False if another is."""
        assert len(block_hash) == HASH_BYTES, len(block_hash)
        holder = self._block_by_hash.setdefault(block_hash, block)
        if holder != block:
            return False
        previous = self._hash_by_block.setdefault(block, block_hash)
        assert previous == block_hash, f"block {block} is already stored under another hash"
        return True

    def remove(self, block: int) -> bytes | None:
        """Drop ``block``; returns the hash it was stored under, or None."""
        block_hash = self._hash_by_block.pop(block, None)
        if block_hash is not None:
            del self._block_by_hash[block_hash]
        return block_hash
