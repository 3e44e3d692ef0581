"""Arguments of `plan_prefill`: what is refused, and normal forms of what is not."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from gdncp.plan.layout import TokenRanges

CHUNK = 64  # tokens in a chunk, the kernel tile
MOST_TOKENS = 1 << 60  # positions are int64

OWNERSHIPS = ("contiguous", "zigzag")
FIXUPS = ("chain", "all_gather", "head_sharded", "tree")
FINISHES = ("entry_first", "entry_late")
LANES_BY = ("cp_chunks", "heads")


def integer(name: str, value: Any, low: int, allowed: str) -> int:
    """`value` as an int of at least `low`; bools and floats are refused."""
    if type(value) is int:
        number = value
    else:
        try:
            if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            raise ValueError(f"{name} must be {allowed}, got {value!r}") from None
    if number < low:
        raise ValueError(f"{name} must be {allowed}, got {number}")
    return number


def sequence_lengths(seq_lens: Iterable[Any]) -> tuple[int, ...]:
    if isinstance(seq_lens, (str, bytes)) or not isinstance(seq_lens, Iterable):
        raise ValueError(f"seq_lens must be a sequence of non-negative ints, got {seq_lens!r}")
    lengths = tuple(seq_lens)
    if not lengths:
        raise ValueError("seq_lens must name at least one sequence, got none")
    if not all(type(n) is int and n >= 0 for n in lengths):
        lengths = tuple(integer(f"seq_lens[{i}]", n, 0, "a non-negative int") for i, n in enumerate(lengths))
    if sum(lengths) > MOST_TOKENS:
        raise ValueError(f"seq_lens must have at most {MOST_TOKENS} tokens in all, got {sum(lengths)}")
    return lengths


def head_counts(num_q_heads: Any, num_k_heads: Any, num_v_heads: Any) -> tuple[int, int, int]:
    q = integer("num_q_heads", num_q_heads, 1, "a positive int")
    k = integer("num_k_heads", num_k_heads, 1, "a positive int")
    v = integer("num_v_heads", num_v_heads, 1, "a positive int")
    grouped_query = k == v and q % k == 0
    grouped_value = q == k and v % q == 0
    if not (grouped_query or grouped_value):
        raise ValueError(
            f"num_q_heads={q}, num_k_heads={k}, num_v_heads={v}: allowed are GQA (num_k_heads = num_v_heads, "
            "num_q_heads a multiple) and GVA (num_q_heads = num_k_heads, num_v_heads a multiple)"
        )
    return q, k, v


def word(name: str, value: Any, allowed: Sequence[str], also: str = "") -> str:
    if isinstance(value, str) and value in allowed:
        return value
    near = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}{also}, got {value!r}{hint}")


def cp_chunk_len(value: Any, name: str = "cp_chunk_len") -> int:
    allowed = f"a positive multiple of the chunk size ({CHUNK}) or None"
    length = integer(name, value, 1, allowed)
    if length % CHUNK:
        raise ValueError(f"{name} must be {allowed}, got {length}")
    return length


def checkpoint_interval(value: Any) -> int:
    allowed = f"non-negative and a multiple of the chunk size ({CHUNK}); 0 asks for none"
    interval = integer("checkpoint_every_n_tokens", value, 0, allowed)
    if interval % CHUNK:
        raise ValueError(f"checkpoint_every_n_tokens must be {allowed}, got {interval}")
    return interval


def checkpoint_positions(
    positions: Iterable[Iterable[Any]], seq_lens: Sequence[int], every_n_tokens: int
) -> tuple[tuple[int, ...], ...]:
    if every_n_tokens:
        raise ValueError(
            "checkpoint_positions must be None where checkpoint_every_n_tokens is given, "
            f"got both (checkpoint_every_n_tokens={every_n_tokens})"
        )
    allowed = "strictly ascending ints in 1 ... the sequence's length"
    try:
        per_sequence = [tuple(of_sequence) for of_sequence in positions]
    except TypeError:
        raise ValueError(
            f"checkpoint_positions must hold, per sequence, a sequence of {allowed}, got {positions!r}"
        ) from None
    if len(per_sequence) != len(seq_lens):
        raise ValueError(
            f"checkpoint_positions must have one entry per sequence ({len(seq_lens)}), got {len(per_sequence)}"
        )
    result = []
    for i, (of_sequence, length) in enumerate(zip(per_sequence, seq_lens, strict=True)):
        name = f"checkpoint_positions[{i}]"
        own = tuple(integer(f"{name}[{j}]", p, 1, allowed) for j, p in enumerate(of_sequence))
        if (own and own[-1] > length) or any(a >= b for a, b in pairwise(own)):
            raise ValueError(f"{name} must be {allowed} ({length}), got {list(own)}")
        result.append(own)
    return tuple(result)


def token_ranges(ranges: Any, num_tokens: int, world_size: int) -> TokenRanges:
    """Explicit ownership: per rank, ranges in any order that partition [0, num_tokens); empty ranges are dropped."""
    shape = "'contiguous', 'zigzag' or [[(start, stop), ...] per rank]"
    try:
        per_rank = [[(bounds[0], bounds[1], len(bounds)) for bounds in own] for own in ranges]
    except (TypeError, IndexError, KeyError):
        raise ValueError(f"ownership must be {shape}, got {ranges!r}") from None
    if len(per_rank) != world_size:
        raise ValueError(f"ownership must have one list of ranges per rank ({world_size}), got {len(per_rank)}")
    result = []
    for rank, own in enumerate(per_rank):
        checked = []
        for i, (start, stop, size) in enumerate(own):
            name = f"ownership[{rank}][{i}]"
            if size != 2:
                raise ValueError(f"{name} must be (start, stop), got {size} values")
            low = integer(f"{name} start", start, 0, "a non-negative int")
            high = integer(f"{name} stop", stop, 0, "a non-negative int")
            if not low <= high <= num_tokens:
                raise ValueError(f"{name} must be a range within [0, {num_tokens}), got ({low}, {high})")
            if low < high:
                checked.append((low, high))
        result.append(tuple(sorted(checked)))

    reached, before = 0, ""  # the tokens below `reached` are covered
    for start, stop, rank in sorted((start, stop, rank) for rank, own in enumerate(result) for start, stop in own):
        here = f"({start}, {stop}) of rank {rank}"
        if start < reached:
            raise ValueError(f"ownership must be a partition of [0, {num_tokens}): {here} overlaps {before}")
        if start > reached:
            raise ValueError(f"ownership must be a partition of [0, {num_tokens}): no rank holds [{reached}, {start})")
        reached, before = stop, here
    if reached < num_tokens:
        raise ValueError(f"ownership must be a partition of [0, {num_tokens}): no rank holds [{reached}, {num_tokens})")
    return tuple(result)


def half_lives(values: Iterable[Any], num_state_heads: int) -> tuple[float, ...]:
    """Tokens per head, positive; infinity for a head that never forgets."""
    allowed = f"None or one positive number of tokens per state head ({num_state_heads})"
    try:
        result = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise ValueError(f"head_half_lives must be {allowed}, got {values!r}") from None
    if len(result) != num_state_heads:
        raise ValueError(f"head_half_lives must be {allowed}, got {len(result)} numbers")
    for head, value in enumerate(result):
        if not value > 0:
            raise ValueError(f"head_half_lives[{head}] must be positive, got {value}")
    return result


def forget_bound(value: Any) -> float:
    allowed = "None (by dtype) or a number in [0, 1); 0 turns forgetting off"
    try:
        bound = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        bound = math.nan
    if not 0 <= bound < 1:
        raise ValueError(f"forget_below must be {allowed}, got {value!r}")
    return bound
