"""Our prefill bound to a case: planned calls on this rank's share of every input set, results preallocated."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import gdncp
from gdncp.backends import AffineMaps
from gdncp.bench.cases import Case, Tokens
from gdncp.bench.multi_gpu.presets import Preset
from gdncp.bench.multi_gpu.ranks import Ranks
from gdncp.collectives import FixupStats
from gdncp.collectives.peer_memory import VARIABLE

Parts = list[torch.Tensor]  # q, k, v, log alpha, beta of one rank


class Planned:
    """A plan over some of the ranks (all, or this one alone), and its calls."""

    group: dist.ProcessGroup | None = None  # of the calls; None: the default one
    _beside: torch.cuda.Stream | None = None

    def __init__(
        self, ranks: Ranks, case: Case, sets: Sequence[Tokens], preset: Preset, world_size: int, **choice: Any
    ):
        s = case.shape
        self.plan = gdncp.plan_prefill(
            case.seq_lens,
            world_size=world_size,
            num_q_heads=s.num_k_heads,
            num_k_heads=s.num_k_heads,
            num_v_heads=s.num_v_heads,
            head_dim=s.head_dim,
            profile=preset.profile,
            cp_chunk_len=preset.cp_chunk_len,
            **choice,
        )
        self.rank = ranks.rank if world_size > 1 else 0
        self._case, self._engine = case, preset.engine
        self._own = [share(t, self.plan.token_ranges(self.rank)) for t in sets]
        tokens, heads, dim = self.plan.num_tokens(self.rank), s.num_state_heads, s.head_dim
        self.output = torch.full((tokens, heads, dim), math.nan, dtype=case.dtype, device=case.device)
        self.states = torch.zeros(s.num_seqs, heads, dim, dim, device=case.device)

    @property
    def calls(self) -> list[Callable[[], Any]]:
        """One per input set."""
        return [partial(self._run, parts) for parts in self._own]

    @property
    def calls_without_exchange(self) -> list[Callable[[], Any]]:
        """Stages 1, 2 and 4 alone, without the exchange and the local fold: results are wrong, times are not."""
        return [partial(self._run_without_exchange, parts) for parts in self._own]

    @contextmanager
    def by_messages(self) -> Iterator[None]:
        """The calls, of which the first is to come inside, go over a group that has no mailboxes; all ranks enter."""
        self.group = dist.new_group()
        wish = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "0"  # asked for once a group
        try:
            yield
        finally:
            if wish is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = wish

    def stages(self) -> dict[str, float]:
        """Seconds per stage of one eager call of this rank."""
        return self._run(self._own[0], timed=True).timings

    def _arguments(self) -> dict[str, Any]:
        return {
            "scale": self._case.scale,
            "gate_space": "log",
            "output": self.output,
            "output_state": self.states,
            "backend": self._engine,
            "group": self.group,
        }

    def _run(self, parts: Parts, timed: bool = False) -> gdncp.PrefillResult:
        return gdncp.prefill(self.plan, *parts, timed=timed, **self._arguments())

    def _run_without_exchange(self, parts: Parts) -> gdncp.PrefillResult:
        summary = gdncp.summarise(self.plan, *parts, **self._arguments())
        heads, v_dim, k_dim = summary.call.state_shape
        maps = summary.maps or AffineMaps.empty(0, heads, k_dim, v_dim, parts[0].device)
        beside = None
        if self.plan.finish == "entry_late" and parts[0].is_cuda:  # what would wait for the exchange has its stream
            if self._beside is None:
                self._beside = torch.cuda.Stream(parts[0].device, priority=-1)
            beside = self._beside
            beside.wait_stream(torch.cuda.current_stream(parts[0].device))
        return gdncp.finish(gdncp.EntryStates(summary, FixupStats("local"), maps, beside))


def share(tokens: Tokens, ranges: Sequence[tuple[int, int]]) -> Parts:
    """A rank's rows; views where it holds one range, as it does of one sequence under contiguous ownership."""
    parts = (tokens.q, tokens.k, tokens.v, tokens.log_alpha, tokens.beta)
    if len(ranges) == 1:
        ((a, b),) = ranges
        return [x[a:b] for x in parts]
    return [torch.cat([x[a:b] for a, b in ranges] or [x[:0]]) for x in parts]


def half_lives(tokens: Tokens) -> list[float]:
    """Of each head, in tokens, from the mean of its log gates; infinite where it never forgets."""
    means = (-tokens.log_alpha.mean(0, dtype=torch.float64)).tolist()
    return [math.log(2) / mean if mean > 0 else math.inf for mean in means]
