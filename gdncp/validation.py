"""Every check of what a caller passes, in the order in which they are reported.  Nothing here communicates or writes.

Each raises ValueError naming the argument, what was given and what is allowed.  Values are looked at only where the
host can see them: on CPU tensors, and on device tensors where the caller allowed a wait (`read_device`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from gdncp.plan import PrefillPlan
from gdncp.plan.checks import head_counts, integer
from gdncp.states import STATE_DTYPES
from gdncp.words import is_int as is_int
from gdncp.words import numbers as numbers
from gdncp.words import one_of as one_of
from gdncp.words import warmup_arguments as warmup_arguments
from gdncp.words import words as words
from gdncp.work import CHUNK

INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d) for d in dtypes)


def _tensor(name: str, value: Any, *, dtypes: Sequence[torch.dtype], dims: int, device: torch.device | None) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name} must have dtype {_names(dtypes)}, got {value.dtype}")
    if value.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device} like q, got {value.device}")


def _seen(x: torch.Tensor, read_device: bool) -> bool:
    """Whether the host may look at values."""
    return x.device.type == "cpu" or (read_device and x.device.type == "cuda")


def _shape(name: str, value: torch.Tensor, allowed: tuple[int, ...], meaning: str) -> None:
    if tuple(value.shape) != allowed:
        raise ValueError(f"{name} must have shape {allowed} ({meaning}), got {tuple(value.shape)}")


def _contiguous(name: str, value: torch.Tensor) -> None:
    if not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {value.stride()} for shape {tuple(value.shape)}")


def checkpoint_arguments(every: Any, state_checkpoints: Any, cu_starts: Any) -> None:
    """checkpoint_every_n_tokens and its two buffers, apart from their sizes."""
    if not is_int(every):
        raise ValueError(f"checkpoint_every_n_tokens must be an int, got {every!r}")
    if every < 0:
        raise ValueError(f"checkpoint_every_n_tokens must be non-negative, got {every}")
    if every % CHUNK:
        raise ValueError(f"checkpoint_every_n_tokens must be a multiple of the chunk size ({CHUNK}), got {every}")
    if (state_checkpoints is None) != (cu_starts is None):
        given = "state_checkpoints" if cu_starts is None else "checkpoint_cu_starts"
        raise ValueError(
            f"state_checkpoints and checkpoint_cu_starts must both be provided or both be None, got {given} alone"
        )
    if every and state_checkpoints is None:
        raise ValueError(
            "state_checkpoints and checkpoint_cu_starts must both be provided "
            f"where checkpoint_every_n_tokens is {every}"
        )
    if not every and state_checkpoints is not None:
        raise ValueError("state_checkpoints and checkpoint_cu_starts must be None where checkpoint_every_n_tokens is 0")
    if every:
        _tensor("state_checkpoints", state_checkpoints, dtypes=STATE_DTYPES, dims=4, device=None)
        _tensor("checkpoint_cu_starts", cu_starts, dtypes=INDEX_DTYPES, dims=1, device=None)


@lru_cache(maxsize=256)  # callers pass lengths anew each call
def _ints(offsets: tuple[Any, ...], types: tuple[type, ...]) -> tuple[int, ...]:
    """types: of the offsets; True is not 1."""
    return tuple(integer("cu_seqlens_host", x, 0, "non-negative ints") for x in offsets)


@lru_cache(maxsize=256)
def offsets_on_host(name: str, offsets: tuple[int, ...], num_tokens: int | None) -> tuple[int, ...]:
    """Sequence lengths from cumulative offsets: 0 ... num_tokens, non-decreasing."""
    if len(offsets) < 2:
        raise ValueError(f"{name} must hold at least 2 offsets (number of sequences + 1), got {len(offsets)}")
    if offsets[0] != 0:
        raise ValueError(f"{name} must start at 0, got {offsets[0]}")
    lengths = tuple(stop - start for start, stop in pairwise(offsets))
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"{name} must be non-decreasing, got {offsets[i]} then {offsets[i + 1]} at index {i + 1}")
    if num_tokens is not None and offsets[-1] != num_tokens:
        raise ValueError(f"{name} must end at the number of tokens ({num_tokens}), got {offsets[-1]}")
    return lengths


def cu_seqlens_arguments(
    cu_seqlens: Any, cu_seqlens_host: Any, num_tokens: int | None, device: torch.device | None
) -> tuple[int, ...] | None:
    """Sequence lengths where the host can know them; None where only the device does.

    `num_tokens`: what the offsets must end at (None: not known here, the tokens are spread over ranks).
    """
    if cu_seqlens is not None:
        _tensor("cu_seqlens", cu_seqlens, dtypes=INDEX_DTYPES, dims=1, device=device)
        if cu_seqlens.numel() < 2:
            raise ValueError(
                f"cu_seqlens must hold at least 2 offsets (number of sequences + 1), got {cu_seqlens.numel()}"
            )
    if cu_seqlens_host is not None:
        host = cu_seqlens_host
        if isinstance(host, torch.Tensor):
            _tensor("cu_seqlens_host", host, dtypes=INDEX_DTYPES, dims=1, device=torch.device("cpu"))
            host = host.tolist()
        try:
            host = tuple(host)
            offsets = _ints(host, tuple(map(type, host)))
        except TypeError:
            raise ValueError(f"cu_seqlens_host must be ints or a CPU tensor, got {host!r}") from None
        if cu_seqlens is not None and len(host) != cu_seqlens.numel():
            raise ValueError(f"cu_seqlens_host must have {cu_seqlens.numel()} offsets like cu_seqlens, got {len(host)}")
        lengths = offsets_on_host("cu_seqlens_host", offsets, num_tokens)
        if cu_seqlens is not None and cu_seqlens.device.type == "cpu" and cu_seqlens.tolist() != list(offsets):
            raise ValueError(f"cu_seqlens_host must equal cu_seqlens ({cu_seqlens.tolist()}), got {list(host)}")
        return lengths
    if cu_seqlens is None:
        return None if num_tokens is None else (num_tokens,)
    if cu_seqlens.device.type == "cpu":
        return offsets_on_host("cu_seqlens", tuple(cu_seqlens.tolist()), num_tokens)
    return None


def max_seqlen_argument(max_seqlen: Any, num_tokens: int, num_sequences: int) -> None:
    if max_seqlen is None:
        return
    if not is_int(max_seqlen):
        raise ValueError(f"max_seqlen must be an int, got {max_seqlen!r}")
    least = -(-num_tokens // num_sequences)
    if not least <= max_seqlen <= num_tokens:
        raise ValueError(
            f"max_seqlen must lie between ceil(tokens / sequences) = {least} and the number of tokens = {num_tokens}, "
            f"got {max_seqlen}"
        )


def state_indices_argument(
    state_indices: Any,
    num_sequences: int,
    device: torch.device | None,
) -> None:
    """Slots [N]: dtype and shape."""
    if state_indices is None:
        return
    _tensor("state_indices", state_indices, dtypes=INDEX_DTYPES, dims=1, device=device)
    _shape("state_indices", state_indices, (num_sequences,), "one slot per sequence")


def slot_values(state_indices: torch.Tensor | None, pool: Any, *, read_device: bool = False) -> None:
    """Slots in range and unique, where the host sees them."""
    if state_indices is None or not _seen(state_indices, read_device) or (num_slots := _num_slots(pool)) is None:
        return
    slots = state_indices.tolist()
    for i, slot in enumerate(slots):
        if not 0 <= slot < num_slots:
            raise ValueError(f"state_indices must lie in [0, {num_slots}), the pool's slots, got {slot} at index {i}")
    if len(set(slots)) != len(slots):
        twice = next(s for i, s in enumerate(slots) if s in slots[:i])
        raise ValueError(f"state_indices must be unique, got slot {twice} more than once")


def token_tensors(q: Any, k: Any, v: Any, g: Any, beta: Any, num_tokens: int | None) -> None:
    """q, k, v [T, heads, dim], g and beta [T, state heads]; `num_tokens` is what T must be where the plan says so."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _tensor(name, x, dtypes=INPUT_DTYPES, dims=3, device=q.device if isinstance(q, torch.Tensor) else None)
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have dtype {q.dtype} like q, got {x.dtype}")
    tokens = q.shape[0] if num_tokens is None else num_tokens
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[0] != tokens:
            source = "like q" if num_tokens is None else "that the plan gives this rank"
            raise ValueError(f"{name} must have {tokens} tokens {source}, got shape {tuple(x.shape)}")
        if x.shape[1] == 0 or x.shape[2] == 0:
            raise ValueError(f"{name} must have at least one head and one dim, got shape {tuple(x.shape)}")
        _contiguous(name, x)
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have head dim {q.shape[2]} like q, got {k.shape[2]}")
    head_counts(q.shape[1], k.shape[1], v.shape[1])
    heads = max(q.shape[1], v.shape[1])
    for name, x in (("g", g), ("beta", beta)):
        if x is None:
            continue
        _tensor(name, x, dtypes=(torch.float32,), dims=2, device=q.device)
        _shape(name, x, (tokens, heads), "tokens, state heads")
        _contiguous(name, x)


