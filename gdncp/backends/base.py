"""What a backend is: four stages over one work table.  A backend sees one lane of one rank and nothing of the others.

Shapes below: T the rank's tokens, H state heads, K and V the head dims of keys and values, m the rank's affine maps.
States are fp32 [.., H, V, K] everywhere between the stages; casts to and from the caller's dtypes happen outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, runtime_checkable

import torch

from gdncp.scratch import Scratch, ScratchLayout
from gdncp.work import CHUNK as CHUNK
from gdncp.work import WorkTable

if TYPE_CHECKING:
    from gdncp.collectives import FixupStats
    from gdncp.collectives.peer_memory import Mailboxes
    from gdncp.stages import Call

GateSpace = Literal["linear", "log"]
Precision = Literal["fast", "high"]


@dataclass(eq=False)
class TokenInputs:
    """A rank's tokens, as the caller gave them (validated; gates and beta fp32 or None)."""

    q: torch.Tensor  # [T, Hq, K]
    k: torch.Tensor  # [T, Hk, K]
    v: torch.Tensor  # [T, Hv, V]
    gate: torch.Tensor | None  # [T, H] fp32: alpha (`gate_space` "linear") or its natural log ("log"); None: ones
    beta: torch.Tensor | None  # [T, H] fp32; None: ones
    scale: float
    gate_space: GateSpace = "linear"
    use_qk_l2norm: bool = False
    precision: Precision = "fast"
    some_heads: bool = False  # all of these are views of some heads of the caller's: rows are further apart

    @property
    def num_state_heads(self) -> int:
        return max(self.q.shape[1], self.v.shape[1])

    @cached_property
    def kind(self) -> object:
        """One for all inputs that what is prepared for one call is good for."""
        q, k, v = self.q, self.k, self.v
        shapes = (q.shape, k.shape, v.shape, q.dtype, q.device, self.gate is None, self.beta is None)
        strides: tuple[int, ...] = ()
        if self.some_heads:
            strides = tuple(x.stride(0) for x in (q, k, v, self.gate, self.beta) if x is not None)
        return _kind(*shapes, *strides, self.gate_space, self.use_qk_l2norm, self.precision)


@lru_cache(maxsize=1024)
def _kind(*facts: Any) -> object:
    """To look up by: the facts themselves would be hashed at every look."""
    return object()


@dataclass(eq=False)
class AffineMaps:
    """What each CP chunk that passes a state on does to it: S_out = S_in · transition + local_state, per head.

    `transition` is exactly zero for the first CP chunk of a sequence (its scan starts from the initial state, so its
    local state is its exit state) and where the forgetting bound dropped it.
    """

    scratch: Scratch  # laid out by `maps_layout`; the properties are its tensors
    deferred: list[Callable[[], None]] = field(default_factory=list)  # what `dropped` needs enqueued, lane by lane

    @cached_property
    def transition(self) -> torch.Tensor:
        """[m, H, K, K] fp32."""
        return self.scratch.tensor("transition")

    @cached_property
    def local_state(self) -> torch.Tensor:
        """[m, H, V, K] fp32."""
        return self.scratch.tensor("local_state")

    @cached_property
    def gain(self) -> torch.Tensor:
        """[m, H] fp32: product of alpha·max(1, |1 − beta‖k‖²|) over the CP chunk, an upper bound on ‖M‖."""
        return self.scratch.tensor("gain")

    @cached_property
    def dropped_rows(self) -> torch.Tensor:
        """[m, H] fp32: memory of `dropped`."""
        return self.scratch.tensor("dropped")

    @cached_property
    def forgot(self) -> torch.Tensor:
        """[m, H] bool: gain < forget_below, so the transition was dropped (adds gain·‖S_in‖)."""
        return self.scratch.tensor("forgot")

    @cached_property
    def scanned(self) -> torch.Tensor:
        """[m, H] int32: tokens that N's scan read."""
        return self.scratch.tensor("scanned")

    @property
    def dropped(self) -> torch.Tensor:
        """[m, H] fp32: bound on ‖what N's scan left out‖, the entry state's share apart; 0: nothing.

        Only reports need it, so a backend may put its making off until it is read here.  Until then the tokens and the
        initial states must stay what they were in stage 2.  Made at every reading: a CUDA graph may have been replayed.
        """
        for make in self.deferred:
            make()
        return self.dropped_rows

    @classmethod
    def empty(cls, num_maps: int, num_heads: int, k_dim: int, v_dim: int, device: torch.device) -> AffineMaps:
        return cls(Scratch(maps_layout(num_maps, num_heads, k_dim, v_dim), device))


