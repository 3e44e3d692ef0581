"""fp32 means fp32: run a stage out of reach of autocast, autograd and the process's matmul precision flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_HAS_FLAG_PER_BACKEND = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # from torch 2.9 on


@contextmanager
def ieee_fp32(device: torch.device) -> Iterator[None]:
    """Full fp32 products on `device` inside; every flag is as it was outside afterwards."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _ieee_products():
        yield


@contextmanager
def _ieee_products() -> Iterator[None]:
    if not _HAS_FLAG_PER_BACKEND:
        saved = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(saved)
        return
    # Only the newer flags: the older ones raise once a user has set a newer one, these never do (seen on 2.13).
    changed: list[tuple[Any, str]] = []
    for flags in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]  # torch's stubs lack it
        precision = flags.fp32_precision
        if precision not in ("none", "ieee"):
            flags.fp32_precision = "ieee"
            changed.append((flags, precision))
    try:
        yield
    finally:
        for flags, precision in changed:
            flags.fp32_precision = "none"  # follows the flag above it ...
            if flags.fp32_precision != precision:  # ... unless the user had set this one itself
                flags.fp32_precision = precision
