"""Maps in transit, for the strategies that ship them: what is packed and unpacked, a launch each.

On the wire are a rank's transitions, then its local states, without the transitions of first CP chunks.  Unpacked, the
maps of a sequence follow each other, whoever held them, so that the fold takes them as one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gdncp.backends.base import AffineMaps, maps_layout
from gdncp.collectives.schedule import Manifest, Parcel
from gdncp.scratch import ScratchLayout
from gdncp.work import upload

Piece = tuple[int | None, int]  # first element, number of elements; None: whatever, since nobody reads it


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of a contiguous fp32 tensor, copied to or from one in which they lie side by side, from its start."""

    unit: int  # elements; divides all starts and lengths
    rows: torch.Tensor  # [n] int64: the pieces in units, in order

    def gather(self, source: torch.Tensor, out: torch.Tensor) -> None:
        if self.rows.numel():
            # torch's kernel moves an element a thread
            wide = torch.float32 if self.unit % 4 else torch.complex128
            target = self._units(out, wide)[: self.rows.numel()]
            torch.index_select(self._units(source, wide), 0, self.rows, out=target)

    def scatter(self, source: torch.Tensor, out: torch.Tensor) -> None:
        if self.rows.numel():
            # not complex numbers: where algorithms are to be deterministic, torch's kernel multiplies by one
            wide = torch.float32 if self.unit % 2 else torch.int64
            self._units(out, wide).index_copy_(0, self.rows, self._units(source, wide)[: self.rows.numel()])

    def _units(self, x: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        return x.view(-1)[: x.numel() // self.unit * self.unit].view(-1, self.unit).view(wide)


def pieces_on(pieces: Sequence[Piece], device: torch.device) -> Pieces:
    """Copied to the device without waiting for it."""
    unit = math.gcd(*(x or 0 for piece in pieces for x in piece)) or 1
    rows = [0 if start is None else start // unit + i for start, length in pieces for i in range(length // unit)]
    return Pieces(unit, **upload({"rows": rows}, device))


class Shape(NamedTuple):
    """Of the maps in a tensor."""

    num_heads: int
    k_dim: int
    v_dim: int

    @property
    def transition(self) -> int:
        """Elements of one head's; there as many of `local_state`."""
        return self.k_dim * self.k_dim

    @property
    def local_state(self) -> int:
        return self.v_dim * self.k_dim

    def shipped(self, manifest: Manifest) -> int:
        """Elements that a manifest puts on the wire."""
        per_head = manifest.num_transitions * self.transition + manifest.num_local_states * self.local_state
        return self.num_heads * per_head


def shape_of(maps: ScratchLayout) -> tuple[Shape, int]:
    """And where in the memory of the maps local states begin, in elements."""
    (_, num_heads, v_dim, k_dim), _, offset = maps.fields["local_state"]
    return Shape(num_heads, k_dim, v_dim), offset // 4


def packed(manifest: Manifest, heads: tuple[int, int], shape: Shape, local_offset: int) -> list[Piece]:
    """What a rank ships of heads [start, stop), as pieces of the memory of its maps, which hold all heads."""
    start, stop = heads

    def piece(row: int, size: int, offset: int = 0) -> Piece:
        return offset + (row * shape.num_heads + start) * size, (stop - start) * size

    own = [(link.row, link.row + link.num_maps, link.starts) for link, _, _ in manifest.parcels]
    transitions = [piece(row, shape.transition) for a, b, starts in own for row in range(a + starts, b)]
    return transitions + [piece(row, shape.local_state, local_offset) for a, b, _ in own for row in range(a, b)]


def unpacked(
    routes: Iterable[Sequence[Parcel]], manifests: Sequence[Manifest], begins: Sequence[int], shape: Shape
) -> tuple[int, list[Piece]]:
    """How many maps the routes have, and these, in order, as pieces of what was received.

    begins: per rank, where what it shipped begins there, in elements.  shape: of the heads that were received.
    """
    transitions: list[Piece] = []
    local_states: list[Piece] = []
    transition, local_state = shape.num_heads * shape.transition, shape.num_heads * shape.local_state
    for parcels in routes:
        for link, first_transition, first_local in parcels:
            begin, manifest = begins[link.rank], manifests[link.rank]
            second = begin + manifest.num_transitions * transition
            first_transition -= link.starts  # a first CP chunk shipped none
            for j in range(link.num_maps):
                at = None if link.starts and j == 0 else begin + (first_transition + j) * transition
                transitions.append((at, transition))
                local_states.append((second + (first_local + j) * local_state, local_state))
    num_maps = len(transitions)
    layout = maps_layout(num_maps, shape.num_heads, shape.k_dim, shape.v_dim)
    gap = layout.offset("local_state") // 4 - num_maps * transition
    return num_maps, [*transitions, *[(None, gap)] * (gap > 0), *local_states]


def unpack(pieces: Pieces, received: torch.Tensor, num_maps: int, shape: Shape) -> AffineMaps:
    """Transitions and local states alone are filled, but for the transitions of first CP chunks."""
    maps = AffineMaps.empty(num_maps, shape.num_heads, shape.k_dim, shape.v_dim, received.device)
    pieces.gather(received, maps.scratch.flat(torch.float32))
    return maps


def pack(pieces: Pieces, maps: AffineMaps, into: torch.Tensor) -> None:
    pieces.gather(maps.scratch.flat(torch.float32), into)
