"""Compile every kernel ahead of time for the GPUs it is meant for; no GPU is needed.

python -m weir.kernels.aot               # sm_80, sm_90 and sm_100
python -m weir.kernels.aot --arch 90
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weir.kernels import paged_decode, prefill_attention
from weir.kernels.kv_blocks import CHUNK_WORDS, copy_blocks_kernel
from weir.kernels.kv_store import kv_store_kernel
from weir.kernels.layout import PoolLayout
from weir.kernels.paged_tile import kv_tile_tokens, next_power_of_2
from weir.kernels.rms_norm import rms_norm_kernel
from weir.kernels.rope import rope_kernel
from weir.kernels.silu_mul import CHUNK, silu_mul_kernel

ARCHES = (80, 90, 100)
# Shared memory a thread block may ask for, in bytes (CUDA programming guide, compute capabilities).
SHARED_BYTES_MAX = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
FLOAT_SCALARS = ("logit_scale", "eps")
# Integers whose value says nothing about alignment; all others are strides and sizes, multiples of 16.
UNALIGNED_SCALARS = ("layer", "table_stride")


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with everything fixed that Triton fixes at compile time."""

    name: str
    kernel: Any
    pointers: dict[str, str]  # argument -> element type
    constexprs: dict[str, int | bool]
    num_warps: int = 4
    num_stages: int = 3

    def signature(self) -> dict[str, str]:
        """The Triton type of each argument."""
        return {name: self._type_of(name) for name in self.kernel.arg_names}

    def aligned(self) -> dict[tuple[int], list[list[str | int]]]:
        """The arguments that a launcher's caller aligns to 16, as Triton attributes."""
        free = (*self.constexprs, *FLOAT_SCALARS, *UNALIGNED_SCALARS)
        names = enumerate(self.kernel.arg_names)
        return {(i,): [["tt.divisibility", 16]] for i, name in names if name not in free}

    def _type_of(self, name: str) -> str:
        if name in self.constexprs:
            return "constexpr"
        if name in self.pointers:
            return "*" + self.pointers[name]
        return "fp32" if name in FLOAT_SCALARS else "i32"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came out for one variant on one architecture. Sizes are in bytes, registers per thread."""

    variant: Variant
    arch: int
    cubin_bytes: int
    registers: int
    stack_bytes: int
    shared_bytes: int


def _attention_constexprs(dtype: str, heads: int, pool: PoolLayout) -> dict[str, int | bool]:
    return {
        "HEADS": heads,
        "GROUP": heads // pool.kv_heads,
        "BLOCK_SIZE": pool.block_size,
        "HEAD_DIM": pool.head_dim,
        "BLOCK_D": next_power_of_2(pool.head_dim),
        "BLOCK_N": kv_tile_tokens(pool.head_dim, ELEMENT_BYTES[dtype], 64),
    }


def _decode(dtype: str, heads: int, pool: PoolLayout, splits: int) -> Variant:
    group = max(16, next_power_of_2(heads // pool.kv_heads))
    partial = dtype if splits == 1 else "fp32"
    pointers = {"query": dtype, "pool": dtype, "block_tables": "i32", "seq_lens": "i32", "out": partial}
    return Variant(
        f"paged_decode {dtype} d{pool.head_dim} b{pool.block_size} s{splits}",
        paged_decode.paged_decode_kernel,
        {**pointers, "log_sums": partial},
        {**_attention_constexprs(dtype, heads, pool), "BLOCK_G": group, "SPLITS": splits},
        num_stages=paged_decode.STAGES,
    )


def _prefill(dtype: str, heads: int, pool: PoolLayout) -> Variant:
    rows, warps = prefill_attention.query_tile(4096, pool.head_dim, ELEMENT_BYTES[dtype])
    pointers = {"query": dtype, "pool": dtype, "out": dtype}
    return Variant(
        f"prefill_attention {dtype} d{pool.head_dim} b{pool.block_size}",
        prefill_attention.prefill_attention_kernel,
        {**pointers, "block_tables": "i32", "cu_seqlens": "i32", "seq_lens": "i32"},
        {**_attention_constexprs(dtype, heads, pool), "BLOCK_M": rows},
        num_warps=warps,
        num_stages=prefill_attention.STAGES,
    )


def _attention_variants() -> Iterator[Variant]:
    llama = PoolLayout(1024, 32, 8, 64, 128)
    smollm = PoolLayout(1024, 30, 3, 16, 64)
    phi = PoolLayout(1024, 32, 32, 16, 80)
    widest = PoolLayout(1024, 32, 4, 64, 256)
    yield _decode("bf16", 32, llama, 8)
    yield _decode("fp16", 9, smollm, 1)
    yield _decode("bf16", 32, phi, 1)
    yield _decode("fp32", 16, widest, 1)
    yield _prefill("bf16", 32, llama)
    yield _prefill("fp16", 9, smollm)
    yield _prefill("bf16", 32, phi)
    yield _prefill("fp32", 16, widest)


def _other_variants() -> Iterator[Variant]:
    words = {"pool": "i32", "staging": "i32", "block_ids": "i64"}
    partial = {"partial": "fp32", "log_sums": "fp32", "out": "bf16"}
    stored = {"key": "bf16", "value": "bf16", "pool": "bf16", "slots": "i64"}
    rotated = {"query": "bf16", "key": "bf16", "positions": "i64", "cos": "fp32", "sin": "fp32"}
    norm = {"hidden": "bf16", "weight": "bf16", "residual": "bf16", "out": "bf16"}
    gated = {"gate": "bf16", "up": "bf16", "out": "bf16"}
    # fmt: off
    yield Variant("combine_splits", paged_decode.combine_splits_kernel, partial,
                  {"HEAD_DIM": 128, "BLOCK_D": 128, "SPLITS": 8})
    yield Variant("kv_store", kv_store_kernel, stored,
                  {"KV_HEADS": 8, "BLOCK_SIZE": 64, "HEAD_DIM": 128, "BLOCK_E": 1024})
    yield Variant("gather_blocks", copy_blocks_kernel, words, {"CHUNK": CHUNK_WORDS, "TO_POOL": False})
    yield Variant("scatter_blocks", copy_blocks_kernel, words, {"CHUNK": CHUNK_WORDS, "TO_POOL": True})
    yield Variant("rms_norm", rms_norm_kernel, norm,
                  {"HEADS": 1, "SIZE": 4096, "BLOCK": 4096, "HAS_RESIDUAL": False}, num_warps=8)
    yield Variant("rms_norm + residual", rms_norm_kernel, norm,
                  {"HEADS": 1, "SIZE": 4096, "BLOCK": 4096, "HAS_RESIDUAL": True}, num_warps=8)
    yield Variant("rope", rope_kernel, rotated, {"HEADS": 32, "KV_HEADS": 8, "HALF": 64,
                  "BLOCK_H": 32, "BLOCK_KV": 8, "BLOCK_HALF": 64})
    yield Variant("silu_mul", silu_mul_kernel, gated, {"BLOCK": CHUNK})
    # fmt: on


def variants() -> list[Variant]:
    """Every kernel at the sizes of a real model, and attention also at its narrowest and widest."""
    return [*_attention_variants(), *_other_variants()]


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, stack bytes per thread) of a cubin, by the cuobjdump that Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, f"no resource usage in {report!r}"
    return int(found[1]), int(found[2])


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compile for sm_<arch>; raises triton's CompilationError, and asserts that it can be launched."""
    source = ASTSource(variant.kernel, variant.signature(), variant.constexprs, variant.aligned())
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin: bytes = kernel.asm["cubin"]
    shared: int = kernel.metadata.shared
    assert shared <= SHARED_BYTES_MAX[arch], f"{variant.name}: {shared} bytes of shared memory on sm_{arch}"
    return Compiled(variant, arch, len(cubin), *_resources(cubin), shared)


def main(arguments: list[str] | None = None) -> int:
    """Compile every variant for every architecture asked for and print one row for each."""
    parser = argparse.ArgumentParser(
        prog="python -m weir.kernels.aot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHES, default=ARCHES)
    arches = parser.parse_args(arguments).arch
    if not isinstance(silu_mul_kernel, triton.runtime.JITFunction):
        print("kernels are interpreted: unset TRITON_INTERPRET to compile them", file=sys.stderr)
        return 2
    print(f"{'kernel':<38}   arch warps registers stack B shared B  cubin B")
    for variant in variants():
        for arch in arches:
            row = compile_variant(variant, arch)
            print(
                f"{variant.name:<38} {f'sm_{arch}':>6} {variant.num_warps:>5} {row.registers:>9}"
                f" {row.stack_bytes:>7} {row.shared_bytes:>8} {row.cubin_bytes:>8}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
