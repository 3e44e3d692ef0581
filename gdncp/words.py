"""Checks of the words and numbers of a call; see `gdncp.validation`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gdncp.backends import BACKEND_NAMES


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def words(backend: Any, gate_space: Any, precision: Any, use_qk_l2norm_in_kernel: Any) -> None:
    one_of("backend", backend, BACKEND_NAMES)
    one_of("gate_space", gate_space, ("linear", "log"))
    one_of("precision", precision, ("fast", "high"))
    one_of("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel, (True, False))


_OF_WARMUP = (
    *("backend", "gate_space", "precision", "use_qk_l2norm_in_kernel", "final_state", "scale", "forget_below"),
    *("check", "timed", "keep_entry"),
)


def warmup_arguments(arguments: Mapping[str, Any]) -> None:
    """Those of `summarise` that `gdncp.warmup` hands on; looked at whether it makes a call or not."""
    for name in arguments:
        if name not in _OF_WARMUP:
            raise ValueError(f"{name} must not be given to warmup, which takes {', '.join(_OF_WARMUP)} of a call's")
    words(
        arguments.get("backend", "auto"),
        arguments.get("gate_space", "linear"),
        arguments.get("precision", "fast"),
        arguments.get("use_qk_l2norm_in_kernel", False),
    )
    one_of("final_state", arguments.get("final_state", "owner"), ("owner", "all"))
    numbers(arguments.get("scale"), arguments.get("forget_below"))


def numbers(scale: Any, forget_below: Any) -> None:
    if scale is not None and not _is_finite(scale):
        raise ValueError(f"scale must be a finite float, or None or 0 for 1/sqrt(head dim), got {_shown(scale)}")
    if forget_below is None:
        return
    if isinstance(forget_below, bool) or not isinstance(forget_below, (int, float)) or not 0 <= forget_below < 1:
        raise ValueError(
            f"forget_below must lie in [0, 1) or be None for the dtype's default, got {_shown(forget_below)}"
        )


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def _shown(value: Any) -> str:
    return f"an int of {value.bit_length()} bits" if is_int(value) and value.bit_length() > 64 else repr(value)
