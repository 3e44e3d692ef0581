"""A plan in words and tables, for a person."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from gdncp.plan import cost

if TYPE_CHECKING:
    from gdncp.plan.prefill_plan import PrefillPlan

_WIDTH = 98  # columns; of the table too, unless its numbers are very long
_MAX_RANKS = 16  # rows of the table of ranks; of more ranks, the first and the last ones

Row = tuple[str, ...]


def explain(plan: PrefillPlan) -> str:
    """What a plan does and why, in two tables: the whole, then one row a rank.  Plain text, no trailing newline."""
    facts = (
        ("batch", _batch(plan)),
        ("layer", _layer(plan)),
        ("ranks", _ranks(plan)),
        ("lanes", _lanes(plan)),
        ("CP chunks", _cp_chunks(plan)),
        ("crossing", _crossing(plan)),
        ("fixup", _fixup(plan)),
        ("finish", _finish(plan)),
        ("checkpoints", _checkpoints(plan)),
        ("forgetting", _forgetting(plan)),
        ("bits", _bits(plan)),
        ("predicted", _predicted(plan)),
    )
    lines = [f"prefill plan {plan.digest[:12]}"]
    for name, text in facts:
        lines += wrap(text, _WIDTH, initial_indent=f"  {name:<12} ", subsequent_indent=" " * 15, break_on_hyphens=False)
    return "\n".join([*lines, "", *_table(plan)])


def _batch(plan: PrefillPlan) -> str:
    text = f"{_count(plan.num_sequences, 'sequence')}, {_count(plan.num_tokens_total, 'token')}"
    if plan.num_sequences > 1:
        text += f" (from {min(plan.seq_lens):,} to {max(plan.seq_lens):,} a sequence)"
    return text


def _layer(plan: PrefillPlan) -> str:
    heads = f"{plan.num_q_heads} q, {plan.num_k_heads} k and {plan.num_v_heads} v heads of {plan.head_dim}"
    return f"{heads}; {_count(plan.num_state_heads, 'state head')}, {_bytes(_state_bytes(plan))} a state"


def _ranks(plan: PrefillPlan) -> str:
    lanes = f", {plan.lanes_per_rank} lanes each" if plan.lanes_per_rank > 1 else ""
    if plan.lanes_by == "heads" and lanes:
        heads = ", ".join(f"{start} to {stop - 1}" for start, stop in plan.head_groups)
        lanes = f", {_count(len(plan.head_groups), 'lane')} each of heads {heads}"
    idle = sum(not plan.num_tokens(rank) for rank in range(plan.world_size))
    without = f", {idle} of them without tokens" if idle else ""
    return f"{plan.world_size}, {plan.ownership} ownership{lanes}{without}"


def _lanes(plan: PrefillPlan) -> str:
    return plan.lanes_reason or f"{plan.lanes_per_rank}, as asked"


def _cp_chunks(plan: PrefillPlan) -> str:
    how = "as asked" if plan.cp_chunk_len_requested else "chosen by predicted time"
    first = f", a sequence's first of {plan.first_cp_chunk_len:,}" if len(set(plan.grid)) > 1 else ""
    apart = "" if plan.opens else "; first ones get their outputs in stage 4, like the others"
    return f"{plan.num_cp_chunks:,} of up to {plan.cp_chunk_len:,} tokens{first} ({how}){apart}"


def _crossing(plan: PrefillPlan) -> str:
    if not plan.crosses_ranks:
        return "no sequence crosses ranks: no collective is issued"
    handed_on = [segment for segment in plan.segments if segment.next is not None]
    sequences = len({segment.sequence for segment in handed_on})
    return f"{sequences:,} of {_count(plan.num_sequences, 'sequence')}, in {_count(len(handed_on), 'place')}"


def _fixup(plan: PrefillPlan) -> str:
    if not plan.crosses_ranks:
        asked = "" if plan.fixup_requested == "auto" else f" ({plan.fixup_requested} was asked for)"
        spans = f", {_spans(plan)}" if plan.fold_span > 1 else ""
        return f"{plan.fixup}: each rank folds its own{spans}{asked}"
    seconds = sorted(plan.fixup_seconds.items(), key=lambda pair: pair[1])
    guesses = ", ".join(f"{strategy} {_seconds(value)}" for strategy, value in seconds)
    why = "as asked" if plan.fixup_requested != "auto" else "the cheapest"
    if plan.fixup_requested == "auto" and (plan.require_reproducible or plan.fixup != seconds[0][0]):
        why = "the cheapest that is reproducible"
    spans = f" {_spans(plan)}" if plan.fold_span > 1 else ""
    return f"{plan.fixup}{spans}, {why} ({guesses}); {_bytes(sum(plan.fixup_bytes))} sent in all"


def _spans(plan: PrefillPlan) -> str:
    return f"over spans of {plan.fold_span} CP chunks (predicted one by one: {_seconds(cost.flat_seconds(plan))})"


def _finish(plan: PrefillPlan) -> str:
    what = "stage 4 follows the fixup"
    if plan.finish == "entry_late":
        what = "stage 4 waits for the exchange only where an entry state depends on it"
    asked = {"auto": "", plan.finish: " (as asked)"}.get(
        plan.finish_requested, f" ({plan.finish_requested} was asked for)"
    )
    return f"{plan.finish}: {what}{asked}"


def _checkpoints(plan: PrefillPlan) -> str:
    if plan.checkpoint_positions is not None:
        return f"{_count(plan.num_checkpoints, 'state')} after the positions given"
    if not plan.checkpoint_every_n_tokens:
        return "none"
    return f"{_count(plan.num_checkpoints, 'state')}, one after every {plan.checkpoint_every_n_tokens:,} tokens"


def _forgetting(plan: PrefillPlan) -> str:
    if plan.forget_below == 0:
        return "off"
    bound = "the dtype's bound" if plan.forget_below is None else f"below {plan.forget_below:g}"
    if plan.head_half_lives is None:
        return f"{bound}; times are predicted as if no head forgot"
    low, high = min(plan.head_half_lives), max(plan.head_half_lives)
    return f"{bound}; planned for half-lives from {low:.4g} to {high:.4g} tokens"


def _bits(plan: PrefillPlan) -> str:
    if plan.reproducible:
        grid = "the grid" if plan.fold_span == 1 else "the grid of spans"
        return f"reproducible: the same for any world size, ownership on {grid}, lanes and order-preserving fixup"
    reasons = []
    if plan.off_grid_cuts:
        cuts = ", ".join(f"{token:,}" for token in plan.off_grid_cuts[:4])
        more = ", ..." if len(plan.off_grid_cuts) > 4 else ""
        what = "CP chunks" if plan.fold_span == 1 else f"spans of {plan.fold_span} CP chunks"
        reasons.append(f"ownership cuts {what} at {'tokens' if more or ',' in cuts else 'token'} {cuts}{more}")
    if plan.fixup == "tree":
        reasons.append("tree associates maps by rank")
    return f"not reproducible: {'; '.join(reasons)}"


def _predicted(plan: PrefillPlan) -> str:
    totals = [sum(stages) for stages in zip(*plan.predicted.values(), strict=True)]
    text = _seconds(max(totals))
    if plan.world_size > 1:
        text += f" on the slowest rank, {_seconds(sum(totals) / len(totals))} on average"
    slowest = totals.index(max(totals))
    stages = ", ".join(f"{stage} {_seconds(of_rank[slowest])}" for stage, of_rank in plan.predicted.items())
    return f"{text} (costs of {plan.profile.name}): {stages}"


def _table(plan: PrefillPlan) -> list[str]:
    head = (
        "rank",
        "tokens",
        "CP chunks",
        "maps",
        "finals",
        "checkpoints",
        "sent",
        "predicted",
        "holds",
    )
    rows = [_rank_row(plan, rank) for rank in _shown(plan.world_size)]
    if plan.world_size > _MAX_RANKS:
        rows.insert(
            _MAX_RANKS - 2, ("...", *[""] * (len(head) - 2), f"({plan.world_size - len(rows):,} ranks left out)")
        )
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [_line(row, widths) for row in (head, *rows)]


def _shown(world_size: int) -> list[int]:
    if world_size <= _MAX_RANKS:
        return list(range(world_size))
    return [*range(_MAX_RANKS - 2), world_size - 1]


def _rank_row(plan: PrefillPlan, rank: int) -> Row:
    share = plan.rank_plan(rank)
    seconds = sum(of_rank[rank] for of_rank in plan.predicted.values())
    counts = (
        share.num_tokens,
        len(share.items),
        share.num_maps,
        len(share.final_sequences),
        len(share.checkpoints),
    )
    counted = map("{:,}".format, counts)
    return (str(rank), *counted, _bytes(plan.fixup_bytes[rank]), _seconds(seconds), _holds(plan, rank))


def _holds(plan: PrefillPlan, rank: int) -> str:
    ranges = plan.token_ranges(rank)
    shown = " ".join(f"[{start}, {stop})" for start, stop in ranges[:1])
    return f"{shown} and {len(ranges) - 1:,} more" if len(ranges) > 1 else shown or "nothing"


def _line(row: Row, widths: Sequence[int]) -> str:
    numbers = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
    return "  " + "  ".join([*numbers, row[-1]])


def _state_bytes(plan: PrefillPlan) -> int:
    return plan.num_state_heads * plan.head_dim**2 * 4


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _seconds(value: float) -> str:
    if not value:
        return "-"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 0.9995 or unit == "µs":
            break
    return f"{_three_digits(value * factor)} {unit}"


def _bytes(value: int) -> str:
    if not value:
        return "-"
    power = min((value.bit_length() - 1) // 10, 4)
    if not power:
        return f"{value} B"
    return f"{_three_digits(value / 1024**power)} {'_KMGT'[power]}iB"


def _three_digits(value: float) -> str:
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
