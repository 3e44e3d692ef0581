"""What stage 4 takes beside the exchange (`finish="entry_late"`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from gdncp.plan.stage_model import Kind, StageModel

EXCHANGE_WORKERS = 4  # that a message takes: one of NCCL ran beside 128 programs on the 132 SMs of an H200


class Run(NamedTuple):
    """A segment's CP chunks."""

    starts: bool  # its sequence
    kinds: tuple[tuple[Kind, int], ...]  # in order, the first by itself


def prefill_beside(model: StageModel, runs: Iterable[Run], cp_chunk_len: int, exchange: float) -> float:
    """Seconds of a rank's stage 4, of an exchange of so many seconds too; 0: the rank takes no part in it.

    A head is taken to forget where it does so within a whole CP chunk.
    """
    early: Counter[Kind] = Counter()  # pairs of CP chunk and head
    late: Counter[Kind] = Counter()
    forget = model.forgetting_heads(cp_chunk_len)
    for starts, kinds in runs:
        for i, (kind, count) in enumerate(kinds):
            known = model.num_heads if starts else forget if i else 0
            early[kind] += count * known
            late[kind] += count * (model.num_heads - known)
    return model.prefill_beside(early, late, exchange)
