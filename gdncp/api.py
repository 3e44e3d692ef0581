"""The public calls of a planned prefill, whole or in its three parts.  FlashInfer's call: `gdncp.flashinfer_api`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
import torch.distributed as dist

from gdncp import collectives, stages, validation
from gdncp.backends import GateSpace, Precision, TokenInputs, select_backend
from gdncp.layout import Layout, layout_of_plan
from gdncp.plan import PrefillPlan
from gdncp.stages import Call, EntryStates, FinalState, PrefillResult, StageTimer, StateIO, Summary

P = ParamSpec("P")


def default_forget_below(dtype: torch.dtype, precision: Precision) -> float:
    """Below this share of a state what it would still contribute is dropped: the rounding of the arithmetic at hand."""
    return 2.0**-24 if dtype == torch.float32 or precision == "high" else 2.0**-16


def summarise(
    plan: PrefillPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    state_pool: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    gate_space: GateSpace = "linear",
    use_qk_l2norm_in_kernel: bool = False,
    final_state: FinalState = "owner",
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    backend: str = "auto",
    precision: Precision = "fast",
    forget_below: float | None = None,
    check: bool = False,
    timed: bool = False,
    keep_entry: bool = False,
) -> Summary:
    """Stages 1 and 2 of a planned prefill: reduce this rank's CP chunks to their affine maps.  Communicates no data.

    Forward only.  All token tensors hold this rank's tokens, in the order of `plan.token_ranges(rank)`.  T tokens of
    this rank, N sequences, H = max(Hq, Hv) state heads.

    Args:
        plan: from `plan_prefill`; the same on every rank.
        q, k, v: [T, Hq | Hk | Hv, D], one of fp16/bf16/fp32, contiguous.
        g: [T, H] fp32 forget gates, linear alpha in [0, 1] or, with `gate_space="log"`, natural logs.  None: ones.
        beta: [T, H] fp32 update gates.  None: ones.
        scale: None or 0: 1/√D.
        initial_state: [N, H, V, K] in a state dtype, on every rank that holds the first token of a sequence.
        state_pool, state_indices: instead: sequence i starts from `state_pool[state_indices[i]]`, [P, H, V, K] and
            [N] int32/int64, and its final state goes to the same slot of `output_state`, or of the pool itself.
        group: the ranks of the plan (its rank r is group rank r); None: the default group, or no communication where
            the plan has one rank.
        use_qk_l2norm_in_kernel: q and k times rsqrt(Σx² + 1e-6), in fp32.
        final_state: "owner": the rows of sequences that end on this rank; "all": every row on every rank, by one
            exchange after stage 4.
        output, output_state, state_checkpoints: preallocated results [T, H, V] (dtype of q), [N, H, V, K] and
            [len(plan.checkpoint_rows(rank)), H, V, K] (any state dtype).  None: allocated, states in fp32 and zeros.
        backend: "auto" (on a GPU triton where it can, else torch), "triton", "torch", or "hopper", never taken unnamed.
        precision: "fast" (tensor cores on the input dtype, fp32 accumulation) or "high" (fp32 arithmetic).
        forget_below: a CP chunk and head whose gates leave less than this share of the state that enters drops its
            transition; what that costs is bounded (`gdncp.forgetting`).  None: 2⁻²⁴ for float32 and "high", else 2⁻¹⁶.
            0: exact.
        check: all ranks agree on arguments first, and look at device values; one rank's error raises on every rank.
        timed: measure stages, see `PrefillResult.timings`.
        keep_entry: keep maps, entry states and inputs as `PrefillResult.entry`, for `gdncp.forgetting`.

    Raises:
        ValueError: naming the argument, what was given and what is allowed, before any data collective.
        NotImplementedError: for a device that no backend serves.
    """
    arguments = dict(locals())
    if not check:
        call = _call(**arguments)
        if call.group is not None:
            collectives.compare_digest_once(plan, call.group)
        return stages.summarise(call)
    outcome: Call | Exception
    try:
        outcome = _call(**arguments)
    except Exception as error:  # of any kind: peers that wait for this rank's answer must get one
        outcome = error
    _agree(outcome, _peers(plan, group))
    if isinstance(outcome, Exception):
        raise outcome
    return stages.summarise(outcome)


def fixup(summary: Summary) -> EntryStates:
    """Stage 3: the state that enters each CP chunk, by the plan's fixup.  A collective: every rank calls it.

    Nothing is sent where no sequence crosses ranks.  Raises RuntimeError, naming stage and strategy, if a peer fails.
    """
    return stages.fixup(summary)


def finish(entry: EntryStates) -> PrefillResult:
    """Stage 4: outputs, state checkpoints and final states.  A collective only with `final_state="all"`."""
    return stages.finish(entry)


def _whole(first: Callable[P, Summary]) -> Callable[P, PrefillResult]:
    """`prefill` has the arguments of its first part."""

    def prefill(*args: P.args, **kwargs: P.kwargs) -> PrefillResult:
        """One prefill as `plan` lays it out: `finish(fixup(summarise(...)))`.  Arguments and errors: `summarise`."""
        return finish(fixup(first(*args, **kwargs)))

    signature = inspect.signature(first).replace(return_annotation="PrefillResult")
    prefill.__signature__ = signature  # type: ignore[attr-defined]  # what `help` shows
    return prefill


prefill = _whole(summarise)


def warmup(plan: PrefillPlan, *, device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None) -> None:
    """Do what a plan's first call does once: upload its tables and compare digests across ranks.

    Kernels are compiled, and NCCL connects, in the first call itself.  A collective where the plan has several ranks.
    Raises ValueError on every rank if their plans differ.
    """
    plan = validation.plan_argument(plan)
    rank, group = _rank_in(plan, group)
    if group is not None:
        collectives.compare_digest_once(plan, group)
    layout_of_plan(plan, rank, _with_index(torch.device(device)))


def _with_index(device: torch.device) -> torch.device:
    """Tensors say "cuda:0" where people say "cuda"."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _rank_in(plan: PrefillPlan, group: dist.ProcessGroup | None) -> tuple[int, dist.ProcessGroup | None]:
    """This process's rank in the plan, and the group to talk over; none where the plan has one rank."""
    if group is None:
        if plan.world_size == 1:
            return 0, None
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"group must be given for a plan of {plan.world_size} ranks without a default group, got None"
            )
        group = dist.group.WORLD
    rank, world_size = place_in(group)
    if world_size != plan.world_size:
        raise ValueError(f"group must have the plan's {plan.world_size} ranks, got {world_size}")
    return rank, group if world_size > 1 else None


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in the group (None: the default one), and its world size."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group must contain this process, got a group that it is not a member of")
    return rank, dist.get_world_size(group)


