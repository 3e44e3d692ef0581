"""`plan_prefill`: from lengths and heads to a plan.  Pure host code; every rank computes the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from gdncp.plan import checks, choose, compose, cost, layout
from gdncp.plan.balance import Balance
from gdncp.plan.columns import Runs, Segments, contiguous_runs, explicit_runs, no_collection, zigzag_runs
from gdncp.plan.grid_search import GridSearch
from gdncp.plan.known import known
from gdncp.plan.lanes import choose_lanes
from gdncp.plan.prefill_plan import PrefillPlan
from gdncp.plan.profiles import CostProfile, find_profile
from gdncp.plan.stage_model import StageModel, model_of

_MOST_COMPARED = 1024  # segments: to predict whole plans of more takes longer than a plan may


@known
@no_collection()
def plan_prefill(
    seq_lens: Sequence[int],
    *,
    world_size: int = 1,
    ownership: str | Sequence[Sequence[tuple[int, int]]] = "contiguous",
    num_q_heads: int,
    num_k_heads: int,
    num_v_heads: int,
    head_dim: int = 128,
    cp_chunk_len: int | None = None,
    first_cp_chunk_len: int | None = None,
    checkpoint_every_n_tokens: int = 0,
    checkpoint_positions: Sequence[Sequence[int]] | None = None,
    opens: bool | None = None,
    fixup: str = "auto",
    fold_span: int | None = None,
    finish: str = "auto",
    lanes_per_rank: int | None = 1,
    lanes_by: str = "cp_chunks",
    head_half_lives: Sequence[float] | None = None,
    forget_below: float | None = None,
    require_reproducible: bool = False,
    profile: str | CostProfile = "h200",
) -> PrefillPlan:
    """Plan a prefill of packed sequences over `world_size` ranks.  The last plans are kept, and given again.

    Args:
        seq_lens: tokens of each sequence; zeros are allowed.
        ownership: which tokens each rank holds. "contiguous" cuts the packed tokens in runs on the grid that take near
            equal times by `profile`, between sequences where that is as good, and cuts none in vain where the grid is
            the planner's (a rank may get no tokens); `plan.token_ranges(rank)` has them;
            "zigzag" gives rank r parts r and 2W−1−r of every sequence; or per rank a list of global half-open ranges,
            together a partition of all tokens (an empty list is a rank without tokens). Cuts off the grid are kept and
            clear `plan.reproducible`.
        num_q_heads, num_k_heads, num_v_heads: GQA (k = v, q a multiple) or GVA (q = k, v a multiple).
        cp_chunk_len: tokens of a CP chunk, a multiple of 64; None: chosen by predicted time.
        first_cp_chunk_len: for those who tune: tokens of each sequence's first CP chunk, which costs less than the
            others, where they are not to be `cp_chunk_len`, which must be given too. Where None is given for both, the
            planner chooses it as well, on several ranks for contiguous ownership of few sequences.
        checkpoint_every_n_tokens: a state checkpoint after every n-th token of a sequence; a multiple of 64, 0: none.
        checkpoint_positions: instead, per sequence the strictly ascending numbers of tokens after which to take one.
        opens: for those who tune: whether stage 2's launch also runs stage 4 of sequences' first CP chunks, on backends
            that can. That saves the scan of their N, and costs where gates forget, as that scan is then short. It
            decides about the bits of states. None: True, or what is faster where the CP chunk length is chosen.
        fixup: "chain", "all_gather", "head_sharded", "tree", or "auto": the cheapest by the cost model, "tree" only
            where it is so by a tenth. Where no sequence crosses ranks it is "local".
        fold_span: the maps of so many CP chunks, counted from a sequence's start, are composed to one before a fixup
            folds along the sequence, and ownership is cut there. It decides about the bits of states, as a function of
            the grid alone. 1: none are. None: 1, or what is faster by 4 % where the CP chunk length is chosen and need
            not be reproducible; like that it may then depend on the world size.
        finish: whether stage 4 waits for the exchange as a whole: "entry_first"; or, "entry_late", only where an entry
            state depends on it, head by head, while the rest runs beside it.  Same bits where states are finite: one
            that is not makes NaN of every state after it under "entry_first" (0 · ∞ is NaN), and under "entry_late" not
            of those in another rank's CP chunks that lie behind one there which forgot what entered it
            (`forget_below`).  "auto": by predicted time.  Where no sequence crosses ranks it is "entry_first".
        lanes_per_rank: CUDA streams (or in-process lanes) to divide a rank's work among. Never
            changes the bits of a given CP chunk length; one that is chosen may depend on it. None: one, or two of heads
            where they are simulated to be 3 % faster, as an exchange is hidden; `plan.explain()` says why. A plan with
            two runs by `prefill`, not by its parts.
        lanes_by: what lanes divide: "cp_chunks", or "heads": each lane does all of a group of heads, so that one
            group's exchange runs beside another's scans. Heads that share a key head stay together.
        head_half_lives: tokens in which each state head's gates halve a state, as far as the host knows. None: times
            are predicted as if no head forgot, and what is chosen is least far behind the best for that and for
            half-lives from 4 to 16384 tokens.
        forget_below: the bound below which what entered a CP chunk counts as forgotten; None: by dtype; 0: never.
        require_reproducible: "tree", which associates maps by rank, is refused and "auto" leaves it out, and a CP chunk
            length that is chosen depends neither on the world size (explicit ownership apart) nor on lanes.
        profile: costs by which to choose and predict: the name of one in `gdncp.plan.PROFILES`, a path to a .json file
            as `python -m gdncp.calibrate` writes it, or your own.  No device is asked: on CPUs say "cpu".

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    lengths = checks.sequence_lengths(seq_lens)
    world_size = checks.integer("world_size", world_size, 1, "a positive int")
    heads = checks.head_counts(num_q_heads, num_k_heads, num_v_heads)
    head_dim = checks.integer("head_dim", head_dim, 1, "a positive int")
    lanes = 1
    if lanes_per_rank is not None:
        lanes = checks.integer("lanes_per_rank", lanes_per_rank, 1, "a positive int or None")
    checks.word("lanes_by", lanes_by, checks.LANES_BY)
    every = checks.checkpoint_interval(checkpoint_every_n_tokens)
    if checkpoint_positions is not None:
        checkpoint_positions = checks.checkpoint_positions(checkpoint_positions, lengths, every)
    checks.word("fixup", fixup, ("auto", *checks.FIXUPS))
    checks.word("finish", finish, ("auto", *checks.FINISHES))
    if require_reproducible and fixup == "tree":
        raise ValueError("fixup must not be 'tree' where require_reproducible is given: it associates maps by rank")
    if head_half_lives is not None:
        head_half_lives = checks.half_lives(head_half_lives, max(heads))
    if forget_below is not None:
        forget_below = checks.forget_bound(forget_below)
    if fold_span is not None:
        fold_span = checks.integer("fold_span", fold_span, 1, "a positive int or None")
    if opens is not None and not isinstance(opens, bool):
        raise ValueError(f"opens must be True, False or None, got {opens!r}")
    profile = find_profile(profile)
    if isinstance(ownership, str):
        checks.word("ownership", ownership, checks.OWNERSHIPS, " or [[(start, stop), ...] per rank]")
    else:
        ownership = checks.token_ranges(ownership, sum(lengths), world_size)

    seq_starts = layout.sequence_starts(lengths)
    is_free = cp_chunk_len is None and not require_reproducible and isinstance(ownership, str)
    given_span = fold_span or 1
    gates: list[Sequence[float] | None] = [head_half_lives]  # that the layer may have
    if head_half_lives is None and forget_below != 0:
        gates.append(choose.typical_half_lives(max(heads)))

    def model(opens: bool, half_lives: Sequence[float] | None) -> StageModel:
        given = None if half_lives is None else tuple(half_lives)
        return model_of(profile, opens, max(heads), heads[1], head_dim, given, forget_below)

    def own(grid: layout.Grid, spans: layout.Grid, requested: int | None, opens: bool) -> Runs:
        if ownership == "contiguous":
            # whether an exchange pays is asked where the grid is ours to choose; else ranks share what was asked for
            crossing = None if requested else choose.crossing_seconds(profile, fixup, require_reproducible)
            cuts = Balance(seq_starts, world_size, grid, model(opens, head_half_lives), crossing, spans).cuts()
            return contiguous_runs(cuts)
        if ownership == "zigzag":
            return zigzag_runs(seq_starts, world_size, spans)
        assert not isinstance(ownership, str)
        return explicit_runs(ownership)

    @cache
    def on_grid(grid: layout.Grid, requested: int | None, opens: bool, fold_span: int) -> PrefillPlan:
        spans = grid.span(fold_span)
        runs = own(grid, spans, requested, opens)
        pieces = Segments.build(seq_starts, runs, world_size, grid, spans)
        if pieces.is_last.all():
            resolved = "local"
        elif fixup == "auto":
            load = cost.fixup_load(pieces, world_size, max(heads), head_dim, fold_span)
            load = load._replace(by_mail=lanes == 1 or lanes_by != "heads")
            resolved = choose.choose_fixup(load, profile, require_reproducible)
        else:
            resolved = fixup
        return PrefillPlan(
            seq_lens=lengths,
            world_size=world_size,
            ownership=ownership if isinstance(ownership, str) else "explicit",
            num_q_heads=heads[0],
            num_k_heads=heads[1],
            num_v_heads=heads[2],
            head_dim=head_dim,
            cp_chunk_len=grid.length,
            cp_chunk_len_requested=requested,
            first_cp_chunk_len=grid.first,
            checkpoint_every_n_tokens=every,
            checkpoint_positions=checkpoint_positions,
            opens=opens,
            fixup=resolved,
            fixup_requested=fixup,
            fold_span=fold_span,
            finish="entry_first",
            finish_requested=finish,
            lanes_per_rank=lanes,
            lanes_by=lanes_by,
            head_half_lives=head_half_lives,
            forget_below=forget_below,
            require_reproducible=bool(require_reproducible),
            profile=profile,
            runs=runs,
            pieces=pieces,
        )

    def with_late(plan: PrefillPlan) -> PrefillPlan:
        late = replace(plan, finish="entry_late")
        if fixup != "auto" or not plan.crosses_ranks:
            return late
        return replace(late, fixup=choose.choose_fixup(cost.load_of(late), profile, require_reproducible))

    def finished(plan: PrefillPlan) -> PrefillPlan:
        if finish == "entry_first" or not plan.crosses_ranks:
            return plan
        late = with_late(plan)
        if finish == "entry_late":
            return late
        # of many sequences a rank few are in the exchange; and on one worker nothing runs beside it
        if profile.workers == 1 or world_size <= len(lengths) / 2:
            return plan
        if choose.leaves_workers(late):
            plan = choose.choose_plan(plan, [late], gates)
        if is_free:
            for length in choose.finer(late):  # less waits for the exchange
                late = on_grid(layout.Grid(length, length), None, plan.opens, given_span)
                if choose.leaves_workers(late):
                    plan = choose.choose_plan(plan, [with_late(late)], gates)
        return plan

    def with_lanes(plan: PrefillPlan) -> PrefillPlan:
        if lanes_per_rank is not None:
            return plan

        def finer() -> PrefillPlan | None:
            grid = layout.Grid(*(choose.half(length) for length in plan.grid))
            if not is_free or min(grid) < choose.LEAST:
                return None
            return replace(on_grid(grid, None, plan.opens, plan.fold_span), finish=plan.finish)

        return choose_lanes(plan, finer, gates)

    if cp_chunk_len is not None:
        length = checks.cp_chunk_len(cp_chunk_len)
        first = length if first_cp_chunk_len is None else first_cp_chunk_len
        grid = layout.Grid(checks.cp_chunk_len(first, "first_cp_chunk_len"), length)
        return with_lanes(finished(on_grid(grid, length, opens is not False, given_span)))
    if first_cp_chunk_len is not None:
        raise ValueError(f"first_cp_chunk_len must be None where cp_chunk_len is, got {first_cp_chunk_len!r}")

    if not any(lengths):
        grid = layout.Grid(checks.CHUNK, checks.CHUNK)
        return with_lanes(finished(on_grid(grid, None, opens is not False, given_span)))

    search = GridSearch(
        lengths,
        world_size,
        ownership,
        model(True, head_half_lives),
        lanes_per_rank=lanes if lanes_by == "cp_chunks" else 1,
        fixup=fixup,
        require_reproducible=require_reproducible,
    )

    def fastest(grids: Sequence[layout.Grid], opens: bool) -> PrefillPlan:
        plan, *others = (on_grid(grid, None, opens, given_span) for grid in grids)
        is_whole = plan.grid.count(max(lengths)) == 1
        return choose.choose_plan(plan, others, gates, choose.GAIN if is_whole else 0.0)

    def chosen(opens: bool) -> PrefillPlan:
        models = [model(opens, half_lives) for half_lives in gates]
        plan = fastest(search.best(models), opens)
        if is_free and fold_span is None and len(plan.pieces) <= _MOST_COMPARED and compose.may_compose(plan):
            for grid in dict.fromkeys((plan.grid, search.best(models, spans=True)[0])):
                plan = compose.choose_span(plan, partial(on_grid, grid, None, opens), gates)
        return plan

    if opens is not None:
        return with_lanes(finished(chosen(opens)))
    plan = chosen(True)
    if profile.opens and not require_reproducible and _may_not_open(lengths, world_size, ownership, head_half_lives):
        # where every head forgets at once, as in a fresh layer, an opening rank keeps the others waiting longest
        fresh = [] if len(gates) == 1 else [choose.fresh_half_lives(max(heads))]
        plan = choose.choose_plan(plan, [chosen(False)], [*gates, *fresh], _GAIN_OF_NOT_OPENING)
    return with_lanes(finished(plan))


_GAIN_OF_NOT_OPENING = 0.01  # for which sequences are not opened
_MANY = 256  # sequences of a zigzag plan, of more of which two whole plans take long to predict


def _may_not_open(
    lengths: Sequence[int], world_size: int, ownership: object, head_half_lives: Sequence[float] | None
) -> bool:
    """Whether it can be better not to open sequences: where the host knows that gates forget, or where the rank that
    holds a sequence's start keeps the others waiting.  Of many sequences every rank opens some, but for zigzag."""
    few = world_size > len(lengths) / 2 or (ownership == "zigzag" and len(lengths) <= _MANY)
    return any(lengths) and (head_half_lives is not None or (world_size > 1 and few))
