"""All stages of a call in one go: what they launch is prepared once a kind, and a chain's exchange between them too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gdncp.backends.base import FoldRuns, maps_layout
from gdncp.collectives import chain, peer_memory
from gdncp.collectives.fixup import LOCAL, FixupStats, stats_of
from gdncp.collectives.spans import spans_of
from gdncp.collectives.wire import Wire
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
_MAPS, _ENTRY_STATES = Pointer("maps", torch.float32), Pointer("entry_states", torch.float32)
_Messages = tuple[list[tuple[int, slice]], list[tuple[int, slice]]]  # sent to, and received from, whom and where


class Whole:
    """The launches of one kind of call over one layout, and how the memory between them lies."""

    def __init__(self, call: Call):
        """For a call that `is_whole`."""
        layout, (table,), inputs, shape = call.layout, call.tables, call.inputs, call.state_shape
        heads, v_dim, k_dim = shape
        self._maps = self._folded = maps_layout(layout.num_maps, heads, k_dim, v_dim)
        scratch = {
            "tiles": ((tiles_of(inputs, table).num_bytes,), torch.uint8),
            "maps": ((self._maps.num_bytes,), torch.uint8),
            "entry_states": ((layout.num_items, *shape), torch.float32),
        }
        if not call.final_in_place:
            scratch["final_states"] = ((layout.num_final, *shape), torch.float32)
        num_exits = sum(found.num_exits for found in layout.exchange)
        more: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"exits": ((num_exits, *shape), torch.float32)}
        if layout.composing is not None:
            self._folded = maps_layout(len(layout.composing.spans), heads, k_dim, v_dim)
            assert call.plan is not None
            more["composed"] = ((self._folded.num_bytes,), torch.uint8)
            more["span_states"] = ((len(spans_of(call.plan, call.rank)), *shape), torch.float32)
        self._scratch = ScratchLayout({**scratch, **more})
        self._offsets = tuple(self._scratch.offset(name) for name in scratch)
        self._folded_maps, self._folded_states = _MAPS, _ENTRY_STATES  # along sequences, and what that fills
        if layout.composing is not None:
            self._folded_maps, self._folded_states = self._at("composed"), self._at("span_states")
        self._parts: list[Launches] = []  # made when they are first wanted, as all below
        self._exchanges: list[_Messages] = []
        self._by_mail: Launches | None = None
        self._sent_by_mail = LOCAL

    def _at(self, name: str) -> Pointer:
        """What lies behind the scratch that has a name of its own."""
        return replace(_ENTRY_STATES, offset=self._scratch.offset(name) - self._scratch.offset("entry_states"))

    def _fold(self, runs: FoldRuns, exits: Pointer | None = None, peers: Pointer | None = None) -> list[Launch]:
        """Along sequences."""
        if not runs.num_runs:
            return []
        folded = (self._folded, runs, self._folded_maps, self._folded_states)
        return [state_fixup.prepare_runs(*folded, exits=exits, peers=peers)]

    def _before(self, call: Call) -> list[Launch]:
        """What comes before the exchange."""
        layout, (table,), inputs = call.layout, call.tables, call.inputs
        launches = [*_loads(call), *precompute_t.prepare(inputs, table)]
        if layout.has_maps:
            opens = _opens(call)
            output = call.output if opens else None
            checkpoints = opens and _has_checkpoints(call)
            launches.append(recurrence_launches.prepare_mn(inputs, table, self._maps, output, checkpoints))
            if layout.composing is not None and layout.composing.runs.num_runs:
                runs, composed = layout.composing.runs, self._folded_maps
                launches.append(state_fixup.prepare_composing(self._maps, runs, self._folded, composed=composed))
            if layout.runs is not None:
                launches += self._fold(layout.runs)
        return launches

    def _behind(self, call: Call) -> list[Launch]:
        (table,), inside = call.tables, call.layout.in_spans
        launches = []
        if inside is not None and inside.runs.num_runs:
            launches.append(state_fixup.prepare_runs(self._maps, inside.runs, spans=self._folded_states))
        checkpoints = _has_checkpoints(call)
        opened = recurrence_launches.prepare_cp_prefill(call.inputs, table, call.output, _opens(call), checkpoints)
        return [*launches, opened, *_stores(call)]

    def _prepare(self, call: Call) -> None:
        """What comes before each exchange, and what comes behind the last."""
        parts, exchanges = [self._before(call)], []
        for runs, messages in self._rounds(call):
            if runs is not None:
                parts[-1] += self._fold(runs[0], exits=runs[1])
            if messages is not None:
                parts.append([])
                exchanges.append(messages)
        parts[-1] += self._behind(call)
        self._parts, self._exchanges = [_launches(call, _CHANGING, part) for part in parts], exchanges

    def _prepare_by_mail(self, call: Call) -> Launches:
        """All of it: what ranks hand on, they hand on inside their launches."""
        plan, peers = call.plan, Pointer("peers", torch.int64)
        assert plan is not None
        folds = [launch for runs in call.layout.mail for launch in self._fold(runs, peers=peers)]
        sent, received = chain.count_mail(plan, call.rank, 4 * math.prod(call.state_shape))
        self._sent_by_mail = FixupStats(
            plan.fixup, len(sent), len(received), sum(sent), sum(received), peer_memory.NAME
        )
        return _launches(call, (*_CHANGING, "peers"), [*self._before(call), *folds, *self._behind(call)])

    def _rounds(self, call: Call) -> Iterator[tuple[tuple[FoldRuns, Pointer] | None, _Messages | None]]:
        """Of `gdncp.collectives.chain`: what is folded, and what is sent then; rows as places in our memory."""
        size = math.prod(call.state_shape)
        exits = self._scratch.offset("exits")
        entries = self._scratch.offset("entry_states") + self._folded_states.offset
        for runs, num_exits, sends, receives in call.layout.exchange:

            def at(start: int, messages: Sequence[tuple[int, int]]) -> list[tuple[int, slice]]:
                places = ((peer, start // 4 + row * size) for peer, row in messages)
                return [(peer, slice(place, place + size)) for peer, place in places]

            left = replace(_ENTRY_STATES, offset=exits - self._scratch.offset("entry_states"))
            folds = None if runs is None else (runs, left)
            messages = (at(exits, sends), at(entries, receives)) if sends or receives else None
            yield folds, messages
            exits += 4 * size * num_exits

    def __call__(self, call: Call) -> FixupStats | None:
        """Enqueue them; None where tokens or output do not start where the copy engine can."""
        inputs, io, gate, beta = call.inputs, call.states, call.inputs.gate, call.inputs.beta
        q, k, v, output = inputs.q.data_ptr(), inputs.k.data_ptr(), inputs.v.data_ptr(), call.output.data_ptr()
        if (q | k | v | output) % TMA_ALIGNMENT:
            return None
        memory = torch.empty(self._scratch.num_bytes, dtype=torch.uint8, device=inputs.q.device)
        base = memory.data_ptr()
        destination = None if io.destination is None else io.destination.data_ptr()
        tiles, maps, entry_states, *final_states = [base + offset for offset in self._offsets]
        changing = (
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
        plan = call.plan
        assert plan is not None
        if plan.crosses_ranks:
            assert call.group is not None
            boxes = chain.mailboxes_for(plan, call.group, inputs.q.device, call.state_shape)
            if boxes is not None:
                if self._by_mail is None:
                    self._by_mail = self._prepare_by_mail(call)
                self._by_mail(*changing, boxes.address)
                return self._sent_by_mail
        if not self._parts:
            self._prepare(call)
        *parts, last = self._parts
        if not plan.crosses_ranks:
            last(*changing)
            return LOCAL
        wire = Wire(call.group, inputs.q.device, "state_fixup by chain")
        wire.open_point_to_point()  # which a rank joins that has nothing to send or receive
        states = memory.view(torch.float32)
        for launches, (sends, receives) in zip(parts, self._exchanges, strict=True):
            launches(*changing)
            outgoing, landing = ([(peer, states[place]) for peer, place in given] for given in (sends, receives))
            wire.exchange(outgoing, landing).wait()
        # for what was sent, too: the programs of stage 4, once they have the SMs, let NCCL's wait until they end
        wire.finish()
        last(*changing)
        return stats_of(wire, "chain")


def _launches(call: Call, changing: Sequence[str], launches: Sequence[Launch]) -> Launches:
    return Launches(
        changing,
        *launches,
        scale=call.inputs.scale,
        log2_forget_below=recurrence_launches.threshold(call.forget_below),
        map_dump=-1,
        final_dump=call.layout.num_final,
        checkpoint_dump=call.layout.num_checkpoints,
    )


def _opens(call: Call) -> bool:
    """Stage 2 opens sequences."""
    return call.layout.has_maps and call.plan is not None and call.plan.opens


def _has_checkpoints(call: Call) -> bool:
    return call.checkpoints is not None and call.layout.num_checkpoints > 0


def is_whole(call: Call) -> bool:
    """Whether nothing but our launches is to be done, on one stream, and the host knows all of it."""
    layout, plan, io = call.layout, call.plan, call.states
    return (
        plan is not None
        and (not plan.crosses_ranks or (plan.fixup == "chain" and plan.finish == "entry_first"))
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
    layout, source, count = call.layout, call.states.source, call.layout.first_rows.shape[0]
    if source is None or not count:
        return []
    rows = call.states.rows(layout.first_sequences, layout.starts_all)
    return [_move(call, "source", source, rows, "entry_states", layout.first_rows, count)]


def _stores(call: Call) -> list[Launch]:
    layout, destination = call.layout, call.states.destination
    if destination is None or call.final_in_place or not layout.num_final:
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
