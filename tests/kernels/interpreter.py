"""Makes Triton's interpreter treat bfloat16 as a GPU does.

It keeps bfloat16 as raw 16-bit integers, multiplies those integers in `tl.dot`, and truncates where a GPU
rounds to nearest even.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _rounded(data: Any) -> Any:
    """fp32 values as bfloat16 bits, to nearest even."""
    bits = data.astype(np.float32, copy=False).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


def correct_bfloat16() -> None:
    """Patch the interpreter of this process; call once."""
    product, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widen(builder: Any, operand: Any) -> Any:
        return builder.cast_impl(operand, tl.float32) if operand.dtype.scalar == tl.bfloat16 else operand

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(builder, widen(builder, a), widen(builder, b), *rest)

    def cast_impl(builder: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return TensorHandle(_rounded(source.data), tl.bfloat16)
        return cast(builder, source, target)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
