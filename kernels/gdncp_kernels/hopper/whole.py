"""All stages of a call in one go: where nothing has to come between them, what they launch is prepared once a kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gdncp.backends.base import maps_layout
from gdncp.scratch import ScratchLayout
from gdncp_kernels.hopper import precompute_t, recurrence_launches, state_fixup, states
from gdncp_kernels.hopper.launch import Launch, Launches, Pointer
from gdncp_kernels.hopper.tiles import tiles_of

if TYPE_CHECKING:
    from gdncp.stages import Call

TMA_ALIGNMENT = 16  # bytes: the copy engine reads and writes from multiples of these only
_CHANGING = (
    *("q", "k", "v", "gate", "beta", "output", "slots", "source", "destination", "checkpoints"),  # the caller's
    *("tiles", "maps", "entry_states", "final_states"),  # scratch, but for final states that are written in place
)


class Whole:
    """The launches of one kind of call over one layout, and how the memory between them lies."""

    def __init__(self, call: Call):
        """For a call that `is_whole`."""
        layout, (table,), inputs, shape = call.layout, call.tables, call.inputs, call.state_shape
        heads, v_dim, k_dim = shape
        maps = maps_layout(layout.num_maps, heads, k_dim, v_dim)
        scratch = {
            "tiles": ((tiles_of(inputs, table).num_bytes,), torch.uint8),
            "maps": ((maps.num_bytes,), torch.uint8),
            "entry_states": ((layout.num_items, *shape), torch.float32),
        }
        if not call.final_in_place:
            scratch["final_states"] = ((layout.num_final, *shape), torch.float32)
        self._scratch = ScratchLayout(scratch)
        self._offsets = tuple(field.offset for field in self._scratch.fields.values())
        has_checkpoints = call.checkpoints is not None and layout.num_checkpoints > 0
        launches = [*_loads(call), *precompute_t.prepare(inputs, table)]
        opens = layout.has_maps and call.plan is not None and call.plan.opens
        if layout.has_maps:
            assert layout.runs is not None
            output = call.output if opens else None
            launches.append(recurrence_launches.prepare_mn(inputs, table, maps, output, opens and has_checkpoints))
            launches.append(state_fixup.prepare_runs(maps, layout.runs))
        launches.append(recurrence_launches.prepare_cp_prefill(inputs, table, call.output, opens, has_checkpoints))
        launches += _stores(call)
        self._launches = Launches(
            _CHANGING,
            *launches,
            scale=inputs.scale,
            log2_forget_below=recurrence_launches.threshold(call.forget_below),
            map_dump=-1,
            final_dump=layout.num_final,
            checkpoint_dump=layout.num_checkpoints,
        )

    def __call__(self, call: Call) -> bool:
        """Enqueue them; False where tokens or output do not start where the copy engine can."""
        inputs, io, gate, beta = call.inputs, call.states, call.inputs.gate, call.inputs.beta
        q, k, v, output = inputs.q.data_ptr(), inputs.k.data_ptr(), inputs.v.data_ptr(), call.output.data_ptr()
        if (q | k | v | output) % TMA_ALIGNMENT:
            return False
        memory = torch.empty(self._scratch.num_bytes, dtype=torch.uint8, device=inputs.q.device)
        base = memory.data_ptr()
        destination = None if io.destination is None else io.destination.data_ptr()
        tiles, maps, entry_states, *final_states = [base + offset for offset in self._offsets]
        self._launches(
            q,
            k,
            v,
            None if gate is None else gate.data_ptr(),
            None if beta is None else beta.data_ptr(),
            output,
            None if io.slots is None else io.slots.data_ptr(),
            None if io.source is None else io.source.data_ptr(),
            destination,
            None if call.checkpoints is None else call.checkpoints.data_ptr(),
            tiles,
            maps,
            entry_states,
            final_states[0] if final_states else destination,
        )
        return True


def is_whole(call: Call) -> bool:
    """Whether nothing but our launches is to be done, on one stream, and the host knows all of it."""
    layout, plan, io = call.layout, call.plan, call.states
    return (
        plan is not None
        and not plan.crosses_ranks
        and plan.fold_span == 1
        and len(layout.tables) == 1
        and layout.num_items > 0
        and call.inputs.q.shape[0] > 0
        and (call.checkpoints is None or call.checkpoints_in_place)
        and not any(table.host is not None and table.host.checkpoints_inside_chunks for table in layout.tables)
        and _moved_by_kernels(io.source)
        and (call.final_in_place or _moved_by_kernels(io.destination))
        and (io.slots is None or (io.slots.is_contiguous() and layout.starts_all and layout.ends_all))
        and not (io.share and plan.world_size > 1)
    )


def _moved_by_kernels(x: torch.Tensor | None) -> bool:
    """Not fp8, to which Triton and torch round differently, nor a pool without slots."""
    return x is None or (x.element_size() > 1 and x.numel() > 0)


def _loads(call: Call) -> list[Launch]:
    layout, source = call.layout, call.states.source
    if source is None:
        return []
    rows, count = call.states.rows(layout.first_sequences, layout.starts_all), layout.first_rows.shape[0]
    return [_move(call, "source", source, rows, "entry_states", layout.first_rows, count)]


def _stores(call: Call) -> list[Launch]:
    layout, destination = call.layout, call.states.destination
    if destination is None or call.final_in_place:
        return []
    rows = call.states.rows(layout.final_sequences, layout.ends_all)
    return [_move(call, "destination", destination, rows, "final_states", None, layout.num_final)]


def _move(
    call: Call,
    name: str,
    theirs: torch.Tensor,
    rows: torch.Tensor | None,
    ours: str,
    our_rows: torch.Tensor | None,
    count: int,
) -> Launch:
    slots = Pointer("slots", rows.dtype) if rows is not None and rows is call.states.slots else None
    return states.prepare(
        count,
        theirs.shape[1:],
        theirs.stride(),
        Pointer(name, theirs.dtype),
        slots or rows,
        Pointer(ours, torch.float32),
        our_rows,
        theirs.shape[0],
    )
