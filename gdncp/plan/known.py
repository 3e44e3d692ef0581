"""Plans that were made before: the same arguments give the same plan, without planning again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MOST = 256  # plans that are kept


def known(plan: Callable[P, R], most: int = MOST) -> Callable[P, R]:
    """`plan(seq_lens, **words)` that remembers what it returned last, for lengths in a tuple or a list.

    Lengths are compared, not hashed, which is quicker, with those of the last few calls that look alike.  What cannot
    be a key (explicit ownership in lists) and what a file says is planned anew.
    """
    plans: OrderedDict[Hashable, list[_Known[R]]] = OrderedDict()
    anew: Callable[..., R] = plan

    @wraps(plan)
    def remembered(*args: P.args, **words: P.kwargs) -> R:
        key = _key(args, words)
        if key is None:
            return plan(*args, **words)
        lengths: Any = args[0]
        try:
            alike = plans.get(key)
        except TypeError:  # not hashable
            return plan(*args, **words)
        for one in alike or ():
            if one.same is lengths or (one.given is lengths and one.same == lengths):
                return one.result
        same = lengths.copy() if type(lengths) is list else lengths  # a list may change from here on
        for one in alike or ():
            if one.same == same and _same_types(one.same, same, one.plain):
                one.given, one.same = lengths, same  # a step's list comes once a layer
                return one.result
        result = anew(same, **words)
        alike = plans.setdefault(key, [])
        alike.append(_Known(lengths, same, all(type(n) is int and n > 1 for n in same), result))
        del alike[:-_ALIKE]
        plans.move_to_end(key)
        if len(plans) > most:
            plans.popitem(last=False)
        return result

    return remembered


_ALIKE = 4  # batches that differ inside alone


@dataclass(slots=True)
class _Known(Generic[R]):
    """A result and the lengths that it was last given for.

    A list may change, so it is compared whenever it comes.  One that comes again has had its types looked at: where its
    ints were replaced by floats that equal them, in place, that goes unseen, and it gets the plan of the ints.
    """

    given: Any
    same: Any  # the same, or where that is a list, a copy; of the very ints, which are compared at a glance
    plain: bool  # see `_same_types`
    result: R


def _same_types(known: Any, given: Any, plain: bool) -> bool:
    """Of lengths that are equal: True is not 1, and neither is 1.0.

    plain: the known ones are ints above 1.  No bool equals them, and a sum with a float in it is one: that is a tenth
    of the time of looking at each type.
    """
    return type(sum(given)) is int if plain else list(map(type, known)) == list(map(type, given))


def _key(args: tuple[Any, ...], words: dict[str, Any]) -> Hashable:
    """None: not to be remembered.  Types are part of it, so that True is not taken for 1."""
    if len(args) != 1 or type(args[0]) not in (tuple, list) or not args[0]:
        return None
    profile = words.get("profile")
    if isinstance(profile, Path) or (isinstance(profile, str) and profile.endswith(".json")):
        return None
    lengths = args[0]
    values = tuple(words.values())
    ends = (lengths[0], lengths[-1], lengths[len(lengths) // 2])
    if type(words.get("head_half_lives")) is list:
        values = tuple(tuple(value) if type(value) is list else value for value in values)
    return (type(lengths), len(lengths), ends, *map(type, ends), *words, *values, *map(type, words.values()))
