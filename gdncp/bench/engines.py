"""What an engine is, to the bench: a name, whether it is here, and calls on a case's inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from gdncp.bench.cases import Case, Tokens


class Result(NamedTuple):
    output: torch.Tensor  # [T, H, V] in the case's dtype
    final_state: torch.Tensor  # [N, H, V, K] fp32


class Bound(NamedTuple):
    """An engine bound to a case: one call per input set, and what it will say about how it runs them."""

    calls: list[Callable[[], Result]]
    detail: dict[str, Any]
    stages: Callable[[], dict[str, float]] | None = None  # seconds per stage of one more call, timed


class Engine(Protocol):
    name: str  # unique; "LIBRARY" or "LIBRARY:MODE"
    ours: bool
    compiles_to_disk: bool  # a process that ran before this one makes its first calls cheap

    def absent_reason(self, device: torch.device) -> str | None:
        """Why it cannot run in this process at all; None if it can.  May import a library."""
        ...

    def version(self) -> str:
        """Of the library; asked of peers only."""
        ...

    def rejection_reason(self, case: Case) -> str | None:
        """Why it cannot run this case; None if it can."""
        ...

    def bind(self, case: Case, sets: Sequence[Tokens]) -> Bound: ...
