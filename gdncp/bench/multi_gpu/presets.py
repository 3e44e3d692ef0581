"""What a run covers: on H200s, or small enough for a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gdncp.bench.cases import Shape

GATES = ("layer", "forget", "one")  # kinds of `gdncp.bench.cases`, in the order of targets and tables


@dataclass(frozen=True)
class Preset:
    check_sets: tuple[tuple[str, torch.dtype, int], ...]  # (backend, dtype, head dim) of the small numeric cases
    num_small_cases: int | None  # None: all
    large_check: tuple[int, int]  # tokens and CP chunk length of the one long case, with the first heads
    engine: str  # the backend that is timed
    dtype: torch.dtype
    head_dim: int
    profile: str  # of the plans
    cp_chunk_len: int | None  # of what is timed; None: the planner's choice
    heads: tuple[tuple[int, int], ...]  # (q and k, v); the first is the one with targets
    lengths: tuple[int, ...]  # tokens of the one sequence
    detailed: tuple[int, ...]  # lengths at which every fixup and finish is timed, with the first heads
    weak_tokens: int  # per rank
    trace_tokens: int
    min_iterations: int
    link_bytes: tuple[int, ...]  # per rank
    prepare_tokens: int  # of peers' first calls, which compile

    @property
    def shapes(self) -> list[Shape]:
        """Every length with every heads; the longest last, since what goes wrong with memory goes wrong there."""
        *shorter, longest = self.lengths
        pairs = [(tokens, heads) for heads in self.heads for tokens in shorter]
        pairs += [(longest, heads) for heads in self.heads]
        return [Shape(tokens, 1, *heads, self.head_dim) for tokens, heads in pairs]

    def only(self, heads: Sequence[str] | None, max_tokens: int | None) -> Preset:
        """Of what is timed, these heads, as "16/32", and no longer sequence.  ValueError if nothing is left."""
        kept = tuple(pair for pair in self.heads if heads is None or "/".join(map(str, pair)) in heads)
        lengths = tuple(n for n in self.lengths if max_tokens is None or n <= max_tokens)
        if not kept or not lengths:
            raise ValueError(f"heads and max_tokens must leave some of {self.heads} and of {self.lengths}")
        return replace(self, heads=kept, lengths=lengths)


PRESETS = {
    "h200": Preset(
        check_sets=(("hopper", torch.bfloat16, 128), ("triton", torch.float32, 64)),
        num_small_cases=None,
        large_check=(262144, 4096),
        engine="hopper",
        dtype=torch.bfloat16,
        head_dim=128,
        profile="h200",
        cp_chunk_len=None,
        heads=((16, 32), (4, 8)),
        lengths=(32768, 131072, 524288, 1048576),
        detailed=(32768, 131072),
        weak_tokens=65536,
        trace_tokens=131072,
        min_iterations=20,
        link_bytes=tuple(4096 * 4**i for i in range(8)),
        prepare_tokens=16384,
    ),
    "tiny": Preset(
        check_sets=(("torch", torch.float32, 32),),
        num_small_cases=2,
        large_check=(1024, 128),
        engine="torch",
        dtype=torch.float32,
        head_dim=32,
        profile="cpu",
        cp_chunk_len=64,  # left to itself the planner would split nothing so short
        heads=((1, 2),),
        lengths=(256,),
        detailed=(256,),
        weak_tokens=128,
        trace_tokens=256,
        min_iterations=3,
        link_bytes=(4096, 65536),
        prepare_tokens=256,
    ),
}
