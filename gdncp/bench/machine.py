"""Where a run took place: device, versions, clocks, and the two ceilings that every time is held against."""

from __future__ import annotations

import importlib
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gdncp.bench.engines import Engine
from gdncp.bench.timing import Clock


def describe(device: torch.device, engines: Sequence[Engine]) -> dict[str, Any]:
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device": properties.name if properties else platform.processor() or platform.machine(),
        "sms": properties.multi_processor_count if properties else None,
        "l2_bytes": l2_bytes(device),
        "driver": gpu_query("driver_version", device) if cuda else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _module_version("triton"),
        "commit": _commit(),
        "versions": {engine.name.split(":")[0]: engine.version() for engine in engines if not engine.ours},
    }


def l2_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def gpu_query(field: str, device: torch.device) -> str | None:
    """One field of nvidia-smi; None where it cannot be read."""
    program = shutil.which("nvidia-smi")
    if program is None or device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    command = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits", f"--id=GPU-{uuid}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def clocks(device: torch.device) -> dict[str, str | None]:
    """SM and memory clock in MHz, power in W and temperature in °C, as read just now."""
    names = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    found = gpu_query(",".join(names), device)
    values = found.split(",") if found else []
    return {name: value.strip() for name, value in zip(names, values, strict=False)}


def ceilings(device: torch.device, dtype: torch.dtype, clock: Clock) -> dict[str, float]:
    """What the device does at best, measured on random data: a large matrix product and a large copy.

    Returns "flops" (per second, in `dtype`) and "bytes" (per second, counting what is read and what is written).
    """
    cuda = device.type == "cuda"
    n, copied = (8192, 2**31) if cuda else (256, 2**24)
    random = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, generator=random, device=device).to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    source = torch.randint(-(2**31), 2**31 - 1, (copied // 4,), generator=random, device=device, dtype=torch.int32)
    target = torch.empty_like(source)

    def best(call: Any) -> float:
        clock.times([call], 3)
        return statistics.median(clock.times([call], 10)) / 1e3

    return {
        "flops": 2.0 * n**3 / best(lambda: torch.matmul(a, b, out=c)),
        "bytes": 2.0 * copied / best(lambda: target.copy_(source)),
    }


def _module_version(name: str) -> str | None:
    try:
        return str(getattr(importlib.import_module(name), "__version__", None))
    except ImportError:
        return None


def _commit() -> str | None:
    """The commit of the working tree, with a mark where files differ from it."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
