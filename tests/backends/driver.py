"""A small stand-in for the program around a backend: plan, stages 1 and 2, one left fold, stage 4, in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gdncp.backends.base import AffineMaps, Backend, Sinks, TokenInputs
from gdncp.backends.torch_backend import TorchBackend
from gdncp.layout import fold_on_device, layout_of_cu_seqlens, layout_of_plan
from gdncp.plan import PrefillPlan, plan_prefill
from gdncp.reference import ReferenceResult, gated_delta_rule_reference

SEED = 20
GATES = ("none", "weak", "mixed", "resets", "strong")


@dataclass
class Result:
    output: torch.Tensor  # [T, H, V]; rows that nothing covers hold `fill`
    final_state: torch.Tensor  # [N, H, V, K]
    checkpoints: torch.Tensor  # global rows
    maps: list[AffineMaps]  # per rank
    entry_states: list[torch.Tensor]
    plan: PrefillPlan | None


def make_gates(kind: str, num_tokens: int, num_heads: int, gen: torch.Generator) -> torch.Tensor | None:
    """Natural logs of alpha [T, H] fp32."""
    noise = torch.rand(num_tokens, num_heads, generator=gen)
    if kind == "none":
        return None
    if kind == "weak":  # half-lives of thousands of tokens
        return -2e-4 * noise
    if kind == "mixed":  # half-lives from 3 to 100 000 tokens, a head each
        return -(10.0 ** -torch.linspace(0.6, 5, num_heads)) * noise
    if kind == "strong":
        return -40 * noise
    gates = -0.05 * noise
    gates[noise > 0.97] = -20.0
    gates[noise > 0.98] = -316.0
    gates[noise > 0.99] = -torch.inf
    return gates


def make_inputs(
    num_tokens: int,
    heads: tuple[int, int, int] = (2, 2, 2),
    k_dim: int = 16,
    v_dim: int = 24,
    gates: str = "none",
    beta: tuple[float, float] | None = (0.0, 1.0),
    dtype: torch.dtype = torch.float32,
    gate_space: str = "log",
    value_scale: float = 1.0,
    seed: int = SEED,
) -> TokenInputs:
    gen = torch.Generator().manual_seed(seed)
    num_heads = max(heads[0], heads[2])

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, *shape, generator=gen)

    q, k = (torch.nn.functional.normalize(new(h, k_dim), dim=-1).to(dtype) for h in heads[:2])
    v = (value_scale * new(heads[2], v_dim)).to(dtype)
    gate = make_gates(gates, num_tokens, num_heads, gen)
    if gate is not None and gate_space == "linear":
        gate = gate.exp()
    b = None if beta is None else beta[0] + (beta[1] - beta[0]) * torch.rand(num_tokens, num_heads, generator=gen)
    return TokenInputs(q, k, v, gate, b, k_dim**-0.5, gate_space=gate_space)  # type: ignore[arg-type]


def make_state(num_sequences: int, inputs: TokenInputs, seed: int = SEED) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed + 1)
    return torch.randn(num_sequences, inputs.num_state_heads, inputs.v.shape[2], inputs.q.shape[2], generator=gen)


def oracle(inputs: TokenInputs, seq_lens: list[int], initial: torch.Tensor | None = None, **kwargs) -> ReferenceResult:
    return gated_delta_rule_reference(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.gate,
        inputs.beta,
        scale=inputs.scale,
        initial_state=initial,
        seq_lens=seq_lens,
        gate_space=inputs.gate_space,
        use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
        **kwargs,
    )


def take(inputs: TokenInputs, ranges) -> TokenInputs:
    rows = torch.tensor([t for start, stop in ranges for t in range(start, stop)], dtype=torch.int64)
    rows = rows.to(inputs.q.device)
    names = ("q", "k", "v", "gate", "beta")
    return replace(inputs, **{n: None if getattr(inputs, n) is None else getattr(inputs, n)[rows] for n in names})


def run(
    inputs: TokenInputs,
    seq_lens: list[int],
    cp_chunk_len: int = 128,
    initial: torch.Tensor | None = None,
    *,
    forget_below: float = 0.0,
    world_size: int = 1,
    ownership="contiguous",
    lanes: int = 1,
    every: int = 0,
    positions=None,
    backend: Backend | None = None,
) -> Result:
    """All stages from a host plan, on the device of the inputs."""
    backend = backend or TorchBackend()
    device, num_heads = inputs.q.device, inputs.num_state_heads
    k_dim, v_dim = inputs.q.shape[2], inputs.v.shape[2]
    plan = plan_prefill(
        seq_lens,
        world_size=world_size,
        ownership=ownership,
        num_q_heads=inputs.q.shape[1],
        num_k_heads=inputs.k.shape[1],
        num_v_heads=inputs.v.shape[1],
        head_dim=k_dim,
        cp_chunk_len=cp_chunk_len,
        checkpoint_every_n_tokens=every,
        checkpoint_positions=positions,
        lanes_per_rank=lanes,
    )
    if initial is None:
        initial = torch.zeros(len(seq_lens), num_heads, v_dim, k_dim, device=device)
    ranks = []
    for rank in range(world_size):
        share, layout = plan.rank_plan(rank), layout_of_plan(plan, rank, device)
        part = take(inputs, plan.token_ranges(rank))
        entry = torch.full((len(share.items), num_heads, v_dim, k_dim), torch.nan, device=device)
        entry[layout.first_rows] = initial[layout.first_sequences]
        maps = AffineMaps.empty(share.num_maps, num_heads, k_dim, v_dim, device)
        tiles = [backend.precompute_t(part, table) for table in layout.tables]
        for table, tile in zip(layout.tables, tiles, strict=True):
            backend.precompute_mn(part, tile, table, entry, maps, forget_below)
        ranks.append((share, layout, part, entry, maps, tiles))

    where = {item.index: (rank, row) for rank, r in enumerate(ranks) for row, item in enumerate(r[0].items)}
    for chunk in plan.cp_chunks:
        if not chunk.is_first:
            rank, row = where[chunk.index - 1]
            share, _, _, entry, maps, _ = ranks[rank]
            m = share.map_rows[row]
            state = backend.fold(entry[row][:], maps.transition[m], maps.local_state[m])
            to_rank, to_row = where[chunk.index]
            ranks[to_rank][3][to_row] = state

    output = torch.zeros(sum(seq_lens), num_heads, v_dim, dtype=inputs.q.dtype, device=device)
    final = torch.zeros(len(seq_lens), num_heads, v_dim, k_dim, device=device)
    checkpoints = torch.zeros(plan.num_checkpoints, num_heads, v_dim, k_dim, device=device)
    for rank, (_, layout, part, entry, _, tiles) in enumerate(ranks):
        sinks = Sinks(
            torch.full((part.q.shape[0], num_heads, v_dim), torch.nan, dtype=output.dtype, device=device),
            torch.empty(layout.num_final + 1, num_heads, v_dim, k_dim, device=device),
            torch.empty(layout.num_checkpoints + 1, num_heads, v_dim, k_dim, device=device),
        )
        for table, tile in zip(layout.tables, tiles, strict=True):
            backend.cp_prefill(part, tile, table, entry, sinks)
        offset = 0
        for start, stop in plan.token_ranges(rank):
            output[start:stop] = sinks.output[offset : offset + stop - start]
            offset += stop - start
        final[layout.final_sequences] = sinks.final_states[:-1]
        assert sinks.checkpoints is not None
        checkpoints[list(plan.checkpoint_rows(rank))] = sinks.checkpoints[:-1]
    return Result(output, final, checkpoints, [r[4] for r in ranks], [r[3] for r in ranks], plan)


def run_from_device(
    inputs: TokenInputs,
    cu_seqlens: torch.Tensor,
    cp_chunk_len: int = 128,
    initial: torch.Tensor | None = None,
    *,
    forget_below: float = 0.0,
    every: int = 0,
    backend: Backend | None = None,
    fill: float = torch.nan,
) -> Result:
    """All stages from lengths that only the device knows."""
    backend = backend or TorchBackend()
    device, num_heads = inputs.q.device, inputs.num_state_heads
    k_dim, v_dim, num_tokens = inputs.q.shape[2], inputs.v.shape[2], inputs.q.shape[0]
    starts = torch.cat(
        [cu_seqlens.new_zeros(1), (cu_seqlens.diff() // every if every else cu_seqlens[1:] * 0).cumsum(0)]
    )
    rows = num_tokens // every if every else 0
    layout = layout_of_cu_seqlens(
        cu_seqlens,
        num_tokens,
        cp_chunk_len,
        checkpoint_every_n_tokens=every,
        checkpoint_cu_starts=starts,
        num_checkpoints=rows,
    )
    num_sequences = cu_seqlens.numel() - 1
    if initial is None:
        initial = torch.zeros(num_sequences, num_heads, v_dim, k_dim, device=device)
    entry = torch.full((layout.num_items + 1, num_heads, v_dim, k_dim), torch.nan, device=device)
    entry.index_copy_(0, layout.first_rows, initial[layout.first_sequences])
    maps = AffineMaps.empty(layout.num_maps + 1, num_heads, k_dim, v_dim, device)
    sinks = Sinks(
        torch.full((num_tokens, num_heads, v_dim), fill, dtype=inputs.q.dtype, device=device),
        torch.empty(num_sequences + 1, num_heads, v_dim, k_dim, device=device),
        torch.empty(rows + 1, num_heads, v_dim, k_dim, device=device),
    )
    (table,) = layout.tables
    tiles = backend.precompute_t(inputs, table)
    if layout.has_maps:
        backend.precompute_mn(inputs, tiles, table, entry, maps, forget_below)
        fold_on_device(layout, maps, entry, backend.fold)
    backend.cp_prefill(inputs, tiles, table, entry, sinks)
    assert sinks.checkpoints is not None
    return Result(sinks.output, sinks.final_states[:-1], sinks.checkpoints[:-1], [maps], [entry], None)
