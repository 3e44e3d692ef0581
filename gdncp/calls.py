"""From a caller's arguments to a `Call`: what calls of one kind have in common is checked and chosen once.

A kind is all that the host sees of a call but addresses and values: types, shapes, strides, dtypes, devices, words and
numbers.  What depends on values is looked at in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from gdncp.backends import Backend, Precision, TokenInputs, select_backend
from gdncp.layout import Layout
from gdncp.plan import PrefillPlan
from gdncp.stage_timer import StageTimer
from gdncp.stages import Call, StateIO


@dataclass(frozen=True, eq=False)
class Kind:
    """What is the same in every call of a kind."""

    backend: Backend
    forget_below: float
    scale: float
    output_shape: tuple[int, int, int]  # [T, H, V]
    state_shape: tuple[int, int, int]  # H, V, K
    num_checkpoints: int  # of this rank, to be allocated where the caller gives no memory


_KINDS: dict[tuple[Hashable, ...], Kind] = {}
_MOST_KINDS = 1024


def kind_of(tensors: tuple[Any, ...], words: tuple[Any, ...], validate: Callable[[], Kind]) -> Kind:
    """What `validate` returned for such tensors (or None) and the same words and numbers, or returns now.

    It is asked again wherever it raised, and wherever something is not what it should be: only what was found good is
    remembered.
    """
    facts: tuple[Hashable, ...] | None
    try:
        facts = (
            *[None if x is None else (x.__class__, x.shape, x.dtype, x.device, x.stride()) for x in tensors],
            *words,
            *map(type, words),  # True is not 1
        )
        kind = _KINDS.get(facts)
    except (AttributeError, TypeError, RuntimeError):  # no tensor, or nothing that can be remembered
        facts = kind = None
    if kind is not None:
        return kind
    kind = validate()
    if facts is not None:
        if len(_KINDS) >= _MOST_KINDS:
            _KINDS.clear()
        _KINDS[facts] = kind
    return kind


def requires_grad(x: Any) -> bool:
    """Of what may be no tensor."""
    return x is not None and getattr(x, "requires_grad", False)


def new_kind(
    q: torch.Tensor,
    v: torch.Tensor,
    *,
    backend: str,
    precision: Precision,
    scale: float | None,
    forget_below: float | None,
    num_checkpoints: int = 0,
) -> Kind:
    """From validated arguments: the backend chosen, defaults filled in."""
    heads, v_dim, k_dim = max(q.shape[1], v.shape[1]), v.shape[2], q.shape[2]
    chosen = select_backend(backend, device=q.device, dtype=q.dtype, k_dim=k_dim, v_dim=v_dim, precision=precision)
    if forget_below is None:
        forget_below = default_forget_below(q.dtype, precision)
    return Kind(
        chosen,
        float(forget_below),
        float(scale) if scale else 1.0 / math.sqrt(k_dim),
        (q.shape[0], heads, v_dim),
        (heads, v_dim, k_dim),
        num_checkpoints,
    )


def default_forget_below(dtype: torch.dtype, precision: Precision) -> float:
    """Below this share of a state what it would still contribute is dropped: the rounding of the arithmetic at hand."""
    return 2.0**-24 if dtype == torch.float32 or precision == "high" else 2.0**-16


def bind(
    kind: Kind,
    layout: Layout,
    inputs: TokenInputs,
    states: StateIO,
    output: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
    plan: PrefillPlan | None,
    rank: int,
    group: dist.ProcessGroup | None,
    *,
    timed: bool = False,
    keep_entry: bool = False,
) -> Call:
    """A `Call` from validated parts, the output allocated."""
    q, v = inputs.q, inputs.v
    if output is None:  # allocations like a tensor's cost half of others
        like, shape = v if v.shape == kind.output_shape else q, kind.output_shape
        output = torch.empty_like(like) if like.shape == shape else torch.empty(shape, dtype=q.dtype, device=q.device)
    timer = StageTimer(enabled=True, device=q.device) if timed else _untimed(q.device)
    return Call(
        kind,
        layout,
        kind.backend,
        inputs,
        states,
        kind.forget_below,
        kind.state_shape,
        output,
        checkpoints,
        plan,
        rank,
        group,
        timer,
        keep_entry,
    )


@lru_cache(maxsize=64)
def _untimed(device: torch.device) -> StageTimer:
    return StageTimer(enabled=False, device=device)


def new_states(rows: int, shape: tuple[int, int, int], device: torch.device, world_size: int) -> torch.Tensor:
    """[rows, H, V, K] fp32 for final states: zeros where other ranks write some of them."""
    new = torch.empty if world_size == 1 else torch.zeros
    return new((rows, *shape), dtype=torch.float32, device=device)
