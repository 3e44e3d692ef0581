"""States from a caller's rows, of any strides, to fp32 rows of ours, and back: one launch each way."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from gdncp_kernels.hopper.launch import Launch, Launcher, Launches, Number, Pointer

BLOCK = 4096  # elements a program moves


@triton.jit(do_not_specialize=["num_rows", "H", "V", "K", "stride_row", "stride_head", "stride_v", "stride_k"])
def move_kernel(
    theirs,
    rows,
    ours,
    our_rows,
    num_rows,
    H,
    V,
    K,
    stride_row,
    stride_head,
    stride_v,
    stride_k,
    LOAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (state, head, BLOCK elements).  State i lies in row rows[i] (None: i) of theirs, in our_rows[i]
    (None: i) of ours [.., H, V, K].  A row outside 0 ... num_rows − 1 is loaded as zeros and not stored."""
    num_blocks = tl.cdiv(V * K, BLOCK)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % H
    i = tl.program_id(0) // (num_blocks * H)
    row = i.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + i).to(tl.int64)
    our_row = i.to(tl.int64)
    if our_rows is not None:
        our_row = tl.load(our_rows + i)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < V * K
    there = at < tl.where((row >= 0) & (row < num_rows), V * K, 0)
    v, k = (at // K).to(tl.int64), (at % K).to(tl.int64)
    their = theirs + row * stride_row + head.to(tl.int64) * stride_head + v * stride_v + k * stride_k
    our = ours + (our_row * H + head) * V * K + at
    if LOAD:
        tl.store(our, tl.load(their, mask=there, other=0.0).to(tl.float32), mask=inside)
    else:
        tl.store(their, tl.load(our, mask=inside).to(theirs.dtype.element_ty), mask=there)


_launcher = Launcher(move_kernel, num_warps=4)


def load_states(source: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor, out_rows: torch.Tensor) -> None:
    """out[out_rows[i]] = source[rows[i]], see `gdncp.states.load_states`."""
    _move(source, rows, out, out_rows, out_rows.shape[0])


def store_states(states: torch.Tensor, destination: torch.Tensor, rows: torch.Tensor | None) -> None:
    """destination[rows[i]] = states[i], see `gdncp.states.store_states`."""
    _move(destination, rows, states.contiguous(), None, states.shape[0])


def _move(
    theirs: torch.Tensor, rows: torch.Tensor | None, ours: torch.Tensor, our_rows: torch.Tensor | None, count: int
) -> None:
    if not count or not theirs.numel():
        if our_rows is not None and count:  # of no rows: zeros
            ours.index_fill_(0, our_rows, 0.0)
        return
    load = our_rows is not None
    if rows is not None:  # the caller's, of any stride
        rows = rows.contiguous()
    if not _launcher.jitted:
        numbers = (*theirs.shape, *theirs.stride(), load, BLOCK)
        _launcher(_num_programs(count, theirs.shape[1:]), theirs, rows, ours, our_rows, *numbers)
        return
    launches = _prepared(
        count,
        theirs.shape[1:],
        theirs.stride(),
        theirs.dtype,
        None if rows is None else rows.dtype,
        load,
        theirs.device,
    )
    launches(
        theirs.data_ptr(),
        None if rows is None else rows.data_ptr(),
        ours.data_ptr(),
        None if our_rows is None else our_rows.data_ptr(),
        theirs.shape[0],
    )


def _num_programs(count: int, shape: torch.Size) -> int:
    num_heads, v_dim, k_dim = shape
    return int(count * num_heads * triton.cdiv(v_dim * k_dim, BLOCK))


@lru_cache(maxsize=256)
def _prepared(
    count: int,
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    rows_dtype: torch.dtype | None,
    load: bool,
    device: torch.device,  # which is the current one
) -> Launches:
    launch = prepare(
        count,
        shape,
        strides,
        Pointer("theirs", dtype),
        None if rows_dtype is None else Pointer("rows", rows_dtype),
        Pointer("ours", torch.float32),
        Pointer("our_rows", torch.int64) if load else None,
        Number("num_rows", 1),
    )
    return Launches(("theirs", "rows", "ours", "our_rows", "num_rows"), launch)


def prepare(
    count: int,
    shape: torch.Size,
    strides: tuple[int, ...],
    theirs: Pointer,
    rows: Pointer | torch.Tensor | None,
    ours: Pointer,
    our_rows: Pointer | torch.Tensor | None,
    num_rows: Number | int,
) -> Launch:
    """The launch that moves `count` states [H, V, K], from theirs where `our_rows` are given, else to theirs."""
    names = ("H", "V", "K", "stride_row", "stride_head", "stride_v", "stride_k")
    arguments = {
        "theirs": theirs,
        "rows": rows,
        "ours": ours,
        "our_rows": our_rows,
        "num_rows": num_rows,
        **dict(zip(names, (*shape, *strides), strict=True)),
        "LOAD": our_rows is not None,
        "BLOCK": BLOCK,
    }
    return _launcher.prepare(_num_programs(count, shape), arguments)
