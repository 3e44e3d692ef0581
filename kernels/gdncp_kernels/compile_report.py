"""What every kernel takes on a GPU that need not be there:  python -m gdncp_kernels.compile_report 90

TRITON_INTERPRET must not be set: interpreted kernels have nothing to compile.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gdncp_kernels import cp_prefill, forgetting, precompute_mn, precompute_t, state_fixup
from gdncp_kernels.common import launch_options, scan_config

_TOKEN_TENSORS = ("q", "k", "v", "output")
_POINTERS = {
    "*fp64": ("log_decay", "log_growth", "reach"),
    "*i64": (
        *("token_start", "num_tokens", "item_row", "final_row", "chunk_item", "chunk_ordinal", "first_chunk"),
        *("map_item", "map_row", "checkpoint_start", "checkpoint_stop", "checkpoint_tokens", "checkpoint_row"),
    ),
    "*u8": ("map_is_first", "forgot"),
    "*i32": ("scanned", "start_chunk"),
}
_FLOATS = ("scale", "forget_below")
_INTS = ("H", "HQ", "HK", "HV", "NUM_BLOCKS", "dump_row", "final_dump")
_STRIDES = tuple(f"{x}_{d}" for x in ("state", "transition", "local") for d in ("batch", "row"))


class Compiled(NamedTuple):
    """What one kernel takes on one GPU."""

    kernel: str
    registers: int  # a thread
    spill_bytes: int  # stack a thread
    shared_bytes: int  # a program


def compile_all(
    arch: int, k_dim: int, v_dim: int, dtype: str, precision: str = "tf32", *, bare: bool = False
) -> Iterator[Compiled]:
    """Compile all kernels for compute capability `arch` (80, 90, ...); dtype is "bf16", "fp16" or "fp32".

    `bare` compiles calls without gates, beta, norm and checkpoints, else calls with all of them.
    """
    config = scan_config(k_dim, v_dim, precision)
    scan_dims = {"K": k_dim, "V": v_dim, "BLOCK": config.block, "PRECISION": precision}
    inputs = {"LOG_SPACE": False, "L2NORM": not bare}
    absent = {"gate": None, "beta": None} if bare else {}
    checkpoints = {"checkpoints": None} if bare else {}
    fold_block = min(k_dim, 32)
    kernels: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (
            precompute_t.precompute_t_kernel,
            {"K": k_dim, "PRECISION": precision, **inputs, **absent},
            launch_options(precompute_t.stage_1_warps(precision)),
        ),
        (forgetting.chunk_bounds_kernel, {"K": k_dim, "V": v_dim, **inputs, **absent}, launch_options(4)),
        (forgetting.cut_kernel, {"K": k_dim, "V": v_dim}, launch_options(1)),
        (precompute_mn.scan_kernel, scan_dims, config.options),
        (state_fixup.fold_kernel, {"K": k_dim, "BLOCK_N": fold_block, "BLOCK_K": fold_block}, launch_options(2)),
        (cp_prefill.cp_prefill_kernel, {**scan_dims, **checkpoints}, config.options),
    ]
    for kernel, constants, options in kernels:
        yield _compile(kernel, constants, options, arch, dtype)


def _compile(kernel: Any, constants: dict[str, Any], options: dict[str, Any], arch: int, dtype: str) -> Compiled:
    signature = {name: "constexpr" if name in constants else _type_of(name, dtype) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack = _resources(binary.asm["cubin"])
    return Compiled(kernel.__name__, registers, stack, binary.metadata.shared)


def _type_of(name: str, dtype: str) -> str:
    """Triton's type of a kernel argument, by its name, which means the same in every kernel."""
    if name in _TOKEN_TENSORS:
        return f"*{dtype}"
    if name in _FLOATS:
        return "fp32"
    if name in _INTS:
        return "i32"
    if name in _STRIDES:
        return "i64"
    return next((pointer for pointer, names in _POINTERS.items() if name in names), "*fp32")


def _resources(cubin: bytes) -> tuple[int, int]:
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def main() -> None:
    arch = int(sys.argv[1])
    for k_dim, v_dim, dtype, precision in ((128, 128, "bf16", "tf32"), (64, 64, "fp16", "tf32")):
        for c in compile_all(arch, k_dim, v_dim, dtype, precision):
            name = f"sm_{arch} {k_dim}x{v_dim} {dtype} {precision} {c.kernel}"
            print(f"{name:55s} {c.registers:4d} registers {c.spill_bytes:5d} B spilled {c.shared_bytes:7d} B shared")


if __name__ == "__main__":
    main()
