"""One document from the parts of a run, and its page."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gdncp import store
from gdncp.bench import machine

SCHEMA = 1
KIND = "multi_gpu"  # by which `gdncp.bench.report` tells these documents from those of one GPU
TIMED_OUT = (124, 137)  # exit codes of `timeout`
PEERS = ("flash-qla", "flash-linear-attention", "flashinfer-python", "tilelang")


def run(folder: Path, commit: str | None, parts: Sequence[str]) -> int:
    """Write multi_gpu.json and multi_gpu.md; returns 1 if something failed in a part, or a part is not there."""
    found = document(folder / "parts", commit, parts)
    store.write_json(folder / "multi_gpu.json", found)
    from gdncp.bench.multi_gpu import page  # needs what the tables need

    store.write_text(folder / "multi_gpu.md", page.markdown(found))
    print(folder / "multi_gpu.md")
    for line in found["troubles"]:
        print(line, file=sys.stderr)
    return 1 if found["troubles"] else 0


def document(folder: Path, commit: str | None, parts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"schema": SCHEMA, "kind": KIND, "environment": environment(commit), "parts": {}}
    troubles: list[str] = []
    for part in parts:
        path, ended = folder / f"{part}.json", folder / f"{part}.rc"
        code = int(ended.read_text()) if ended.exists() else None
        if not path.exists():
            if code is not None:
                troubles.append(f"{part}: ended with exit code {code} before it wrote anything")
            continue
        content = json.loads(path.read_text()) | {"exit_code": code}
        troubles += [f"{part}: {line}" for line in content["failures"]]
        for row in content.get("small", []) + content.get("large", []):
            troubles += [f"{part}: {row.get('case', row.get('tokens'))}: {line}" for line in row["wrong"]]
        if content["status"] == "running":
            why = "stopped at its time limit" if code in TIMED_OUT else f"ended early, exit code {code}"
            troubles.append(f"{part}: {why}")
        found["parts"][part] = content
    return found | {"troubles": troubles}


def environment(commit: str | None) -> dict[str, Any]:
    """Machine and versions.  The driver and the link as nvidia-smi says."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    count = torch.cuda.device_count() if cuda else 0
    nccl = torch.cuda.nccl.version() if cuda else None
    described = machine.describe(device, [])
    return described | {
        "commit": commit or described["commit"],
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
        "host": platform.platform(),
        "merged": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {name: known for name in PEERS if (known := _version(name))},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
