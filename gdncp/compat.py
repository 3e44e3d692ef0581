"""flash-linear-attention's call, which transformers, vLLM and SGLang make: [B, T, H, D], natural-log gates."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gdncp.flashinfer_api import chunk_gated_delta_rule as _packed


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    state_v_first: bool = False,
    transpose_state_layout: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: None = None,
    head_first: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """flash-linear-attention's `chunk_gated_delta_rule` (0.5, 0.6), forward only; what 0.6 has before `cu_seqlens`
    goes by keyword.

    Args:
        q, k, v: [B, T, H•, D].  With `cu_seqlens`, B is 1 and the sequences are packed; without, B sequences of T.
        g: [B, T, H] natural logs of the forget gates; any float dtype.  None: no forgetting.
        beta: [B, T, H], any float dtype.  None: ones.
        initial_state: [N, H, K, V], or [N, H, V, K] with `state_v_first`; final states come back alike, fp32.
        cu_seqlens: [N+1] int32/int64.
        state_v_first: whether all states of the call are [.., V, K]; else they are [.., K, V].
            `transpose_state_layout` is its name in 0.5.
        use_gate_in_kernel: g is a layer's raw gate; taken is −exp(A_log) · softplus(g + dt_bias), in fp32, A_log and
            dt_bias (None: 0) [H].  Not fused here: a few torch kernels.
        use_beta_sigmoid_in_kernel: beta is a logit; taken is its sigmoid, times 2 with `allow_neg_eigval`.
        cu_seqlens_cpu: `cu_seqlens` on the host, as `cu_seqlens_host` of `gdncp.chunk_gated_delta_rule`.
        chunk_indices: not needed, whatever it holds.
        cp_context: None: that library's context parallelism has another data layout; give `group` and a plan instead.
        head_first: False, which older callers still pass.
        output, output_state, state_checkpoints: memory for results, which that library's call does not take: the first
            [B, T, H, V], contiguous, dtype of q; the others as in `gdncp.chunk_gated_delta_rule`, but in the layout of
            `initial_state`.
        arguments: other keyword arguments of `gdncp.chunk_gated_delta_rule`, passed on.  With `state_indices` states
            are pools, in the same layout.

    Returns:
        (output [B, T, H, V], final_state or None).  What was given to hold them is what is returned.

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    if not isinstance(q, torch.Tensor) or q.dim() != 4:
        raise ValueError(f"q must have shape [B, T, H, D], got {getattr(q, 'shape', type(q).__name__)}")
    batch, tokens = q.shape[:2]
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"q must have batch size 1 where cu_seqlens is given, got {batch}")
    transpose_state_layout = _state_v_first(state_v_first, transpose_state_layout)
    if cp_context is not None:
        raise ValueError(
            "cp_context must be None: give `group`, and `plan` or `cu_seqlens_host`, to run on several ranks"
        )
    if cu_seqlens_cpu is not None:
        if "cu_seqlens_host" in arguments:
            raise ValueError("cu_seqlens_cpu and cu_seqlens_host are the same thing; give one of them")
        arguments["cu_seqlens_host"] = cu_seqlens_cpu
    if head_first:
        raise ValueError("head_first must be False, [B, T, H, D], which flash-linear-attention left too; got True")
    if batch == 0:
        raise ValueError("q must have at least one sequence, got batch size 0")
    if cu_seqlens is None and batch != 1:
        offsets = [i * tokens for i in range(batch + 1)]
        arguments.setdefault("cu_seqlens_host", offsets)

    def packed(name: str, x: torch.Tensor | None, *, gate: bool = False) -> torch.Tensor | None:
        if x is None:
            return None
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != (3 if gate else 4) or x.shape[:2] != (batch, tokens):
            shape = f"[{batch}, {tokens}, heads]" if gate else f"[{batch}, {tokens}, heads, dim]"
            raise ValueError(f"{name} must have shape {shape} like q, got {tuple(x.shape)}")
        if x is output and not x.is_contiguous():
            raise ValueError(f"output must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}")
        x = x.flatten(0, 1).contiguous()
        return x.to(torch.float32) if gate else x

    def as_vk(name: str, states: torch.Tensor | None) -> torch.Tensor | None:
        """The same memory, [.., V, K]."""
        if transpose_state_layout or not isinstance(states, torch.Tensor) or states.dim() != 4:
            return states  # as it should be, or what is refused further on
        dims = (q.shape[3], v.shape[3])
        if states.shape[2:] != dims:
            raise ValueError(f"{name} must have shape [.., {dims[0]}, {dims[1]}] (K, V), got {tuple(states.shape)}")
        return states.mT

    gate, update = packed("g", g, gate=True), packed("beta", beta, gate=True)
    if use_gate_in_kernel:
        gate = _decay(gate, A_log, dt_bias)
    if use_beta_sigmoid_in_kernel:
        update = _sigmoid(update, 2.0 if allow_neg_eigval else 1.0)
    elif allow_neg_eigval:
        raise ValueError("allow_neg_eigval must be False without use_beta_sigmoid_in_kernel: scale beta yourself")
    result = _packed(
        packed("q", q),  # type: ignore[arg-type]  # q is not None, so neither is this
        packed("k", k),  # type: ignore[arg-type]  # nor this
        packed("v", v),  # type: ignore[arg-type]  # nor this
        gate,
        update,
        scale,
        as_vk("initial_state", initial_state),
        output_final_state,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        packed("output", output),
        as_vk("output_state", output_state),
        as_vk("state_checkpoints", state_checkpoints),
        gate_space="log",
        **arguments,
    )
    written, final_state = result if isinstance(result, tuple) else (result, None)
    if output is None:
        output = written.unflatten(0, (batch, tokens))
    if final_state is not None and output_state is not None:
        return output, output_state
    return output, final_state if final_state is None or transpose_state_layout else final_state.mT


def _state_v_first(given: bool, old_name: bool) -> bool:
    if given and old_name:
        raise ValueError("transpose_state_layout is the old name of state_v_first; give one of them")
    return given or old_name


def _decay(g: torch.Tensor | None, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None) -> torch.Tensor:
    """Natural log gates [T, H] of a layer's raw ones (Gated DeltaNet's, after Mamba 2)."""
    if g is None or A_log is None:
        missing = "g" if g is None else "A_log"
        raise ValueError(f"{missing} must be given with use_gate_in_kernel, got None")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None and x.shape != g.shape[1:]:
            raise ValueError(f"{name} must have shape {tuple(g.shape[1:])}, one number a head, got {tuple(x.shape)}")
    return -A_log.float().exp() * functional.softplus(g if dt_bias is None else g + dt_bias.float())


def _sigmoid(beta: torch.Tensor | None, scale: float) -> torch.Tensor:
    if beta is None:
        raise ValueError("beta must be given with use_beta_sigmoid_in_kernel, got None")
    return scale * beta.sigmoid()
