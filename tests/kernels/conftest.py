"""Runs the kernels in Triton's interpreter, which has to be chosen before triton is first imported.

Where something else in this process imported triton already, the interpreted tests are left out here and
`test_isolated.py` runs them in a process of their own.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec

INTERPRETED_TESTS = [
    "test_kv_blocks.py",
    "test_kv_store.py",
    "test_paged_decode.py",
    "test_prefill_attention.py",
    "test_rms_norm.py",
    "test_rope.py",
    "test_silu_mul.py",
]
HAS_TRITON = find_spec("triton") is not None
COMPILING = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"


def _interpret() -> None:
    """Decorate every kernel for the interpreter, and leave the environment as it was for child processes."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    for test in INTERPRETED_TESTS:
        import_module(test.replace("test_", "weir.kernels.").removesuffix(".py"))
    _launch_once()
    if before is None:
        del os.environ["TRITON_INTERPRET"]


def _launch_once() -> None:
    """Triton imports more of itself at its first launch: have that done while the interpreter is chosen."""
    import torch

    from tests.kernels.interpreter import correct_bfloat16
    from weir.kernels.silu_mul import silu_mul

    silu_mul(torch.ones(1, 1), torch.ones(1, 1))
    correct_bfloat16()


if not HAS_TRITON:
    collect_ignore_glob = ["test_*.py"]
elif COMPILING:
    collect_ignore = INTERPRETED_TESTS
else:
    _interpret()
