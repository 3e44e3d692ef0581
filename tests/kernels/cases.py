"""Small inputs for the kernel tests, and the stages run one after the other over one work table."""

from __future__ import annotations

import torch

from gdncp.backends.base import AffineMaps, Precision, Sinks, TokenInputs
from gdncp.backends.triton_backend import TritonBackend
from gdncp.plan import PrefillPlan
from gdncp.reference import gated_delta_rule_reference
from gdncp.work import WorkTable, from_cu_seqlens, from_rank_plan
from tests.conftest import DEVICE

BACKEND = TritonBackend()
TOLERANCE = 2e-5  # the contract for float32 inputs
NARROW_TOLERANCE = 5e-3  # the contract for bf16 and fp16 inputs with beta in [0, 1]


def make_inputs(
    num_tokens: int,
    *,
    heads: tuple[int, int, int] = (2, 2, 2),
    k_dim: int = 16,
    v_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    gates: str = "mixed",
    gate_space: str = "linear",
    beta_max: float = 1.0,
    l2norm: bool = True,
    precision: Precision = "fast",
    seed: int = 0,
) -> TokenInputs:
    """Random tokens.  Gates: "none", "ones" (never forget), "mixed" (a half-life a head), "resets", "strong"."""
    generator = torch.Generator().manual_seed(seed)
    num_heads = max(heads[0], heads[2])

    def normal(num: int, dim: int) -> torch.Tensor:
        x = torch.randn(num_tokens, num, dim, generator=generator)
        return (x if l2norm else torch.nn.functional.normalize(x, dim=-1)).to(DEVICE, dtype)

    def uniform() -> torch.Tensor:
        return torch.rand(num_tokens, num_heads, generator=generator)

    q, k = normal(heads[0], k_dim), normal(heads[1], k_dim)
    v = torch.randn(num_tokens, heads[2], v_dim, generator=generator).to(DEVICE, dtype)
    log_gate = -uniform() * torch.logspace(-4, 0, num_heads)
    if gates == "ones":
        log_gate = torch.zeros_like(log_gate)
    elif gates == "strong":
        log_gate = -5 * uniform()
    elif gates == "resets":
        log_gate[uniform() < 0.03] = float("-inf")
        log_gate[uniform() < 0.03] = -316.0
    gate = None if gates == "none" else (log_gate if gate_space == "log" else log_gate.exp()).to(DEVICE)
    beta = None if gates == "none" else (beta_max * uniform()).to(DEVICE)
    return TokenInputs(q, k, v, gate, beta, k_dim**-0.5, gate_space, l2norm, precision)


def state_shape(inputs: TokenInputs) -> tuple[int, int, int]:
    return inputs.num_state_heads, inputs.v.shape[2], inputs.k.shape[2]


def random_states(rows: int, inputs: TokenInputs, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *state_shape(inputs), generator=generator).to(DEVICE)


def reference(inputs: TokenInputs, **arguments):
    """The oracle on the inputs as they are."""
    return gated_delta_rule_reference(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.gate,
        inputs.beta,
        scale=inputs.scale,
        gate_space=inputs.gate_space,
        use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
        **arguments,
    )


def rows_of(inputs: TokenInputs, start: int, stop: int) -> TokenInputs:
    """The same call on a slice of its tokens."""

    def cut(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[start:stop]

    return TokenInputs(
        inputs.q[start:stop],
        inputs.k[start:stop],
        inputs.v[start:stop],
        cut(inputs.gate),
        cut(inputs.beta),
        inputs.scale,
        inputs.gate_space,
        inputs.use_qk_l2norm,
        inputs.precision,
    )


def plan_table(plan: PrefillPlan, rank: int = 0) -> WorkTable:
    return from_rank_plan(plan.rank_plan(rank), 0, torch.device(DEVICE))


def device_table(seq_lens: list[int], cp_chunk_len: int, every: int = 0, spare_rows: int = 0) -> WorkTable:
    """The table of the same batch, built from lengths on the device; checkpoint rows that no sequence earns last."""
    lens = torch.tensor(seq_lens, device=DEVICE)
    rows = lens // every if every else torch.zeros_like(lens)

    def starts(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.new_zeros(1), x.cumsum(0)])

    return from_cu_seqlens(
        starts(lens),
        sum(seq_lens),
        cp_chunk_len,
        checkpoint_every_n_tokens=every,
        checkpoint_cu_starts=starts(rows),
        num_checkpoints=int(rows.sum()) + spare_rows,
    )


def run_maps(
    inputs: TokenInputs, table: WorkTable, entry_states: torch.Tensor, forget_below: float = 0.0
) -> tuple[object, AffineMaps]:
    """Stages 1 and 2; every buffer starts as NaN."""
    tiles = BACKEND.precompute_t(inputs, table)
    heads, v_dim, k_dim = state_shape(inputs)
    maps = AffineMaps.empty(table.num_maps + (table.host is None), heads, k_dim, v_dim, entry_states.device)
    for x in (maps.transition, maps.local_state, maps.gain, maps.dropped):
        x.fill_(float("nan"))
    BACKEND.precompute_mn(inputs, tiles, table, entry_states, maps, forget_below)
    return tiles, maps


def run_chain(
    inputs: TokenInputs,
    seq_lens: list[int],
    table: WorkTable,
    initial_state: torch.Tensor | None = None,
    forget_below: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AffineMaps]:
    """All stages on one rank, one lane: output, final states, checkpoints, maps.  The fold is a plain loop."""
    item_rows, num_items = table.item_row.tolist(), table.num_items
    shape = state_shape(inputs)
    entry_states = torch.full((num_items, *shape), float("nan"), device=DEVICE)
    length = max(table.num_tokens.tolist(), default=0)
    items_of = [max(1, -(-n // length)) for n in seq_lens]
    firsts = [sum(items_of[:i]) for i in range(len(seq_lens))]  # rows lie in sequence order
    entry_states[firsts] = 0.0 if initial_state is None else initial_state
    tiles, maps = run_maps(inputs, table, entry_states, forget_below)
    map_of = {item_rows[i]: r for i, r in zip(table.map_item.tolist(), table.map_row.tolist(), strict=True)}
    for row in range(num_items - 1):
        if row + 1 not in firsts and row in map_of and map_of[row] < table.num_maps:
            m = map_of[row]
            entry_states[row + 1] = BACKEND.fold(entry_states[row], maps.transition[m], maps.local_state[m])
    sinks = Sinks(
        output=torch.full((*inputs.q.shape[:1], shape[0], shape[1]), float("nan"), device=DEVICE, dtype=inputs.q.dtype),
        final_states=torch.full((len(seq_lens) + 1, *shape), float("nan"), device=DEVICE),
        checkpoints=torch.full((table.num_checkpoints + 1, *shape), float("nan"), device=DEVICE),
    )
    BACKEND.cp_prefill(inputs, tiles, table, entry_states, sinks)
    assert sinks.checkpoints is not None
    return sinks.output, sinks.final_states[:-1], sinks.checkpoints[:-1], maps
