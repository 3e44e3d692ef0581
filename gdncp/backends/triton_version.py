"""Whether the installed Triton is one that a kernel set can use."""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib.metadata import version

from gdncp.installed import stop

MIN_TRITON = (3, 4)  # what the plain kernels need


@cache  # reading a package's version takes longer than launching the kernels
def triton_rejection_reason(minimum: tuple[int, int], module: str = "triton") -> str | None:
    """Why not, as a sentence; None if Triton is there, at least `minimum`, and has `module`."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed."
    found = tuple(int(part) for part in version("triton").split(".")[:2])
    if found < minimum or importlib.util.find_spec(module) is None:
        part = "" if module == "triton" else f" with {module}"
        return f"triton is {version('triton')}; {minimum[0]}.{minimum[1]} or newer{part} is needed."
    return None


def need_triton(command: str) -> None:
    """As `gdncp.installed.need`, for a command that imports Triton at once."""
    if (reason := triton_rejection_reason(MIN_TRITON)) is not None:
        stop(command, reason, "triton")
