"""FlashInfer's call, argument for argument, with ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gdncp import collectives, stages, validation
from gdncp.api import place_in
from gdncp.backends import GateSpace, Precision, TokenInputs
from gdncp.calls import Kind, bind, kind_of, new_kind, new_states, requires_grad
from gdncp.layout import Layout, layout_of_cu_seqlens, layout_of_plan
from gdncp.plan import PrefillPlan, default_profile, plan_prefill
from gdncp.plan.choose import balanced, unsplit
from gdncp.stages import StateIO


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
    state_indices: torch.Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
    *,
    gate_space: GateSpace = "linear",
    cu_seqlens_host: Sequence[int] | torch.Tensor | None = None,
    plan: PrefillPlan | None = None,
    group: dist.ProcessGroup | None = None,
    precision: Precision = "fast",
    forget_below: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gated delta rule over packed sequences: FlashInfer's call of this name (0.7), defined where that one is not.

        S_t = alpha_t · S_{t-1} · (I − beta_t k_t k_tᵀ) + beta_t v_t k_tᵀ,    o_t = scale · S_t q_t

    T tokens, N sequences, H = max(Hq, Hv) state heads.  Forward only: outputs carry no gradient.

    Args:
        q, k, v: [T, Hq | Hk | Hv, D], one of fp16/bf16/fp32, contiguous.  Equal heads, GQA (Hk = Hv, Hq a multiple) or
            GVA (Hq = Hk, Hv a multiple).
        g: [T, H] fp32 forget gates, linear alpha in [0, 1]; natural logs with `gate_space="log"`.  None: ones.
        beta: [T, H] fp32 update gates, used as given.  None: ones.  A NaN in `g` or `beta` makes what follows it in its
            sequence and head NaN, from the 64 tokens on in which it lies, and nothing else.
        scale: None or 0: 1/√D.
        initial_state: [N, H, V, K], or with `state_indices` a pool [P, H, V, K]; fp32/bf16/fp16/fp8 (e4m3fn, e5m2), any
            positive strides that do not overlap.  None: zeros, with the same bits as zeros.
        output_final_state: also return the final states.
        cu_seqlens: [N+1] int32/int64 cumulative lengths on q's device.  None: one sequence of T tokens.
        use_qk_l2norm_in_kernel: q and k times rsqrt(Σx² + 1e-6), in fp32.
        output: [T, H, V] preallocated, dtype of q.
        output_state: preallocated, as `initial_state` with its own dtype; required with `state_indices` where the final
            state is asked for; may be `initial_state` itself.  Without it fp32 [N, H, V, K] is allocated.  Written
            wherever it is given, also with `output_final_state=False`.
        state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens: row `checkpoint_cu_starts[i] + j` of the
            buffer [sum(len_i // n), H, V, K] gets the state after (j + 1)·n tokens of sequence i.  n a multiple of 64.
        use_cp: "auto" by predicted time; True the staged path; False every sequence in one piece.
        state_indices: [N] int32/int64 pool slot per sequence, unique.  No other row is touched.
        _cp_chunk_len: tokens in a CP chunk, a multiple of 64; implies the staged path unless `use_cp=False`.
        backend: "auto" (on a GPU the first of hopper, triton and torch that can run the call), or one by name.
            A named one that cannot run raises with the reason.
        max_seqlen: upper bound on the longest sequence, ceil(T/N) ... T.  Never costs a token if it is too small.
        gate_space: "linear" or "log": what `g` holds.
        cu_seqlens_host: the offsets on the host, ints or a CPU tensor; saves building tables on the device.  Required
            with a group of several ranks.
        plan: a prepared plan of the same lengths, heads and checkpoint interval; its CP chunks are run, and a
            `_cp_chunk_len` or `use_cp=False` that they do not honour is refused.
        group: ranks.  Token tensors and checkpoint rows are this rank's (in the order of `plan.token_ranges(rank)`),
            `cu_seqlens`, `checkpoint_cu_starts` and `initial_state` are global; final states are written by the rank
            where a sequence ends.  Without `plan` it equals `plan_prefill(seq_lens, world_size=W, ...)` with the
            profile that it takes by itself, on any device: who holds which tokens depends on it.
        precision, forget_below: see `gdncp.summarise`.

    Returns:
        `output`, or `(output, final_state)`.

    Raises:
        ValueError: naming the argument, what was given and what is allowed, before anything is written or sent.
        NotImplementedError: for a device that no backend serves.
    """
    rank, world_size = (0, 1) if group is None else place_in(group)
    every, seen = checkpoint_every_n_tokens, isinstance(q, torch.Tensor) and q.dim() == 3
    tokens, device = (q.shape[0] if world_size == 1 else None, q.device) if seen else (None, None)
    seq_lens = validation.cu_seqlens_arguments(cu_seqlens, cu_seqlens_host, tokens, device)
    if plan is not None:
        given = None if cu_seqlens is None else cu_seqlens.numel() - 1
        seq_lens = validation.plan_lengths(plan, seq_lens, given, world_size, every)
    if seq_lens is None and world_size > 1:
        raise ValueError(f"cu_seqlens_host must be given with a group of {world_size} ranks, got None")
    num_sequences = len(seq_lens) if seq_lens is not None else 1 if cu_seqlens is None else cu_seqlens.numel() - 1

    def validate() -> Kind:
        validation.words(backend, gate_space, precision, use_qk_l2norm_in_kernel)
        validation.one_of("use_cp", use_cp, ("auto", True, False))
        validation.checkpoint_arguments(every, state_checkpoints, checkpoint_cu_starts)
        total = sum(seq_lens) if seq_lens is not None else tokens
        if total is not None:
            validation.max_seqlen_argument(max_seqlen, total, num_sequences)
        validation.state_indices_argument(state_indices, num_sequences, device)
        if state_indices is not None and output_final_state and output_state is None:
            raise ValueError("output_state must be given with state_indices where output_final_state is True, got None")
        if state_indices is not None and initial_state is None and output_state is None:
            raise ValueError("state_indices must be None where neither initial_state nor output_state is a pool")
        validation.token_tensors(q, k, v, g, beta, None)
        validation.numbers(scale, forget_below)
        validation.buffers(q, v, num_sequences, state_indices is not None, initial_state, output, output_state)
        validation.cp_chunk_len_argument(_cp_chunk_len)
        if use_cp is False and world_size > 1:
            raise ValueError(f"use_cp must be True or 'auto' with a group of {world_size} ranks, got False")
        if plan is not None:
            validation.plan_grid(plan, use_cp, _cp_chunk_len)
        bound = plan.forget_below if forget_below is None and plan is not None else forget_below
        return new_kind(q, v, backend=backend, precision=precision, scale=scale, forget_below=bound)

    buffers = (initial_state, output, output_state, state_checkpoints, checkpoint_cu_starts, state_indices)
    words = (backend, gate_space, precision, use_cp, use_qk_l2norm_in_kernel, bool(output_final_state))
    numbers = (every, max_seqlen, scale, forget_below, _cp_chunk_len, num_sequences, world_size)
    others = (seq_lens, None if plan is None else plan.digest, requires_grad(output))
    kind = kind_of((q, k, v, g, beta, *buffers), (*words, *numbers, *others), validate)
    validation.gate_values(g, gate_space)
    validation.slot_values(state_indices, initial_state if initial_state is not None else output_state)

    if seq_lens is None:
        validation.checkpoint_buffers(state_checkpoints, checkpoint_cu_starts, num_sequences, None, None, q, v)
        layout = _layout_on_device(q, cu_seqlens, use_cp, _cp_chunk_len, every, state_checkpoints, checkpoint_cu_starts)
    else:
        if plan is None:
            plan = _plan_of_call(seq_lens, world_size, use_cp, _cp_chunk_len, every, q, k, v)
        validation.plan_heads(plan, q, k, v)
        validation.token_count(q, plan.num_tokens(rank))
        if state_checkpoints is not None:
            num_rows, starts = len(plan.checkpoint_rows(rank)), plan.checkpoint_cu_starts
            validation.checkpoint_buffers(
                state_checkpoints, checkpoint_cu_starts, num_sequences, num_rows, starts, q, v
            )
        if world_size > 1:
            assert group is not None
            collectives.compare_digest_once(plan, group, backend=kind.backend.name)
        layout = layout_of_plan(plan, rank, q.device, kind.state_shape[1])

    if output_final_state and output_state is None:
        output_state = new_states(num_sequences, kind.state_shape, q.device, world_size)
    call = bind(
        kind,
        layout,
        TokenInputs(q, k, v, g, beta, kind.scale, gate_space, use_qk_l2norm_in_kernel, precision),
        StateIO(initial_state, output_state, state_indices),
        output,
        state_checkpoints if layout.num_checkpoints else None,
        plan,
        rank,
        group if world_size > 1 else None,
    )
    result = stages.run(call)
    if not output_final_state:
        return result.output
    assert result.final_state is not None
    return result.output, result.final_state


