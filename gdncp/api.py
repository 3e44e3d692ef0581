"""The public calls of a planned prefill, whole or in its three parts.  FlashInfer's call: `gdncp.flashinfer_api`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from gdncp import collectives, stages, validation
from gdncp.backends import GateSpace, Precision, TokenInputs
from gdncp.calls import Kind, bind, kind_of, new_kind, new_states, requires_grad
from gdncp.layout import layout_of_plan
from gdncp.plan import PrefillPlan
from gdncp.stages import Call, EntryStates, FinalState, PrefillResult, StateIO, Summary

P = ParamSpec("P")
R = TypeVar("R")


def _call(
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
) -> Call:
    """The call that such arguments make, validated.  Communicates nothing.

    Forward only.  All token tensors hold this rank's tokens, in the order of `plan.token_ranges(rank)`.  T tokens of
    this rank, N sequences, H = max(Hq, Hv) state heads.

    Args:
        plan: from `plan_prefill`; the same on every rank.
        q, k, v: [T, Hq | Hk | Hv, D], one of fp16/bf16/fp32, contiguous.
        g: [T, H] fp32 forget gates, linear alpha in [0, 1] or, with `gate_space="log"`, natural logs.  None: ones.
        beta: [T, H] fp32 update gates.  None: ones.  A NaN in `g` or `beta`, which `check` refuses, makes what follows
            it in its sequence and head NaN, from the 64 tokens on in which it lies, and nothing else.
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
        backend: "auto" (on a GPU the first of hopper, triton and torch that can run the call), or one by name.
        precision: "fast" (tensor cores on the input dtype, fp32 accumulation) or "high" (fp32 arithmetic).
        forget_below: a CP chunk and head whose gates leave less than this share of the state that enters drops its
            transition; what that costs is bounded (`gdncp.forgetting`).  None: 2⁻²⁴ for float32 and "high", else 2⁻¹⁶.
            0: exact.
        check: all ranks agree on arguments first, and look at device values (gates that are NaN or of the other space,
            slots), for which they wait; one rank's error raises on every rank.
        timed: measure stages, see `PrefillResult.timings`.
        keep_entry: keep maps, entry states and inputs as `PrefillResult.entries`, for `gdncp.forgetting`.

    Raises:
        ValueError: naming the argument, what was given and what is allowed, before any data collective.
        NotImplementedError: for a device that no backend serves.
    """
    plan = validation.plan_argument(plan)
    rank, group = _rank_in(plan, group)
    pooled, source = state_pool is not None, state_pool if state_pool is not None else initial_state

    def validate() -> Kind:
        validation.words(backend, gate_space, precision, use_qk_l2norm_in_kernel)
        validation.one_of("final_state", final_state, ("owner", "all"))
        validation.token_tensors(q, k, v, g, beta, plan.num_tokens(rank))
        validation.plan_heads(plan, q, k, v)
        validation.numbers(scale, forget_below)
        if initial_state is not None and state_pool is not None:
            raise ValueError("initial_state must be None where state_pool is given, got both")
        if pooled != (state_indices is not None):
            raise ValueError("state_pool and state_indices must both be provided or both be None, got one alone")
        validation.state_indices_argument(state_indices, plan.num_sequences, q.device)
        destination = state_pool if output_state is None else output_state
        name = "state_pool" if pooled else "initial_state"
        validation.buffers(q, v, plan.num_sequences, pooled, source, output, destination, name)
        rows = len(plan.checkpoint_rows(rank))
        validation.checkpoint_rows(state_checkpoints, rows, q, v)
        return new_kind(
            q,
            v,
            backend=backend,
            precision=precision,
            scale=scale,
            forget_below=plan.forget_below if forget_below is None else forget_below,
            num_checkpoints=rows,
        )

    words = (backend, gate_space, precision, final_state, use_qk_l2norm_in_kernel)
    kind = kind_of(
        (q, k, v, g, beta, initial_state, state_pool, state_indices, output, output_state, state_checkpoints),
        (plan.digest, rank, *words, scale, forget_below, requires_grad(output)),
        validate,
    )
    validation.gate_values(g, gate_space, read_device=check)
    if check:
        validation.no_nan("g", g)
        validation.no_nan("beta", beta)
    validation.slot_values(state_indices, source, read_device=check)
    device = q.device
    if output_state is None:
        output_state = (
            state_pool if pooled else new_states(plan.num_sequences, kind.state_shape, device, plan.world_size)
        )
    if state_checkpoints is None and kind.num_checkpoints:
        state_checkpoints = torch.empty((kind.num_checkpoints, *kind.state_shape), dtype=torch.float32, device=device)
    return bind(
        kind,
        layout_of_plan(plan, rank, device, kind.state_shape[1]),
        TokenInputs(q, k, v, g, beta, kind.scale, gate_space, use_qk_l2norm_in_kernel, precision),
        StateIO(source, output_state, state_indices, final_state == "all"),
        output,
        state_checkpoints,
        plan,
        rank,
        group,
        timed=timed,
        keep_entry=keep_entry,
    )


def _from_arguments(name: str, run: Callable[[Call], R], bound: Callable[P, Call], summary: str) -> Callable[P, R]:
    """`run` as a public function of that name, of the arguments of `bound`."""

    def public(*args: P.args, **kwargs: P.kwargs) -> R:
        check, group = kwargs.get("check", False), kwargs.get("group")
        try:
            call = bound(*args, **kwargs)
        except Exception as error:  # of any kind: peers that wait for this rank's answer must get one
            if check:
                _agree(error, args[0] if args else kwargs.get("plan"), group)
            raise
        if check:
            _agree(call, call.plan, group)
        elif call.group is not None:
            assert call.plan is not None
            final_state = "all" if call.states.share else "owner"
            collectives.compare_digest_once(call.plan, call.group, backend=call.backend.name, final_state=final_state)
        return run(call)

    public.__name__ = public.__qualname__ = name
    arguments = inspect.getdoc(bound)
    assert arguments is not None
    public.__doc__ = summary + arguments[arguments.index("\n") :]
    signature = inspect.signature(bound).replace(return_annotation=inspect.signature(run).return_annotation)
    public.__signature__ = signature  # type: ignore[attr-defined]  # what `help` shows
    return public


summarise = _from_arguments(
    "summarise",
    stages.summarise,
    _call,
    "Stages 1 and 2 of a planned prefill: reduce this rank's CP chunks to their affine maps.  Communicates no data.",
)
prefill = _from_arguments(
    "prefill", stages.run, _call, "One prefill as `plan` lays it out: `finish(fixup(summarise(...)))`."
)


def fixup(summary: Summary) -> EntryStates:
    """Stage 3: the state that enters each CP chunk, by the plan's fixup.  A collective: every rank calls it.

    Nothing is sent where no sequence crosses ranks.  Raises RuntimeError, naming stage and strategy, if a peer fails.
    On CUDA and with `entry_late` the exchange is under way on a stream of its own when this returns.  `finish` joins
    it, and must follow where a CUDA graph is captured; entry states that are dropped instead keep their memory from
    others until the exchange has passed.
    """
    return stages.fixup(summary)


def finish(entry: EntryStates) -> PrefillResult:
    """Stage 4: outputs, state checkpoints and final states.  A collective only with `final_state="all"`."""
    return stages.finish(entry)


def warmup(
    plan: PrefillPlan,
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    with_gates: bool = True,
    state_dtype: torch.dtype | None = None,
    pooled: bool = False,
    **arguments: Any,
) -> None:
    """Do what a plan's first call does once, so that it costs what later ones cost, and can be captured in a graph.

    Without `dtype`: upload the plan's tables and compare digests across ranks.  With it, also run one prefill on zeros,
    allocated for the time of the call: kernels are compiled and loaded, NCCL connects, GPUs map each other's memory.  A
    collective where the plan has several ranks.

    Args:
        plan, device, group: as in the calls to come.
        dtype: of q, k and v.
        with_gates: whether they will have `g` and `beta`.
        state_dtype: of their initial states; None: they have none, or, if `pooled`, a pool in fp32.
        pooled: whether states lie in a pool, with int32 slots.
        arguments: words and numbers of `summarise`: `backend`, `gate_space`, `final_state`, ...  No tensors: they would
            be written.

    Raises:
        ValueError: on every rank if their plans differ; and as `summarise` does.
    """
    plan = validation.plan_argument(plan)
    validation.warmup_arguments(arguments)
    rank, peers = _rank_in(plan, group)
    if peers is not None:
        collectives.compare_digest_once(plan, peers)
    device = _with_index(torch.device(device))
    layout_of_plan(plan, rank, device)
    if dtype is None:
        return
    tokens, heads, dim = plan.num_tokens(rank), plan.num_state_heads, plan.head_dim

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    gates = zeros(tokens, heads, dtype=torch.float32) if with_gates else None
    if pooled:
        arguments["state_pool"] = zeros(plan.num_sequences, heads, dim, dim, dtype=state_dtype or torch.float32)
        arguments["state_indices"] = torch.arange(plan.num_sequences, dtype=torch.int32, device=device)
    elif state_dtype is not None:
        arguments["initial_state"] = zeros(plan.num_sequences, heads, dim, dim, dtype=state_dtype)
    q, k, v = (zeros(tokens, n, dim) for n in (plan.num_q_heads, plan.num_k_heads, plan.num_v_heads))
    prefill(plan, q, k, v, gates, gates, group=group, **arguments)


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
    if group is not None and not _is_group(group):
        raise ValueError(f"group must be a group of torch.distributed, got {group!r}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group must contain this process, got a group that it is not a member of")
    return rank, dist.get_world_size(group)


def _is_group(group: Any) -> bool:
    """Or what `new_group` returns to those outside."""
    return dist.is_available() and (isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER)


def _agree(outcome: Call | Exception, plan: Any, group: Any) -> None:
    """Raise the same ValueError on every rank unless all have a call, and calls that fit together."""
    # whom to agree with, whatever else is wrong with the call
    alone = isinstance(plan, PrefillPlan) and plan.world_size == 1
    if group is None and not alone and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)) or dist.get_world_size(group) == 1:
        return
    if isinstance(outcome, Call):
        assert outcome.plan is not None
        collectives.agree_or_raise(group, None, outcome.plan.digest, _facts(outcome))
        return
    kind = "" if isinstance(outcome, ValueError) else f"{type(outcome).__name__}: "
    try:
        collectives.agree_or_raise(group, f"{kind}{outcome}", None, {})
    except ValueError as agreed:
        raise agreed from outcome


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
