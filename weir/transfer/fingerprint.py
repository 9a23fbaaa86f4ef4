"""Which KV can be read by whom: everything that changes the meaning of a KV byte, as one value."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from weir.errors import FingerprintMismatch


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Two workers may exchange KV when all fields but ``tp_degree`` are equal.

    ``weights``      digest of the model's weights (names, shapes, dtypes, bytes or revision)
    ``architecture`` e.g. ``LlamaForCausalLM``; ``dtype``/``kv_dtype`` e.g. ``float32``
    ``rope``         canonical text of the rotary settings
    ``tokenizer``    digest of the tokenizer's files
    ``adapter``      name and digest of a LoRA adapter, or empty
    """

    weights: str
    architecture: str
    dtype: str
    kv_dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    layout_version: int
    tokenizer: str
    adapter: str
    rope: str
    tp_degree: int = 1

    def canonical(self) -> str:
        """Stable JSON of the fields that must match."""
        fields = dataclasses.asdict(self)
        del fields["tp_degree"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    def digest(self) -> bytes:
        """16 bytes, equal in every process."""
        return hashlib.blake2b(self.canonical().encode(), digest_size=16).digest()


def check_compatible(ours: Fingerprint, theirs: Fingerprint) -> None:
    """Raise FingerprintMismatch naming the first field that differs and cannot be converted."""
    for field in dataclasses.fields(Fingerprint):
        if field.name == "tp_degree":
            continue
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            raise FingerprintMismatch(field.name, mine, other)
