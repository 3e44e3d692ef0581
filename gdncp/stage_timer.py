"""How long each stage of a call takes, for those who ask."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_UNTIMED = nullcontext()


class StageTimer:
    """Device events on CUDA, a clock on the CPU; nothing at all unless enabled."""

    def __init__(self, *, enabled: bool, device: torch.device):
        self._enabled, self._device, self._cuda = enabled, device, device.type == "cuda"
        self._marks: dict[str, tuple[Any, Any]] = {}

    @property
    def enabled(self) -> bool:
        return self._enabled

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # which need not be on the current device
        return event

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self._measured(name) if self._enabled else _UNTIMED

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self._marks[name] = (start, self._now())

    def seconds(self) -> dict[str, float]:
        if not self._cuda:
            return {name: stop - start for name, (start, stop) in self._marks.items()}
        torch.cuda.synchronize(self._device)
        return {name: start.elapsed_time(stop) / 1e3 for name, (start, stop) in self._marks.items()}