def gate_values(g: torch.Tensor | None, gate_space: str, *, read_device: bool = False) -> None:
    """Gates of the space that they are said to be of, where the host sees them; NaN is of both."""
    if g is None or not _seen(g, read_device) or not g.numel():
        return
    least, most = (float(x) for x in g.detach().nan_to_num(0.0).aminmax())
    if gate_space == "linear" and (least < 0 or most > 1):
        extreme = f"a minimum of {least}" if least < 0 else f"a maximum of {most}"
        raise ValueError(
            f"g must be linear (alpha in [0, 1]) with gate_space='linear', got {extreme}; "
            "natural-log gates need gate_space='log'"
        )
    if gate_space == "log" and most > 0:
        raise ValueError(
            f"g must be natural logs (at most 0) with gate_space='log', got a maximum of {most}; "
            "linear gates need gate_space='linear'"
        )


def no_nan(name: str, gates: torch.Tensor | None) -> None:
    """[T, H] without NaN.  Reads the device: for a call that allowed it."""
    if gates is None or not bool((wrong := gates.detach().isnan()).any()):
        return
    token, head = wrong.nonzero()[0].tolist()
    count = int(wrong.sum())
    raise ValueError(f"{name} must hold no NaN where check=True looks, got {count}, first at [{token}, {head}]")


