"""The launches of stages 2 and 4: what `recurrence_kernel` is given, prepared once per table and kind of call."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from gdncp_kernels.hopper import checkpoints as inner_checkpoints
from gdncp_kernels.hopper import forgetting, tensor_maps
from gdncp_kernels.hopper.launch import Launch, Launcher, Launches, Number, Pointer
from gdncp_kernels.hopper.recurrence import REGISTER_CAPS, RESOURCES, recurrence_kernel
from gdncp_kernels.hopper.tiles import tiles_of

if TYPE_CHECKING:
    from gdncp.backends.base import AffineMaps, Part, Sinks, TokenInputs
    from gdncp.scratch import ScratchLayout
    from gdncp.work import WorkTable
    from gdncp_kernels.hopper.tiles import Tiles

_launchers = {dim: Launcher(recurrence_kernel, num_warps=4, **cap) for dim, cap in REGISTER_CAPS.items()}
_CHANGING = (
    *("q", "k", "v", "output", "tiles", "entry_states", "checkpoints", "final_states", "maps"),  # addresses
    *("scale", "log2_forget_below", "map_dump", "final_dump", "checkpoint_dump"),
)


def precompute_mn(
    tiles: Tiles,
    table: WorkTable,
    entry_states: torch.Tensor,
    maps: AffineMaps,
    forget_below: float,
    sinks: Sinks | None = None,
) -> None:
    """Launch stage 2 over the table's maps; with `sinks` also stage 4 of the items in `table.opens`."""
    inputs = tiles.inputs
    if not table.num_maps or not inputs.k.shape[0]:
        return
    num_rows, output = maps.scratch.layout.fields["gain"].shape[0], None if sinks is None else sinks.output
    has_checkpoints = _has_checkpoints(table, sinks)
    key = (precompute_mn, inputs.kind, num_rows, output is None or output.stride(0), has_checkpoints)
    launches = table.prepared.get(key)
    if launches is None:
        launch = prepare_mn(inputs, table, maps.scratch.layout, output, has_checkpoints)
        launches = table.prepared[key] = Launches(_CHANGING, launch)
    dump = map_dump(table, num_rows)
    _enqueue(launches, tiles, entry_states, sinks, maps, threshold(forget_below), dump)
    if forget_below > 0:
        # not of `maps`, which would then keep itself alive
        maps.deferred.append(partial(forgetting.fill_dropped, tiles, table, entry_states, maps.scratch, dump))


def cp_prefill(
    tiles: Tiles,
    table: WorkTable,
    entry_states: torch.Tensor,
    sinks: Sinks,
    opened: bool = False,
    part: Part | None = None,
) -> None:
    """Launch stage 4 over the table's items, or a part of their heads.

    opened: without those in `table.opens`, which stage 2 has done.
    """
    if not table.num_items:
        return
    has_checkpoints = _has_checkpoints(table, sinks)
    key = (cp_prefill, tiles.inputs.kind, sinks.output.stride(0), opened, has_checkpoints, _kind_of(part))
    launches = table.prepared.get(key)
    if launches is None:
        launch = prepare_cp_prefill(tiles.inputs, table, sinks.output, opened, has_checkpoints, part)
        launches = table.prepared[key] = Launches(_CHANGING, launch)
    _enqueue(launches, tiles, entry_states, sinks, None if part is None else part.maps)
    if has_checkpoints:
        inner_checkpoints.finish(tiles, table, sinks, part)


def map_dump(table: WorkTable, num_rows: int) -> int:
    """A table built on the device pads with maps that go to the last row, which nobody reads."""
    return num_rows - 1 if table.host is None else -1


def prepare_mn(
    inputs: TokenInputs, table: WorkTable, maps: ScratchLayout, output: torch.Tensor | None, has_checkpoints: bool
) -> Launch:
    """The launch of stage 2; with `output`, of that shape, strides and dtype, also stage 4 of the items in `opens`."""
    arguments = {**_everywhere(inputs, table), **_outputs(inputs, table, output, has_checkpoints)}
    return _prepare(inputs, table.num_maps * 2, arguments | _maps(inputs, table, maps))


def prepare_cp_prefill(
    inputs: TokenInputs,
    table: WorkTable,
    output: torch.Tensor,
    opened: bool,
    has_checkpoints: bool,
    part: Part | None = None,
) -> Launch:
    """The launch of stage 4, with `opened` without the items in `table.opens`."""
    arguments = {
        **_everywhere(inputs, table),
        **_outputs(inputs, table, output, has_checkpoints),
        "final_row": table.final_row,
        "final_states": Pointer("final_states", torch.float32),
        "final_dump": Number("final_dump", -1),
        "opens": table.opens.view(torch.uint8) if opened else None,
        **_part(table, part),
    }
    return _prepare(inputs, table.num_items, arguments)


def _kind_of(part: Part | None) -> tuple[Any, ...] | None:
    return None if part is None else (part.early, part.maps.scratch.layout.fields["gain"].shape)


def _part(table: WorkTable, part: Part | None) -> dict[str, Any]:
    """The kernel's arguments where it makes outputs of a part of the pairs."""
    if part is None:
        return {}
    assert table.early is not None
    return {
        "forgot": Pointer("maps", torch.uint8, part.maps.scratch.layout.offset("forgot")),
        "maps_start": table.early.maps_start,
        "maps_stop": table.early.maps_stop,
        "early": int(part.early),
    }


