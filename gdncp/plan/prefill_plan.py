"""PrefillPlan: the frozen answer of the planner.  Every rank computes the same one and reads its own part."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from gdncp.plan import cost, layout
from gdncp.plan.columns import Runs, Segments
from gdncp.plan.model import CpChunk, RankPlan, Segment
from gdncp.plan.profiles import CostProfile
from gdncp.plan.rank_work import RankWork, rank_work
from gdncp.plan.stage_model import StageModel, model_of

PLAN_FORMAT = 2  # part of the digest: raise it whenever the same inputs begin to give other tables


@dataclass(frozen=True, eq=False, repr=False)
class PrefillPlan:
    """Who computes what.  Made by `plan_prefill`; equal to another plan where their digests are.

    Tokens are counted over the packed batch (global), positions within a sequence, rows within a rank's tensors.
    """

    seq_lens: tuple[int, ...]
    world_size: int
    ownership: str  # "contiguous", "zigzag" or "explicit"
    num_q_heads: int
    num_k_heads: int
    num_v_heads: int
    head_dim: int
    cp_chunk_len: int  # resolved
    cp_chunk_len_requested: int | None
    first_cp_chunk_len: int  # resolved: of each sequence's first CP chunk
    checkpoint_every_n_tokens: int
    checkpoint_positions: tuple[tuple[int, ...], ...] | None
    opens: bool  # stage 2's launch also runs stage 4 of first CP chunks, on backends that can
    fixup: str  # resolved: "local" where nothing crosses ranks
    fixup_requested: str
    fold_span: int  # CP chunks whose maps are composed to one before a fixup folds along sequences; 1: none are
    finish: str  # resolved: "entry_first" or "entry_late"
    finish_requested: str
    lanes_per_rank: int
    lanes_by: str  # "cp_chunks" or "heads"
    head_half_lives: tuple[float, ...] | None  # tokens
    forget_below: float | None  # None: the default of the inputs' dtype
    require_reproducible: bool
    profile: CostProfile
    runs: Runs  # who holds which tokens
    pieces: Segments  # over all ranks, as columns
    lanes_reason: str = ""  # why there are as many lanes, where the planner chose; not part of the digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefillPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"PrefillPlan(num_sequences={self.num_sequences}, num_tokens_total={self.num_tokens_total}, "
            f"world_size={self.world_size}, ownership={self.ownership!r}, cp_chunk_len={self.cp_chunk_len}, "
            f"fixup={self.fixup!r}, digest={self.digest[:12]!r})"
        )

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)

    @property
    def num_state_heads(self) -> int:
        return max(self.num_q_heads, self.num_v_heads)

    @cached_property
    def seq_starts(self) -> tuple[int, ...]:
        """First global token of each sequence, then the number of tokens: cu_seqlens."""
        return layout.sequence_starts(self.seq_lens)

    @property
    def num_tokens_total(self) -> int:
        return self.seq_starts[-1]

    @property
    def grid(self) -> layout.Grid:
        """Where a sequence is cut, in positions from its start."""
        return layout.Grid(self.first_cp_chunk_len, self.cp_chunk_len)

    @property
    def num_cp_chunks(self) -> int:
        return int(self.pieces.num_items.sum())

    @cached_property
    def cp_chunks(self) -> tuple[CpChunk, ...]:
        """All CP chunks: sequences in order, then CP chunks in order."""
        return tuple(sorted(item for rank in range(self.world_size) for item in self.rank_plan(rank).items))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Over all ranks: sequences in order, then segments in order."""
        return self.pieces.all

    # ---- per rank

    def rank_plan(self, rank: int) -> RankPlan:
        """One rank's tables.  Raises IndexError for a rank outside 0 ... world_size − 1."""
        self._check_rank(rank)
        if rank not in self._rank_plans:
            self._rank_plans[rank] = layout.build_rank_plan(
                rank,
                self.pieces.make(rank),
                seq_starts=self.seq_starts,
                grid=self.grid,
                num_lanes=self.cp_chunk_lanes,
                checkpoint_every_n_tokens=self.checkpoint_every_n_tokens,
                checkpoint_positions=self.checkpoint_positions,
            )
        return self._rank_plans[rank]

    def token_ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Global half-open ranges of the rank's tokens, in the order in which it holds them; adjacent ones merged."""
        self._check_rank(rank)
        if rank not in self._token_ranges:
            self._token_ranges[rank] = self.runs.of_rank(rank)
        return self._token_ranges[rank]

    def num_tokens(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.token_ranges(rank))

    def checkpoint_rows(self, rank: int) -> tuple[int, ...]:
        """Global rows of the state checkpoints that this rank writes, in the order of its own checkpoint rows."""
        self._check_rank(rank)
        rows: list[int] = []
        for segment in self.rank_plan(rank).segments:
            first, positions = layout.segment_checkpoints(
                segment, self.seq_starts[segment.sequence], self.checkpoint_every_n_tokens, self.checkpoint_positions
            )
            first += self.checkpoint_cu_starts[segment.sequence]
            rows.extend(range(first, first + len(positions)))
        return tuple(rows)

    def final_state_owner(self, sequence: int) -> int:
        """The rank on which the sequence ends and that has its final state."""
        if not 0 <= sequence < self.num_sequences:
            raise IndexError(f"sequence {sequence} is not in 0 ... {self.num_sequences - 1}")
        return self._final_owners[sequence]

    # ---- the whole

    @cached_property
    def checkpoint_cu_starts(self) -> tuple[int, ...]:
        """[num_sequences + 1]: sequence i has global checkpoint rows starts[i] ... starts[i + 1], ascending."""
        if self.checkpoint_positions is not None:
            return tuple(accumulate(map(len, self.checkpoint_positions), initial=0))
        every = self.checkpoint_every_n_tokens
        return tuple(accumulate((length // every if every else 0 for length in self.seq_lens), initial=0))

    @property
    def num_checkpoints(self) -> int:
        return self.checkpoint_cu_starts[-1]

    @property
    def cp_chunk_lanes(self) -> int:
        """Lanes that divide a rank's CP chunks."""
        return self.lanes_per_rank if self.lanes_by == "cp_chunks" else 1

    @cached_property
    def head_groups(self) -> tuple[tuple[int, int], ...]:
        """State heads [start, stop) of each lane, where lanes divide heads; else one group of all."""
        count = min(self.lanes_per_rank, self.num_k_heads) if self.lanes_by == "heads" else 1
        each = self.num_state_heads // self.num_k_heads  # those that share a key head
        bounds = [i * self.num_k_heads // count * each for i in range(count + 1)]
        return tuple(pairwise(bounds))

    @cached_property
    def crosses_ranks(self) -> bool:
        """Some sequence has more than one segment, so a fixup exchanges something."""
        return not self.pieces.is_last.all()

    @cached_property
    def off_grid_cuts(self) -> tuple[int, ...]:
        """Global tokens at which ownership cuts a sequence off its grid of CP chunks, or of spans."""
        return tuple(self.pieces.stop[self.pieces.off_grid].tolist())

    @property
    def reproducible(self) -> bool:
        """Bitwise the results of any other world size, ownership on the grid, lanes and order-preserving fixup."""
        return not self.off_grid_cuts and self.fixup != "tree"

    @cached_property
    def digest(self) -> str:
        """sha256 over everything that changes results or schedule; ranks compare it before they exchange data."""
        parts = (
            PLAN_FORMAT,
            self.seq_lens,
            self.world_size,
            self.ownership if self.ownership == "zigzag" else tuple(map(tuple, self.runs)),
            (self.num_q_heads, self.num_k_heads, self.num_v_heads, self.head_dim),
            self.cp_chunk_len if self.first_cp_chunk_len == self.cp_chunk_len else self.grid[:],
            self.checkpoint_every_n_tokens,
            self.checkpoint_positions,
            *(() if self.opens else ("apart",)),
            self.fixup,
            *(() if self.fold_span == 1 else ("spans", self.fold_span)),
            self.finish,
            self.lanes_per_rank,
            *(("heads",) if self.cp_chunk_lanes < self.lanes_per_rank else ()),
            self.head_half_lives,
            self.forget_below,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @cached_property
    def stage_model(self) -> StageModel:
        """What stages 1, 2 and 4 take, by `profile`."""
        return self.stage_model_of(0, self.num_state_heads)

    def stage_model_of(self, start: int, stop: int) -> StageModel:
        """The same for state heads [start, stop) alone; heads that share a key head are together."""
        half_lives = self.head_half_lives
        return model_of(
            self.profile,
            self.opens,
            stop - start,
            (stop - start) * self.num_k_heads // self.num_state_heads,
            self.head_dim,
            None if half_lives is None else half_lives[start:stop],
            self.forget_below,
        )

    @cached_property
    def predicted(self) -> Mapping[str, tuple[float, ...]]:
        """Stage -> predicted seconds per rank, by `profile`."""
        return cost.predict(self, self.stage_model)

    @cached_property
    def rank_work(self) -> list[RankWork]:
        """Per rank, what predictions are made of."""
        return rank_work(self)

    @cached_property
    def total_seconds(self) -> dict[tuple[float, ...] | None, float]:
        """Of `cost.total_seconds`, as far as it was asked."""
        return {}

    @cached_property
    def fixup_seconds(self) -> Mapping[str, float]:
        """Fixup strategy -> predicted seconds; empty where nothing crosses ranks."""
        load = cost.load_of(self)
        return cost.fixup_seconds(self.profile, load) if load.num_hops else {}

    @cached_property
    def fixup_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank sends in the fixup."""
        return cost.fixup_bytes(self)

    def explain(self) -> str:
        """The plan in words and tables, for a person."""
        from gdncp.plan.explain import explain

        return explain(self)

    # ---- private

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in 0 ... {self.world_size - 1}")

    @cached_property
    def _rank_plans(self) -> dict[int, RankPlan]:
        return {}

    @cached_property
    def _token_ranges(self) -> dict[int, tuple[tuple[int, int], ...]]:
        return {}

    @cached_property
    def _final_owners(self) -> tuple[int, ...]:
        return tuple(self.pieces.rank[self.pieces.is_last].tolist())