def _peers(plan: Any, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Whom to agree with, whatever else is wrong with the call; None: nobody."""
    alone = isinstance(plan, PrefillPlan) and plan.world_size == 1
    if group is None and not alone and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return group if group is not None and dist.get_world_size(group) > 1 else None


def _agree(outcome: Call | Exception, peers: dist.ProcessGroup | None) -> None:
    """Raise the same ValueError on every rank unless all have a call, and calls that fit together."""
    if peers is None:
        return
    if isinstance(outcome, Call):
        assert outcome.plan is not None
        collectives.agree_or_raise(peers, None, outcome.plan.digest, _facts(outcome))
        return
    kind = "" if isinstance(outcome, ValueError) else f"{type(outcome).__name__}: "
    try:
        collectives.agree_or_raise(peers, f"{kind}{outcome}", None, {})
    except ValueError as agreed:
        raise agreed from outcome


def _call(
    *,
    plan: Any,
    group: dist.ProcessGroup | None,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any,
    initial_state: Any,
    state_pool: Any,
    state_indices: Any,
    gate_space: Any,
    use_qk_l2norm_in_kernel: Any,
    final_state: Any,
    output: Any,
    output_state: Any,
    state_checkpoints: Any,
    backend: Any,
    precision: Any,
    forget_below: Any,
    check: bool,
    timed: bool,
    keep_entry: bool,
) -> Call:
    """Validate the arguments of `summarise` and bind them to the plan.  Communicates nothing."""
    plan = validation.plan_argument(plan)
    rank, group = _rank_in(plan, group)
    validation.words(backend, gate_space, precision)
    validation.one_of("final_state", final_state, ("owner", "all"))
    validation.token_tensors(q, k, v, g, beta, plan.num_tokens(rank), gate_space, read_device=check)
    validation.plan_heads(plan, q, k, v)
    validation.numbers(scale, forget_below)
    if initial_state is not None and state_pool is not None:
        raise ValueError("initial_state must be None where state_pool is given, got both")
    if (state_pool is None) != (state_indices is None):
        raise ValueError("state_pool and state_indices must both be provided or both be None, got one alone")
    pooled, source = state_pool is not None, state_pool if state_pool is not None else initial_state
    if pooled and output_state is None:
        output_state = state_pool
    validation.state_indices_argument(
        state_indices, plan.num_sequences, q.device, validation.num_slots(source), read_device=check
    )
    rows = len(plan.checkpoint_rows(rank))
    validation.buffers(
        q, v, plan.num_sequences, pooled, source, output, output_state, "state_pool" if pooled else "initial_state"
    )
    validation.checkpoint_rows(state_checkpoints, rows, q, v)
    heads, v_dim, k_dim = validation.state_shape(q, v)
    if output_state is None:
        output_state = new_states(plan.num_sequences, heads, v_dim, k_dim, q.device, plan.world_size)
    if state_checkpoints is None and rows:
        state_checkpoints = torch.empty(rows, heads, v_dim, k_dim, dtype=torch.float32, device=q.device)
    return bind(
        layout_of_plan(plan, rank, q.device),
        TokenInputs(
            q, k, v, g, beta, scale_or_default(scale, k_dim), gate_space, bool(use_qk_l2norm_in_kernel), precision
        ),
        StateIO(source, output_state, slots_of(state_indices), share=final_state == "all"),
        backend=backend,
        forget_below=forget_below,
        output=output,
        checkpoints=state_checkpoints,
        plan=plan,
        rank=rank,
        group=group,
        timed=timed,
        keep_entry=keep_entry,
    )


def bind(
    layout: Layout,
    inputs: TokenInputs,
    states: StateIO,
    *,
    backend: str,
    forget_below: float | None,
    output: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
    plan: PrefillPlan | None = None,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
    timed: bool = False,
    keep_entry: bool = False,
) -> Call:
    """A `Call` from validated parts: the backend chosen, defaults filled in, the output allocated."""
    q, v, precision = inputs.q, inputs.v, inputs.precision
    chosen = select_backend(
        backend, device=q.device, dtype=q.dtype, k_dim=q.shape[2], v_dim=v.shape[2], precision=precision
    )
    if forget_below is None and plan is not None:
        forget_below = plan.forget_below
    if forget_below is None:
        forget_below = default_forget_below(q.dtype, precision)
    if output is None:
        output = q.new_empty(q.shape[0], inputs.num_state_heads, v.shape[2])
    timer = StageTimer(enabled=timed, device=q.device)
    return Call(
        layout, chosen, inputs, states, float(forget_below), output, checkpoints, plan, rank, group, timer, keep_entry
    )


def new_states(rows: int, heads: int, v_dim: int, k_dim: int, device: torch.device, world_size: int) -> torch.Tensor:
    """[rows, H, V, K] fp32 for final states: zeros where other ranks write some of them."""
    new = torch.empty if world_size == 1 else torch.zeros
    return new(rows, heads, v_dim, k_dim, dtype=torch.float32, device=device)


def scale_or_default(scale: float | None, k_dim: int) -> float:
    return float(scale) if scale else 1.0 / math.sqrt(k_dim)


def slots_of(state_indices: torch.Tensor | None) -> torch.Tensor | None:
    return None if state_indices is None else state_indices.to(torch.int64)


def _facts(call: Call) -> dict[str, Any]:
    """What must be the same on every rank beside the plan."""
    inputs = call.inputs
    return {
        "device": inputs.q.device.type,
        "dtype": str(inputs.q.dtype),
        "head dim of v": inputs.v.shape[2],  # the plan has that of q and k
        "scale": inputs.scale,
        "gate_space": inputs.gate_space,
        "use_qk_l2norm_in_kernel": inputs.use_qk_l2norm,
        "precision": inputs.precision,
        "forget_below": call.forget_below,
        "backend": call.backend.name,
        "final_state": "all" if call.states.share else "owner",
        "initial states": _given(call.states.source) if call.layout.first_rows.numel() else None,
    }


def _given(x: object) -> str:
    return "none" if x is None else "given"
