"""Kernel sets by name, and which one runs a call."""

from __future__ import annotations

import torch

from gdncp.backends.base import (
    AffineMaps,
    Backend,
    Fold,
    FoldRuns,
    GateSpace,
    OpeningBackend,
    Precision,
    RunFold,
    Sinks,
    TokenInputs,
)

__all__ = [
    "BACKEND_NAMES",
    "AffineMaps",
    "Backend",
    "Fold",
    "FoldRuns",
    "GateSpace",
    "OpeningBackend",
    "Precision",
    "RunFold",
    "Sinks",
    "TokenInputs",
    "get_backend",
    "select_backend",
]

_OURS = ("hopper", "triton", "torch")  # in the order in which "auto" asks them on a GPU
_PEERS = ("flashinfer", "fla", "flash_qla", "cudnn")
BACKEND_NAMES = ("auto", *_OURS, *_PEERS)

_INSTANCES: dict[str, Backend] = {}


def get_backend(name: str) -> Backend:
    """The kernel set of that name.  Imported on first use, so that the library does not need what a set needs."""
    if name not in _INSTANCES:
        if name == "torch":
            from gdncp.backends.torch_backend import TorchBackend

            _INSTANCES[name] = TorchBackend()
        elif name == "hopper":
            from gdncp.backends.hopper_backend import HopperBackend

            _INSTANCES[name] = HopperBackend()
        else:
            from gdncp.backends.triton_backend import TritonBackend

            _INSTANCES[name] = TritonBackend()
    return _INSTANCES[name]


def select_backend(
    name: str, *, device: torch.device, dtype: torch.dtype, k_dim: int, v_dim: int, precision: Precision
) -> Backend:
    """The backend that runs such a call.  A named one that cannot raises with the reason.

    "auto" takes the first of ours that can: on a GPU of hopper, triton and torch, on a CPU torch.

    Raises ValueError with the reason, and NotImplementedError for a device that no backend serves.
    """
    if name not in BACKEND_NAMES:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKEND_NAMES))}, got {name!r}")
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"no backend serves device type {device.type!r}; tensors must be on 'cpu' or 'cuda'")
    if name in _PEERS:
        raise ValueError(f"backend {name!r} is another library's engine and not available in this version of gdncp")
    reasons = []
    # the interpreter runs Triton on a CPU for tests, at a speed that no caller of "auto" wants
    candidates = (name,) if name != "auto" else _OURS if device.type == "cuda" else ("torch",)
    for candidate in candidates:
        backend = get_backend(candidate)
        reason = backend.rejection_reason(device=device, dtype=dtype, k_dim=k_dim, v_dim=v_dim, precision=precision)
        if reason is None:
            return backend
        reasons.append(f"{candidate}: {reason}")
    raise ValueError(f"backend {name!r} cannot run this call ({'; '.join(reasons)})")