def _plan_of_call(
    seq_lens: tuple[int, ...],
    world_size: int,
    use_cp: str | bool,
    cp_chunk_len: int | None,
    checkpoint_every_n_tokens: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> PrefillPlan:
    if use_cp is False:
        cp_chunk_len = unsplit(max(seq_lens))

    # on several ranks the caller cut the tokens by the plan that these arguments give
    costs: dict[str, Any] = {"profile": default_profile(q.device.type)} if world_size == 1 else {}

    def planned(length: int | None) -> PrefillPlan:
        return plan_prefill(
            seq_lens,
            world_size=world_size,
            num_q_heads=q.shape[1],
            num_k_heads=k.shape[1],
            num_v_heads=v.shape[1],
            head_dim=q.shape[2],
            cp_chunk_len=length,
            checkpoint_every_n_tokens=checkpoint_every_n_tokens,
            **costs,
        )

    plan = planned(cp_chunk_len)
    if use_cp is True and world_size == 1 and cp_chunk_len is None and plan.cp_chunk_len >= max(seq_lens):
        plan = planned(balanced(max(seq_lens)))  # asked to split what "auto" would leave whole
    return plan


def _layout_on_device(
    q: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    use_cp: str | bool,
    cp_chunk_len: int | None,
    checkpoint_every_n_tokens: int,
    state_checkpoints: torch.Tensor | None,
    checkpoint_cu_starts: torch.Tensor | None,
) -> Layout:
    """Lengths that only the device knows: "auto" cannot predict times, so it leaves sequences whole."""
    assert cu_seqlens is not None
    tokens = q.shape[0]
    if use_cp is False or (use_cp == "auto" and cp_chunk_len is None):
        cp_chunk_len = unsplit(tokens)
    return layout_of_cu_seqlens(
        cu_seqlens,
        tokens,
        cp_chunk_len or balanced(tokens),
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        checkpoint_cu_starts=checkpoint_cu_starts,
        num_checkpoints=0 if state_checkpoints is None else state_checkpoints.shape[0],
    )
