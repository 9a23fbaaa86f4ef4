"""Compiles for real GPUs in a process of its own: in this one the kernels may be interpreted."""

import os
import subprocess
import sys

HEADING = "kernel arch warps registers stack B shared B cubin B"


def run(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "weir.kernels.aot", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_every_kernel_compiles_for_every_architecture() -> None:
    result = run()
    assert result.returncode == 0, result.stderr
    heading, *lines = result.stdout.splitlines()
    assert " ".join(heading.split()) == HEADING
    rows = [(line[:38].strip(), line[38:].split()) for line in lines]
    assert [columns[0] for _, columns in rows] == ["sm_80", "sm_90", "sm_100"] * 16
    assert {name.split()[0] for name, _ in rows} == {
        "combine_splits",
        "gather_blocks",
        "kv_store",
        "paged_decode",
        "prefill_attention",
        "rms_norm",
        "rope",
        "scatter_blocks",
        "silu_mul",
    }
    for name, (arch, _, registers, stack, _, cubin) in rows:
        assert int(cubin) > 1000, (name, arch)
        assert 16 <= int(registers) <= 255, (name, arch)
        assert int(stack) <= 128, f"{name} spills on {arch}"


def test_interpreted_kernels_are_not_compiled() -> None:
    result = run(interpret=True)
    assert result.returncode == 2
    assert result.stderr == "kernels are interpreted: unset TRITON_INTERPRET to compile them\n"
