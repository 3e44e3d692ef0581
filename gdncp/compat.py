"""flash-linear-attention's call, which transformers, vLLM and SGLang make: [B, T, H, D], natural-log gates."""

from __future__ import annotations

from typing import Any

import torch

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
    transpose_state_layout: bool = False,
    head_first: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """flash-linear-attention's `chunk_gated_delta_rule` (0.5, 0.6), forward only.

    Args:
        q, k, v: [B, T, H•, D].  With `cu_seqlens`, B is 1 and the sequences are packed; without, B sequences of T.
        g: [B, T, H] natural logs of the forget gates; any float dtype.  None: no forgetting.
        beta: [B, T, H], any float dtype.  None: ones.
        initial_state: [N, H, K, V], or [N, H, V, K] with `transpose_state_layout`; final states come back alike, fp32.
        cu_seqlens: [N+1] int32/int64.
        transpose_state_layout: whether all states of the call are [.., V, K]; else they are [.., K, V].
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

    result = _packed(
        packed("q", q),  # type: ignore[arg-type]  # q is not None, so neither is this
        packed("k", k),  # type: ignore[arg-type]  # nor this
        packed("v", v),  # type: ignore[arg-type]  # nor this
        packed("g", g, gate=True),
        packed("beta", beta, gate=True),
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