@lru_cache(maxsize=256)
def maps_layout(num_maps: int, num_heads: int, k_dim: int, v_dim: int) -> ScratchLayout:
    """Of the tensors of `AffineMaps`."""
    rows = (num_maps, num_heads)
    return ScratchLayout(
        {
            "transition": ((*rows, k_dim, k_dim), torch.float32),
            "local_state": ((*rows, v_dim, k_dim), torch.float32),
            "gain": (rows, torch.float32),
            "dropped": (rows, torch.float32),
            "forgot": (rows, torch.bool),
            "scanned": (rows, torch.int32),
        }
    )


@dataclass(eq=False)
class Sinks:
    """Where stage 4 writes.  The rows behind those that are wanted are dumps, which nobody reads.

    For a backend with `exact_rows` the dump rows may be missing: only their numbers are known.
    """

    output: torch.Tensor  # [T, H, V] in the dtype of q; rows that no item covers stay untouched
    final_states: torch.Tensor  # [num_final (+ 1), H, V, K] fp32, row `table.final_row[item]`
    checkpoints: torch.Tensor | None  # [num_rows (+ 1), H, V, K] fp32, row `table.checkpoint_row[e]`
    final_dump: int = -1  # < 0: the last row
    checkpoint_dump: int = -1

    def __post_init__(self) -> None:
        if self.final_dump < 0:
            self.final_dump = self.final_states.shape[0] - 1
        if self.checkpoint_dump < 0 and self.checkpoints is not None:
            self.checkpoint_dump = self.checkpoints.shape[0] - 1


@dataclass(frozen=True, eq=False)
class Part:
    """One of two launches of stage 4 that share the (item, head) pairs of a table, see `EarlyTable`."""

    early: bool  # the pairs whose entry state is known before the exchange; else the others
    maps: AffineMaps  # the rank's; `forgot` tells the pairs apart

    def pairs(self, table: WorkTable) -> torch.Tensor:
        """[num_items, H] bool."""
        assert table.early is not None
        forgot = self.maps.forgot.cumsum(0)  # so many maps up to a row
        forgot = torch.cat([forgot.new_zeros(1, forgot.shape[1]), forgot])
        start, stop = table.early.maps_start, table.early.maps_stop
        known = (start < 0)[:, None] | (forgot[stop.clamp(min=0)] > forgot[start.clamp(min=0)])
        return known if self.early else ~known


class Fold(Protocol):
    """state · transition + local_state, the one function by which every fixup folds, on any leading shape.

    state, local_state [B, V', K] and transition [B, K, K], fp32, with V' = V or any slice of `block_rows`-aligned rows:
    the bits of a row block do not depend on what else is in the call.
    """

    block_rows: int  # V is folded in blocks of this many rows; a fixup may cut V at multiples of it

    def __call__(self, state: torch.Tensor, transition: torch.Tensor, local_state: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)
class FoldRuns:
    """Stretches of one sequence each, all on this rank: the maps of a run are consecutive rows, its entry states too.

    All [num_runs] int64 on the device.
    """

    num_runs: int
    entry_row: torch.Tensor  # row of the run's first CP chunk in the entry states
    map_row: torch.Tensor  # its row in the `AffineMaps`
    num_steps: torch.Tensor  # maps to fold; entry states are filled in the rows behind `entry_row`
    # 1: the run starts its sequence, so that its first map's local state is an exit state; -1: it starts from zeros
    starts: torch.Tensor
    # Where runs hand states on: how many entry states to fill, and the row of `exits` for the state after the last
    # map, -1: none.  None: as many as there are maps, and no exits.
    num_fills: torch.Tensor | None = None
    exit_row: torch.Tensor | None = None
    # Of runs inside spans that do not start their sequence: the row of the span's entry state among those of spans.  It
    # is put in place, also where nothing is to be folded.
    span_row: torch.Tensor | None = None
    # Where states travel by mail (`gdncp.collectives.peer_memory`): from and to which rank, -1: none, and which of its
    # messages.  Runs that do not start their sequence then all come from a rank, some with nothing to fold.
    source: torch.Tensor | None = None
    source_message: torch.Tensor | None = None
    target: torch.Tensor | None = None
    target_message: torch.Tensor | None = None
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # backends' launches over these runs


@dataclass(frozen=True, eq=False)
class ComposingRuns:
    """What becomes one map each: consecutive maps of a sequence, their local states and their transitions apart.

    All [num_runs] int64 on the device.
    """

    num_runs: int
    map_row: torch.Tensor  # of the first, which is taken as it is
    num_steps: torch.Tensor  # how many
    composed_row: torch.Tensor  # the composed map's row
    # 1: its transition is made, by folding the transitions like states with nothing to add; 0: its local state
    of_transitions: torch.Tensor
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # backends' launches over these runs


@runtime_checkable
class RunFold(Protocol):
    """What a `Fold` may offer besides: whole runs in one launch, with the bits of one map at a time."""

    def fold_runs(
        self,
        maps: AffineMaps,
        entry_states: torch.Tensor,
        runs: FoldRuns,
        exits: torch.Tensor | None = None,
        spans: torch.Tensor | None = None,
    ) -> None:
        """Fill `entry_states` [items, H, V, K], and `exits` [.., H, V, K] where runs have them, in place.

        spans: of runs inside spans, the entry states of spans [spans, H, V, K].
        """
        ...

    def compose_runs(self, maps: AffineMaps, runs: ComposingRuns, composed: AffineMaps) -> None:
        """Fill transitions and local states of `composed` in place."""
        ...