def state_tensor(
    name: str, states: Any, num_rows: int | None, heads: int, v_dim: int, k_dim: int, device: torch.device
) -> None:
    """[num_rows, H, V, K] in a state dtype; any positive strides that do not overlap.  num_rows None: a pool."""
    if states is None:
        return
    _tensor(name, states, dtypes=STATE_DTYPES, dims=4, device=device)
    if num_rows is not None:
        _shape(name, states, (num_rows, heads, v_dim, k_dim), "rows, state heads, V, K")
    elif tuple(states.shape[1:]) != (heads, v_dim, k_dim):
        allowed = f"(slots, {heads}, {v_dim}, {k_dim})"
        raise ValueError(f"{name} must have shape {allowed} (slots, state heads, V, K), got {tuple(states.shape)}")
    extent = 1
    for stride, size in sorted((st, sz) for st, sz in zip(states.stride(), states.shape, strict=True) if sz > 1):
        if stride < extent:
            raise ValueError(
                f"{name} must have positive strides that do not overlap, "
                f"got {states.stride()} for shape {tuple(states.shape)}"
            )
        extent = stride * size


def output_tensor(output: Any, tokens: int, heads: int, q: torch.Tensor, v_dim: int) -> None:
    if output is None:
        return
    _tensor("output", output, dtypes=(q.dtype,), dims=3, device=q.device)
    _shape("output", output, (tokens, heads, v_dim), "tokens, state heads, V")
    _contiguous("output", output)
    if output.requires_grad:
        raise ValueError("output must not require grad: the call is forward only, got one that does")


def _num_slots(pool: Any) -> int | None:
    return pool.shape[0] if isinstance(pool, torch.Tensor) and pool.dim() == 4 else None


def state_shape(q: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int]:
    """H, V, K."""
    return max(q.shape[1], v.shape[1]), v.shape[2], q.shape[2]


def buffers(
    q: torch.Tensor,
    v: torch.Tensor,
    num_sequences: int,
    pooled: bool,
    source: Any,
    output: Any,
    output_state: Any,
    source_name: str = "initial_state",
) -> None:
    """initial_state (or the pool, by the name that the caller's argument has), output and output_state."""
    heads, v_dim, k_dim = state_shape(q, v)
    rows = None if pooled else num_sequences
    state_tensor(source_name, source, rows, heads, v_dim, k_dim, q.device)
    state_tensor("output_state", output_state, rows, heads, v_dim, k_dim, q.device)
    if pooled and source is not None and output_state is not None and source.shape[0] != output_state.shape[0]:
        raise ValueError(f"output_state must have {source.shape[0]} slots like the pool, got {output_state.shape[0]}")
    output_tensor(output, q.shape[0], heads, q, v_dim)


def checkpoint_rows(state_checkpoints: Any, num_rows: int | None, q: torch.Tensor, v: torch.Tensor) -> None:
    """state_checkpoints [num_rows, H, V, K]; num_rows None: not known on the host."""
    if state_checkpoints is None:
        return
    heads, v_dim, k_dim = state_shape(q, v)
    rows = state_checkpoints.shape[0] if num_rows is None and isinstance(state_checkpoints, torch.Tensor) else num_rows
    state_tensor("state_checkpoints", state_checkpoints, rows, heads, v_dim, k_dim, q.device)


