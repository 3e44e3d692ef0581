"""Compiles every Hopper kernel without a GPU and says what it takes:  python -m gdncp_kernels.hopper.compile_report

The launchers themselves run, on small CPU tensors and under a driver that pretends to be an H200, so that what is
compiled is what is launched.  Set nothing of TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gdncp.backends.base import AffineMaps, Sinks, TokenInputs
from gdncp.backends.hopper_backend import HopperBackend
from gdncp.layout import layout_of_plan
from gdncp.plan import plan_prefill
from gdncp_kernels.hopper.launch import Launcher

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Compiled(NamedTuple):
    """What one variant of a kernel takes."""

    kernel: str
    call: str  # the call that launches it
    registers: int  # a thread, at launch
    spill_bytes: int  # stack a thread
    shared_bytes: int  # a program
    mma: int  # tensor-core instructions
    warnings: tuple[str, ...]  # of ptxas about wgmma and register hand-over


class _PretendedHopper:
    utils = SimpleNamespace(fill_tma_descriptor=lambda *_: None)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _compiling_only(seen: dict[str, tuple[str, Any]], label: list[str]) -> Iterator[None]:
    """Every launch inside compiles and is noted in `seen` (by the binary's hash), and nothing runs."""

    def compiled(kernel: JITFunction, *arguments: Any, **options: Any) -> Any:
        binary = kernel.run(*arguments, grid=(1,), warmup=True, **options)
        seen.setdefault(binary.hash, (label[0], binary))
        return binary

    def launch(kernel: JITFunction, grid: Any) -> Any:
        return partial(compiled, kernel)

    def variant(launcher: Launcher, arguments: Any) -> Any:
        binary = compiled(launcher.kernel, *arguments, **launcher.options)
        return SimpleNamespace(tensor_maps=binary.metadata.tensordesc_meta, enqueue=lambda *_: None)

    previous = driver._active
    driver.set_active(_PretendedHopper())
    try:
        with patch.object(JITFunction, "__getitem__", launch), patch.object(Launcher, "compiled", variant):
            yield
    finally:
        driver.set_active(previous)


def compile_all() -> list[Compiled]:
    """All stages for both gate spaces, with and without L2 norm and checkpoints, where sequences open or not."""
    seen: dict[str, tuple[str, Any]] = {}
    label = [""]
    with _compiling_only(seen, label):
        for log, l2norm, inner in product((True, False), (False, True), (False, True)):
            label[0] = f"{'log' if log else 'linear'} gates, {'L2 norm' if l2norm else 'raw keys'}"
            label[0] += ", checkpoints" if inner else ""
            _run(log, l2norm, inner)
    return [_measure(call, binary) for call, binary in seen.values()]


def _run(log: bool, l2norm: bool, checkpoints: bool) -> None:
    num_tokens, device, backend = 200, torch.device("cpu"), HopperBackend()
    q, k, v = (torch.zeros(num_tokens, h, 128, dtype=torch.bfloat16) for h in (1, 1, 2))
    gates = torch.zeros(num_tokens, 2)
    inputs = TokenInputs(q, k, v, gates, gates, 1.0, "log" if log else "linear", l2norm)
    plan = plan_prefill(
        [num_tokens],
        num_q_heads=1,
        num_k_heads=1,
        num_v_heads=2,
        head_dim=128,
        cp_chunk_len=64,
        checkpoint_positions=[[5, 128]] if checkpoints else None,
    )
    layout = layout_of_plan(plan, 0, device)
    (table,) = layout.tables
    maps = AffineMaps.empty(layout.num_maps, 2, 128, 128, device)
    entry_states = torch.zeros(layout.num_items, 2, 128, 128)
    sinks = Sinks(
        torch.zeros_like(v), torch.zeros(2, 2, 128, 128), torch.zeros(3, 2, 128, 128) if checkpoints else None
    )
    tiles = backend.precompute_t(inputs, table)
    backend.precompute_mn(inputs, tiles, table, entry_states, maps, 2.0**-16)
    backend.precompute_mn_and_open(inputs, tiles, table, entry_states, maps, 2.0**-16, sinks)
    assert maps.dropped is not None  # which launches what makes it
    backend.cp_prefill(inputs, tiles, table, entry_states, sinks)
    backend.cp_prefill_after_opening(inputs, tiles, table, entry_states, sinks)
    if layout.runs is not None:
        backend.fold.fold_runs(maps, entry_states, layout.runs)  # type: ignore[attr-defined]  # a RunFold
    backend.fold(entry_states[0], maps.transition[0], maps.local_state[0])
    backend.precompute_t(replace(inputs, gate=None, beta=None), table)


def _measure(call: str, binary: Any) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(binary.asm["cubin"])
        ptx.write_text(binary.asm["ptx"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(cubin))
        instructions = _tool("nvdisasm", "-c", str(cubin))
        notes = _tool("ptxas", "-arch=sm_90a", "-v", str(ptx), "-o", str(cubin))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Compiled(
        binary.metadata.name,
        call,
        int(found[1]),
        int(found[2]),
        binary.metadata.shared,
        len(re.findall(r"\bHG?MMA\b", instructions)),
        tuple(line for line in notes.splitlines() if "C75" in line),
    )


def _tool(name: str, *arguments: str) -> str:
    result = subprocess.run([str(_TOOLS / name), *arguments], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def main() -> int:
    """Non-zero where ptxas makes wgmma wait (C75xx) or a kernel asks for more shared memory than an SM has."""
    bad = 0
    for c in compile_all():
        fails = bool(c.warnings) or c.shared_bytes > 227 * 1024
        bad += fails
        print(
            f"{c.kernel:22} {c.registers:4} registers {c.spill_bytes:4} B spilled {c.shared_bytes:7} B shared "
            f"{c.mma:4} mma  {c.call}{'  FAILS ' + '; '.join(c.warnings) if fails else ''}"
        )
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
