"""Launches that compile for a GPU that is not there, and what the compiled kernels take.

The launchers themselves run, on small CPU tensors and under a driver that pretends to be the GPU, so that what is
compiled is what is launched.  TRITON_INTERPRET must not be set: interpreted kernels have nothing to compile.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gdncp_kernels.hopper.launch import Launcher

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_TENSOR_CORE = re.compile(r"\b(?:[HQIODB]G?MMA|UTC[A-Z]*MMA)\b")


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes."""

    registers: int  # a thread, at launch
    spill_bytes: int  # stack a thread, where ptxas puts what it spills
    shared_bytes: int  # a program
    mma: dict[str, int]  # tensor-core instructions by name
    warnings: tuple[str, ...]  # of ptxas about wgmma and register hand-over


class NotCompiled(Exception):
    """A launch that cannot go on without its kernel; `note` has been told why."""


class _PretendedDriver:
    utils = SimpleNamespace(fill_tma_descriptor=lambda *_: None)

    def __init__(self, arch: int):
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch  # Triton keeps one target a device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_only(arch: int, note: Callable[[str, Any], None], only: str | None = None) -> Iterator[None]:
    """Every launch inside compiles for sm_`arch`, and nothing runs.

    `note` gets the kernel's name and its binary, or the exception that compiling it raised.  `only`: the name of the
    one kernel to compile.
    """

    def compiled(kernel: JITFunction, *arguments: Any, **options: Any) -> Any:
        if only not in (None, kernel.__name__):
            return None
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # Triton prints the code that ptxas refused
                binary = kernel.run(*arguments, **{**options, "grid": (1,), "warmup": True})
        except Exception as error:
            note(kernel.__name__, error)
            return None
        note(kernel.__name__, binary)
        return binary

    def launch(kernel: JITFunction, grid: Any) -> Any:
        return partial(compiled, kernel)

    def variant(launcher: Launcher, arguments: Any) -> Any:
        binary = compiled(launcher.kernel, *arguments, **launcher.options)
        if binary is None:
            raise NotCompiled
        return SimpleNamespace(
            tensor_maps=binary.metadata.tensordesc_meta,
            arguments=lambda *_: (),
            launch=lambda *_: None,
        )

    previous = driver._active
    driver.set_active(_PretendedDriver(arch))
    try:
        with patch.object(JITFunction, "__getitem__", launch), patch.object(Launcher, "variant", variant):
            yield
    finally:
        driver.set_active(previous)


def measure(arch: int, binary: Any) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(binary.asm["cubin"])
        usage = _run(_TOOLS / "cuobjdump", "--dump-resource-usage", cubin)
        mma = Counter(_TENSOR_CORE.findall(_run(_TOOLS / "nvdisasm", "-c", cubin)))
        notes = ""
        if "wgmma" in binary.asm["ptx"]:
            ptx = Path(folder, "kernel.ptx")
            ptx.write_text(binary.asm["ptx"])
            notes = _run(get_ptxas(arch).path, f"-arch=sm_{arch}a", "-v", ptx, "-o", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    warnings = tuple(line for line in notes.splitlines() if "C75" in line)
    return Resources(int(found[1]), int(found[2]), binary.metadata.shared, dict(mma), warnings)


def _run(*command: str | Path) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {result.stderr.strip()}")
    return result.stdout + result.stderr
