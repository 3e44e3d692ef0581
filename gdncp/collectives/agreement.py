"""Agreement before data moves: small Python objects over the CPU, so that one rank's bad input raises on every rank."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gdncp.collectives.wire import backend_of, is_capturing, naming, world_group
from gdncp.plan import PrefillPlan

T = TypeVar("T")

_LAUNCH_TABLE = "GDNCP_LAUNCH_TABLE"  # block sizes decide about bits
_PEER_MEMORY = "GDNCP_PEER_MEMORY"  # how states travel

# Both die with the group they are keyed on, so a group made later, with the same ranks, starts afresh.
_side_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_agreed: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], None]] = WeakKeyDictionary()  # oldest first

_MOST_AGREED = 4096  # plans and facts that a group keeps; a serving process makes new ones for as long as it lives


def agree(group: dist.ProcessGroup | None, payload: T) -> list[T]:
    """Every rank's payload (anything that pickles), in the order of group ranks.  All ranks call it.

    Goes over gloo on the CPU: the group's own, or a side group of the same ranks, made once.  Without torch.distributed
    there is one rank.

    Raises:
        RuntimeError: a peer failed or did not arrive within the group's timeout.
    """
    if not dist.is_available() or not dist.is_initialized():
        return [payload]
    group = world_group(group)
    gathered: list[T | None] = [None] * dist.get_world_size(group)
    with naming("agreement between ranks", group):
        dist.all_gather_object(gathered, payload, group=_control_group(group))
    return gathered  # type: ignore[return-value]  # filled above


def agree_or_raise(
    group: dist.ProcessGroup | None,
    error: Exception | str | None,
    digest: str | None,
    facts: Mapping[str, Hashable],
) -> None:
    """Return on every rank, or raise the same ValueError on every rank.  All ranks call it.

    Args:
        error: what is wrong with this rank's input; None: nothing.
        digest: the plan's; None: no plan.
        facts: what the call was given and every rank must be given alike, such as scale, gate_space, dtype.  None: this
            rank has no say in it.

    Raises:
        ValueError: with the text of the first rank that has an error ("rank 2: ..."); or naming the first thing in
            which ranks differ, and every rank's value.
        RuntimeError: a peer failed or did not arrive within the group's timeout.
    """
    facts = {
        **facts,
        f"the launch table that {_LAUNCH_TABLE} names (by its digest)": _launch_table(),
        _PEER_MEMORY: os.environ.get(_PEER_MEMORY, "not set"),
    }
    answers = agree(group, (None if error is None else str(error), digest, facts))
    for rank, (text, _, _) in enumerate(answers):
        if text is not None:
            raise ValueError(text if len(answers) == 1 else f"rank {rank}: {text}")
    _require_same("plan (by its digest)", [their_digest for _, their_digest, _ in answers])
    for name in dict.fromkeys(name for _, _, theirs in answers for name in theirs):
        values = [theirs.get(name, "not given") for _, _, theirs in answers]
        _require_same(name, values, no_say=None)


def compare_digest_once(plan: PrefillPlan, group: dist.ProcessGroup | None = None, **facts: Hashable) -> None:
    """Raise ValueError on every rank unless all have this plan, and launch kernels by one table.  All ranks call it.

    Asks once per plan, group and facts: what else of the calls must be the same, since it decides what is exchanged.
    A group keeps the last thousands of agreements; all ranks ask again for an older one.

    Ranks that later mix up plans that they agreed on before are not found here; `agree_or_raise` in every call does.
    Does nothing for a plan of one rank without a group, and nothing while a CUDA graph is captured: call it (or run
    once) before.
    """
    if group is None and plan.world_size == 1:
        return
    group = world_group(group)
    agreed = _agreed.setdefault(group, {})
    key = (plan.digest, *facts.items())
    if key not in agreed and not is_capturing():  # which takes longer to ask than all the rest
        size = dist.get_world_size(group)
        fits = size == plan.world_size
        error = None if fits else f"group has {size} ranks; the plan was made for world_size={plan.world_size}"
        agree_or_raise(group, error, plan.digest, facts)
        # To ask is a collective, so all ranks must keep alike.  They agree on the same in the same order, whatever one
        # of them looks up in between: the first to go is what was agreed on first, not what was used least recently.
        agreed[key] = None
        if len(agreed) > _MOST_AGREED:
            del agreed[next(iter(agreed))]


@cache
def _launch_table() -> str:
    """Digest of the file that this process launches kernels by, read once as `gdncp_kernels.launch_table` does."""
    if not (path := os.environ.get(_LAUNCH_TABLE)):
        return "not set"
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    except OSError as error:  # which stops the rank where it needs the table
        return type(error).__name__


def _require_same(name: str, values: Sequence[Hashable], no_say: Hashable = "") -> None:
    ranks_of: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        if value != no_say:
            ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) > 1:
        said = "; ".join(f"{value!r} on rank {', '.join(map(str, ranks))}" for value, ranks in ranks_of.items())
        raise ValueError(f"ranks differ in {name}: {said}; it must be the same on every rank")


def _control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that speaks gloo on the CPU."""
    if backend_of(group, "cpu") == "gloo":
        return group
    side = _side_groups.get(group)
    if side is None:
        side = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout_of(group),
            backend="gloo",
            use_local_synchronization=True,
        )
        _side_groups[group] = side
    return side


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The group's timeout, which torch has no public name for; None: torch's default."""
    try:
        return group._get_backend(torch.device("cuda")).options._timeout
    except (AttributeError, RuntimeError):
        return None