@runtime_checkable
class MailFold(Protocol):
    """What a `RunFold` may offer besides: it sends and receives what its runs hand on itself, in the same launch."""

    def fold_runs_by_mail(
        self, maps: AffineMaps, entry_states: torch.Tensor, runs: FoldRuns, mailboxes: Mailboxes
    ) -> None:
        """Fill `entry_states`, those that come from other ranks included, in place."""
        ...


class Backend(Protocol):
    """The stages of one kernel set.  All methods enqueue work and never wait for a device."""

    name: str
    # Stages read no entry state in a row < 0 (it is zeros), and write no dump row.
    exact_rows: bool

    def rejection_reason(
        self, *, device: torch.device, dtype: torch.dtype, k_dim: int, v_dim: int, precision: Precision
    ) -> str | None:
        """Why this backend cannot run such a call, as a sentence; None if it can."""
        ...

    def precompute_t(self, inputs: TokenInputs, table: WorkTable) -> Any:
        """Stage 1.  Per 64-token chunk: cumulative log gates and T = (I + tril(β K Kᵀ·decay))⁻¹; opaque to callers."""
        ...

    def precompute_mn(
        self,
        inputs: TokenInputs,
        tiles: Any,
        table: WorkTable,
        entry_states: torch.Tensor,
        maps: AffineMaps,
        forget_below: float,
    ) -> None:
        """Stage 2.  Fill row `table.map_row[j]` of `maps` for each map j of the table.

        entry_states [num_items of the rank, H, V, K] fp32: only rows of first CP chunks are read (initial states).
        """
        ...

    @property
    def fold(self) -> Fold: ...

    def cp_prefill(
        self,
        inputs: TokenInputs,
        tiles: Any,
        table: WorkTable,
        entry_states: torch.Tensor,
        sinks: Sinks,
        part: Part | None = None,
    ) -> None:
        """Stage 4.  From each item's entry state: outputs, state checkpoints, and the exit state of last CP chunks.

        part: of these (item, head) pairs alone; what belongs to others is neither read nor written.  None: of all.
        """
        ...


@runtime_checkable
class OpeningBackend(Protocol):
    """What a backend may offer besides: stage 4 of the items in `table.opens` in the launch of stage 2.

    A sequence's first CP chunk needs nothing from elsewhere, and its exit state is its N: one scan instead of two.
    """

    def precompute_mn_and_open(
        self,
        inputs: TokenInputs,
        tiles: Any,
        table: WorkTable,
        entry_states: torch.Tensor,
        maps: AffineMaps,
        forget_below: float,
        sinks: Sinks,
    ) -> None:
        """Stage 2, and stage 4 of the items in `table.opens`, whose N is scanned whole."""
        ...

    def cp_prefill_after_opening(
        self,
        inputs: TokenInputs,
        tiles: Any,
        table: WorkTable,
        entry_states: torch.Tensor,
        sinks: Sinks,
        part: Part | None = None,
    ) -> None:
        """Stage 4 of the items that are not in `table.opens`."""
        ...


@runtime_checkable
class StateBackend(Protocol):
    """What a backend may offer besides: `gdncp.states` in a launch each, with the same bits."""

    def load_states(
        self, source: torch.Tensor | None, rows: torch.Tensor | None, out: torch.Tensor, out_rows: torch.Tensor
    ) -> None: ...

    def store_states(self, final: torch.Tensor, destination: torch.Tensor, rows: torch.Tensor | None) -> None: ...


@runtime_checkable
class WholeBackend(Protocol):
    """What a backend may offer besides: all stages of a call at once, with the same bits."""

    def run_whole(self, call: Call) -> FixupStats | None:
        """Enqueue all of it; None, and nothing enqueued, where its stages must run one by one."""
        ...


@cache  # looking a protocol's methods up takes longer than a launch
def _offers(backend: type, protocol: type) -> bool:
    return issubclass(backend, protocol)


def opens(backend: Backend) -> TypeGuard[OpeningBackend]:
    return _offers(type(backend), OpeningBackend)


def moves_states(backend: Backend) -> TypeGuard[StateBackend]:
    return _offers(type(backend), StateBackend)


def runs_whole(backend: Backend) -> TypeGuard[WholeBackend]:
    return _offers(type(backend), WholeBackend)


def folds_runs(fold: Fold) -> TypeGuard[RunFold]:
    return _offers(type(fold), RunFold)


def folds_by_mail(fold: Fold) -> TypeGuard[MailFold]:
    return _offers(type(fold), MailFold)
