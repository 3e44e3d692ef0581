"""Fixup by a chain: the state alone travels, from rank to rank along each sequence, in blocks of V rows.

Each rank folds a block through its own CP chunks and hands it on; block b + 1 is folded while block b is under way to
the next rank.  Volume: one state per hop.  Time: hops + blocks − 1 rounds.

Where the fold takes whole runs in one launch (`RunFold`), states travel whole: a launch costs more than a block.  Where
it sends them itself (`MailFold`) and the ranks can (`peer_memory`), nothing is between the launches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from gdncp.backends.base import AffineMaps, Fold, FoldRuns, MailFold, RunFold, folds_by_mail
from gdncp.backends.base import folds_runs as takes_runs
from gdncp.collectives import peer_memory
from gdncp.collectives.folding import Run, fold_inside, fold_runs, own_steps
from gdncp.collectives.peer_memory import Mailboxes
from gdncp.collectives.schedule import Link, chain_rounds, links_to_fill, message_numbers, own_links
from gdncp.collectives.wire import Wire
from gdncp.plan import PrefillPlan
from gdncp.work import upload

# A block is at least this large: below, a message costs its latency and splitting only adds rounds.
MIN_BLOCK_BYTES = 1 << 20


def row_blocks(v_dim: int, bytes_per_row: int, block_rows: int, min_block_bytes: int) -> list[slice]:
    """V rows cut at multiples of the fold's `block_rows`, so that blocks have the bits of the whole."""
    rows = block_rows * max(1, -(-min_block_bytes // (bytes_per_row * block_rows)))
    return [slice(start, min(start + rows, v_dim)) for start in range(0, v_dim, rows)]


def run(wire: Wire, plan: PrefillPlan, rank: int, maps: AffineMaps, entry_states: torch.Tensor, fold: Fold) -> None:
    if folds_by_mail(fold):
        boxes = mailboxes_for(plan, wire.group, entry_states.device, entry_states.shape[1:])
        if boxes is not None:
            _run_by_mail(wire, plan, rank, maps, entry_states, fold, boxes)
            return
    if takes_runs(fold):
        _run_whole_states(wire, rounds_on(plan, rank, entry_states.device), maps, entry_states, fold)
        return
    _, num_heads, v_dim, k_dim = entry_states.shape
    blocks = row_blocks(v_dim, num_heads * k_dim * 4, fold.block_rows, MIN_BLOCK_BYTES)

    def new_block(block: int) -> torch.Tensor:
        return entry_states.new_empty(num_heads, blocks[block].stop - blocks[block].start, k_dim)

    wire.open_point_to_point()
    to_fill = links_to_fill(plan, rank)
    arrived: dict[tuple[Link, int], torch.Tensor] = {}
    for folds, receives in chain_rounds(plan, rank, len(blocks)):
        sends, runs = [], []
        for link, block in folds:
            exit_state = new_block(block)
            assert link.next_rank is not None
            sends.append((link.next_rank, exit_state))
            entry_state = None if link.starts else arrived.pop((link, block))
            steps = own_steps(link, maps, entry_states, blocks[block], exit_state, fill=link in to_fill)
            runs.append(Run(entry_state, steps))
        fold_runs(runs, fold)

        landing = []
        for link, block in receives:
            arrived[link, block] = new_block(block)
            assert link.previous_rank is not None
            landing.append((link.previous_rank, arrived[link, block]))
        wire.exchange(sends, landing).wait()
        for link, block in receives:
            entry_states[link.item][:, blocks[block]].copy_(arrived[link, block])
    # links that hand nothing on were in no round; they now have their entry states
    fold_inside((link for link in to_fill if link.next_rank is None), maps, entry_states, fold)
    wire.finish()


class Round(NamedTuple):
    """What one rank does in one round, by rows on its device: fold runs, then send and receive whole states."""

    runs: FoldRuns | None
    num_exits: int
    sends: tuple[tuple[int, int], ...]  # (peer, row of the exits)
    receives: tuple[tuple[int, int], ...]  # (peer, row of the entry states)


@lru_cache(256)  # plans are compared by their digest
def rounds_on(plan: PrefillPlan, rank: int, device: torch.device) -> tuple[Round, ...]:
    """The rank's rounds where states travel whole; copied to the device once, without waiting for it."""
    to_fill = frozenset(links_to_fill(plan, rank))
    staying = [link for link in links_to_fill(plan, rank) if link.next_rank is None and link.num_maps]
    rounds = [
        _round(device, [link for link, _ in folds], to_fill, receives)
        for folds, receives in chain_rounds(plan, rank, 1)
    ]
    return (*rounds, _round(device, staying, to_fill, ()))


def _round(
    device: torch.device,
    folds: Sequence[Link],
    to_fill: frozenset[Link],
    receives: Sequence[tuple[Link, int]],
) -> Round:
    leaving = {link: row for row, link in enumerate(link for link in folds if link.next_rank is not None)}
    columns = {
        "entry_row": [link.item for link in folds],
        "map_row": [link.row for link in folds],
        "num_steps": [link.num_maps for link in folds],
        "starts": [int(link.starts) for link in folds],
        "num_fills": [(link in to_fill) * (link.num_maps - (link in leaving)) for link in folds],
        "exit_row": [leaving.get(link, -1) for link in folds],
    }
    runs = FoldRuns(num_runs=len(folds), **upload(columns, device)) if folds else None
    sends = [(link.next_rank, row) for link, row in leaving.items()]
    landings = [(link.previous_rank, link.item) for link, _ in receives]
    return Round(runs, len(leaving), tuple(sends), tuple(landings))  # type: ignore[arg-type]  # None: not among them


def _run_whole_states(
    wire: Wire, rounds: Sequence[Round], maps: AffineMaps, entry_states: torch.Tensor, fold: RunFold
) -> None:
    wire.open_point_to_point()
    for runs, num_exits, sends, receives in rounds:
        exits = entry_states.new_empty(num_exits, *entry_states.shape[1:])
        if runs is not None:
            fold.fold_runs(maps, entry_states, runs, exits)
        if sends or receives:
            outgoing = [(peer, exits[row]) for peer, row in sends]
            wire.exchange(outgoing, [(peer, entry_states[row]) for peer, row in receives]).wait()
    wire.finish()


# ---- by mail


def mailboxes_for(
    plan: PrefillPlan, group: dist.ProcessGroup, device: torch.device, shape: Sequence[int]
) -> Mailboxes | None:
    """For states of a shape [H, V, K]; None: they travel by messages.  All ranks call it, see `peer_memory`."""
    num_channels = peer_memory.channels_of(plan, shape[0], shape[1])
    return peer_memory.mailboxes_of(group, device, num_channels) if num_channels else None


def mail_links(plan: PrefillPlan, rank: int) -> tuple[tuple[Link, ...], ...]:
    """What the rank folds in each launch where states travel by mail: its rounds, and then what stays.

    What a launch receives was sent in a round before, so none of its programs waits for another of them.
    """
    rounds = [tuple(link for link, _ in folds) for folds, _ in chain_rounds(plan, rank, 1)]
    staying = [link for link in own_links(plan, rank) if link.next_rank is None and (link.num_maps or not link.starts)]
    return tuple(links for links in (*rounds, tuple(staying)) if links)


@lru_cache(256)
def mail_on(plan: PrefillPlan, rank: int, device: torch.device) -> tuple[FoldRuns, ...]:
    """The rank's launches by mail; copied to the device once, without waiting for it."""
    sent = message_numbers(plan)
    received = {(link.sequence, link.depth + 1): number for link, number in sent.items()}
    launches = []
    for links in mail_links(plan, rank):
        columns = {
            "entry_row": [link.item for link in links],
            "map_row": [link.row for link in links],
            "num_steps": [link.num_maps for link in links],
            "starts": [int(link.starts) for link in links],
            "num_fills": [link.num_maps - (link in sent) for link in links],
            "source": [-1 if link.previous_rank is None else link.previous_rank for link in links],
            "source_message": [received.get((link.sequence, link.depth), 0) for link in links],
            "target": [-1 if link.next_rank is None else link.next_rank for link in links],
            "target_message": [sent.get(link, 0) for link in links],
        }
        launches.append(FoldRuns(num_runs=len(links), **upload(columns, device)))
    return tuple(launches)


def count_mail(plan: PrefillPlan, rank: int, state_bytes: int) -> tuple[list[int], list[int]]:
    """Bytes of each message that the rank sends, and receives, by mail; what it leaves for itself is none."""
    links = own_links(plan, rank)
    return (
        [state_bytes for link in links if link.next_rank not in (None, rank)],
        [state_bytes for link in links if link.previous_rank not in (None, rank)],
    )


def _run_by_mail(
    wire: Wire,
    plan: PrefillPlan,
    rank: int,
    maps: AffineMaps,
    entry_states: torch.Tensor,
    fold: MailFold,
    boxes: Mailboxes,
) -> None:
    for runs in mail_on(plan, rank, entry_states.device):
        fold.fold_runs_by_mail(maps, entry_states, runs, boxes)
    wire.count(*count_mail(plan, rank, 4 * math.prod(entry_states.shape[1:])))
    wire.transport = peer_memory.NAME
