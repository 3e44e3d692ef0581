"""The streams that work runs on beside the caller's, made once."""

from __future__ import annotations

import torch

_LANES: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
_EXCHANGES: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def lane_stream(device: torch.device, lane: int) -> torch.cuda.Stream:
    """Of a lane from 1; lane 0 is on the caller's."""
    if (device, lane) not in _LANES:
        _LANES[device, lane] = torch.cuda.Stream(device)
    return _LANES[device, lane]


def exchange_stream(device: torch.device, lane: int) -> torch.cuda.Stream:
    """Of high priority: what an exchange waits for, and folds, must not queue behind the programs of stage 4."""
    if (device, lane) not in _EXCHANGES:
        _EXCHANGES[device, lane] = torch.cuda.Stream(device, priority=-1)
    return _EXCHANGES[device, lane]