def checkpoint_buffers(
    state_checkpoints: Any,
    cu_starts: Any,
    num_sequences: int,
    num_rows: int | None,
    expected_starts: Sequence[int] | None,
    q: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Sizes of the checkpoint buffers, and the values of checkpoint_cu_starts where the host sees them."""
    if state_checkpoints is None:
        return
    checkpoint_rows(state_checkpoints, num_rows, q, v)
    _shape("checkpoint_cu_starts", cu_starts, (num_sequences + 1,), "one more than sequences")
    if cu_starts.device != q.device:
        raise ValueError(f"checkpoint_cu_starts must be on {q.device} like q, got {cu_starts.device}")
    if expected_starts is not None and cu_starts.device.type == "cpu" and cu_starts.tolist() != list(expected_starts):
        raise ValueError(
            f"checkpoint_cu_starts must be {list(expected_starts)} (cumulative len // interval), "
            f"got {cu_starts.tolist()}"
        )


def plan_argument(plan: Any) -> PrefillPlan:
    if not isinstance(plan, PrefillPlan):
        raise ValueError(f"plan must be a PrefillPlan from plan_prefill, got {type(plan).__name__}")
    return plan


def plan_lengths(
    plan: Any,
    seq_lens: tuple[int, ...] | None,
    num_sequences: int | None,
    world_size: int,
    checkpoint_every_n_tokens: int,
) -> tuple[int, ...]:
    """The plan's sequence lengths, which must be those of the call, like its world size and checkpoint interval.

    seq_lens, num_sequences: None where the host does not know the call's.
    """
    plan = plan_argument(plan)
    if seq_lens is not None and plan.seq_lens != seq_lens:
        raise ValueError(f"plan must have the call's sequence lengths {seq_lens}, got {plan.seq_lens}")
    if num_sequences is not None and plan.num_sequences != num_sequences:
        raise ValueError(f"plan must have the {num_sequences} sequences of cu_seqlens, got {plan.num_sequences}")
    if plan.world_size != world_size:
        raise ValueError(f"plan must have the group's {world_size} ranks, got {plan.world_size}")
    if plan.checkpoint_every_n_tokens != checkpoint_every_n_tokens:
        raise ValueError(
            f"plan must have checkpoint_every_n_tokens = {checkpoint_every_n_tokens} like the call, "
            f"got {plan.checkpoint_every_n_tokens}"
        )
    if plan.checkpoint_positions is not None:
        raise ValueError("plan must have no checkpoint_positions: only gdncp.prefill writes checkpoints after them")
    return plan.seq_lens


def plan_grid(plan: PrefillPlan, use_cp: Any, cp_chunk_len: int | None) -> None:
    """What else was said of CP chunks must be what the plan does."""
    if use_cp is False and plan.num_cp_chunks > plan.num_sequences:
        raise ValueError(f"use_cp must be True or 'auto' with a plan that splits sequences, got False and {plan!r}")
    if cp_chunk_len is not None and cp_chunk_len != plan.cp_chunk_len:
        raise ValueError(f"_cp_chunk_len must be None or the plan's {plan.cp_chunk_len}, got {cp_chunk_len}")
    if cp_chunk_len is not None and cp_chunk_len != plan.first_cp_chunk_len:
        raise ValueError(
            f"_cp_chunk_len must be None with a plan whose first CP chunks have {plan.first_cp_chunk_len} tokens, "
            f"got {cp_chunk_len}"
        )


def plan_heads(plan: PrefillPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x, heads in (("q", q, plan.num_q_heads), ("k", k, plan.num_k_heads), ("v", v, plan.num_v_heads)):
        if x.shape[1] != heads:
            raise ValueError(f"{name} must have the plan's {heads} heads, got {x.shape[1]}")
    if q.shape[2] != plan.head_dim:
        raise ValueError(f"q must have the plan's head dim {plan.head_dim}, got {q.shape[2]}")


def token_count(q: torch.Tensor, num_tokens: int) -> None:
    if q.shape[0] != num_tokens:
        raise ValueError(f"q must have the {num_tokens} tokens that the plan gives this rank, got {q.shape[0]}")


def cp_chunk_len_argument(cp_chunk_len: Any) -> None:
    if cp_chunk_len is None:
        return
    if not is_int(cp_chunk_len) or cp_chunk_len <= 0 or cp_chunk_len % CHUNK:
        raise ValueError(f"_cp_chunk_len must be a positive multiple of the chunk size ({CHUNK}), got {cp_chunk_len!r}")