def _has_checkpoints(table: WorkTable, sinks: Sinks | None) -> bool:
    return sinks is not None and sinks.checkpoints is not None and table.num_checkpoints > 0


def _prepare(inputs: TokenInputs, num_units: int, arguments: dict[str, Any]) -> Launch:
    """A program per unit and head.  Arguments that are not given are None; those that say what a launch does follow."""
    arguments["WITH_MAPS"] = "map_item" in arguments
    arguments["WITH_OUTPUTS"] = "output" in arguments
    launcher, num_programs = _launchers[inputs.k.shape[2]], num_units * inputs.num_state_heads
    return launcher.prepare(num_programs, dict.fromkeys(recurrence_kernel.arg_names) | arguments)


def _enqueue(
    launches: Launches,
    tiles: Tiles,
    entry_states: torch.Tensor,
    sinks: Sinks | None,
    maps: AffineMaps | None = None,
    log2_forget_below: float = 0.0,
    map_dump: int = -1,
) -> None:
    """The values of `_CHANGING`; 0 where a launch has no use for them."""
    output = checkpoints = final_states = 0
    final_dump = checkpoint_dump = -1
    if sinks is not None:
        output, final_states, final_dump = sinks.output.data_ptr(), sinks.final_states.data_ptr(), sinks.final_dump
        if sinks.checkpoints is not None:
            checkpoints, checkpoint_dump = sinks.checkpoints.data_ptr(), sinks.checkpoint_dump
    inputs = tiles.inputs
    launches(
        inputs.q.data_ptr(),
        inputs.k.data_ptr(),
        inputs.v.data_ptr(),
        output,
        tiles.scratch.address,
        entry_states.data_ptr(),
        checkpoints,
        final_states,
        0 if maps is None else maps.scratch.address,
        inputs.scale,
        log2_forget_below,
        map_dump,
        final_dump,
        checkpoint_dump,
    )


@lru_cache(maxsize=256)
def threshold(forget_below: float) -> float:
    """Its log2, rounded down; below any product, resets too, where nothing is to be forgotten."""
    if forget_below <= 0:
        return -1e30
    threshold = math.log2(forget_below)
    return threshold - 1e-6 * max(abs(threshold), 1.0)


def _everywhere(inputs: TokenInputs, table: WorkTable) -> dict[str, Any]:
    """The kernel's arguments in every launch."""
    layout, num_heads = tiles_of(inputs, table), inputs.num_state_heads
    entries, key_entries = table.num_chunks * num_heads, table.num_chunks * inputs.k.shape[1]
    return {
        "k_map": tensor_maps.tokens("k", inputs.k),
        "v_map": tensor_maps.tokens("v", inputs.v),
        "solve_map": tensor_maps.solve("tiles", entries, inputs.k.dtype, layout.offset("solve")),
        "gates_map": tensor_maps.gates("tiles", entries, layout.offset("gates")),
        "keys_map": tensor_maps.keys("tiles", key_entries, layout.offset("keys")) if inputs.use_qk_l2norm else None,
        "token_start": table.token_start,
        "num_tokens": table.num_tokens,
        "first_chunk": table.first_chunk,
        "item_row": table.item_row,
        "entry_states": Pointer("entry_states", torch.float32),
        "scale": Number("scale", 1.0),
        "H": num_heads,
        "HQ": inputs.q.shape[1],
        "HK": inputs.k.shape[1],
        "HV": inputs.v.shape[1],
        "L2NORM": inputs.use_qk_l2norm,
        **RESOURCES[inputs.k.shape[2]],
    }


def _outputs(
    inputs: TokenInputs, table: WorkTable, output: torch.Tensor | None, has_checkpoints: bool
) -> dict[str, Any]:
    """The kernel's arguments where it makes outputs."""
    if output is None:
        return {}
    arguments: dict[str, Any] = {
        "q_map": tensor_maps.tokens("q", inputs.q),
        "output_map": tensor_maps.output("output", output),
        "output": Pointer("output", output.dtype),
        "output_row": tensor_maps.heads_in_row(output, inputs.num_state_heads),
    }
    if has_checkpoints:
        arguments |= {
            "checkpoint_start": table.checkpoint_start,
            "checkpoint_tokens": table.checkpoint_tokens,
            "checkpoint_row": table.checkpoint_row,
            "checkpoints": Pointer("checkpoints", torch.float32),
            "checkpoint_dump": Number("checkpoint_dump", -1),
        }
    return arguments


def _maps(inputs: TokenInputs, table: WorkTable, maps: ScratchLayout) -> dict[str, Any]:
    """The kernel's arguments where it makes maps."""
    at, tiles_at = maps.offset, tiles_of(inputs, table).offset
    return {
        "map_item": table.map_item,
        "map_row": table.map_row,
        "map_is_first": table.map_is_first.view(torch.uint8),
        "growth": Pointer("tiles", torch.float32, tiles_at("growth")),
        "transition": Pointer("maps", torch.float32, at("transition")),
        "local_state": Pointer("maps", torch.float32, at("local_state")),
        "gain": Pointer("maps", torch.float32, at("gain")),
        "dropped": Pointer("maps", torch.float32, at("dropped")),
        "forgot": Pointer("maps", torch.uint8, at("forgot")),
        "scanned": Pointer("maps", torch.int32, at("scanned")),
        "start_chunk": Pointer("tiles", torch.int32, tiles_at("start_chunk")),
        "log2_forget_below": Number("log2_forget_below", -16.0),
        "map_dump": Number("map_dump", -1),
    }
