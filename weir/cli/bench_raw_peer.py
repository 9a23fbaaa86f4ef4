"""The far side of a raw NIXL READ: a process with one registered buffer, without anything of Weir's hand-over.

    python -m weir.cli.bench_raw_peer BYTES

Prints its agent's metadata and the buffer's address (base64 each) and lives until its standard input ends.
"""

from __future__ import annotations

import base64
import sys

import numpy as np

from weir.transfer.ucx import start_agent


def main() -> None:
    """Offer a buffer of known bytes."""
    size = int(sys.argv[1])
    buffer = np.arange(size // 8, dtype=np.uint64)
    agent = start_agent("raw-far")
    agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], "DRAM")
    for value in (agent.get_agent_metadata(), str(buffer.ctypes.data).encode()):
        print(base64.b64encode(value).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
