"""From measurements to a profile: the costs by which the cost model predicts what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gdncp.plan import CostProfile

Array = npt.NDArray[np.float64]

_ROUNDS = 40
_STEP = 1e-6  # relative, of finite differences: predictions are piecewise linear, so that it only has to be small
_INERTIA = 1e-3  # relative to a measurement's weight: what nothing measured depends on stays as it was
_FLOOR, _RATE_FLOOR = 1e-9, 1e-15  # seconds, seconds a byte: what a cost of 0 is changed by, as if it were so much


@dataclass(frozen=True)
class Measurement:
    """One time, and what the cost model says of it."""

    what: str  # the stage or collective
    case: str
    seconds: float
    predict: Callable[[CostProfile], float]

    def off(self, profile: CostProfile) -> float:
        """Predicted over measured, less 1."""
        return self.predict(profile) / self.seconds - 1


def fit(profile: CostProfile, names: Sequence[str], measurements: Sequence[Measurement]) -> CostProfile:
    """The profile with the costs of these names such that relative errors are least, in the sense of least squares.

    names: of `CostProfile`'s times and rates; a rate is fitted as seconds a byte.

    The model is piecewise linear in them (a schedule's end is the greatest of sums of times), so a few linear fits,
    each about the last one's answer, find them; no cost is negative.
    """
    costs = np.array([_cost(profile, name) for name in names])
    measured = np.array([m.seconds for m in measurements])

    def predicted(values: Array) -> Array:
        changed = _with_costs(profile, names, values)
        return np.array([m.predict(changed) for m in measurements]) / measured

    best, loss = costs, _loss(predicted(costs))
    for _ in range(_ROUNDS):
        here = predicted(best)
        steps = _STEP * np.maximum(best, _floors(names))
        slopes = np.array([(predicted(best + step) - here) / step.sum() for step in np.diag(steps)]).T
        target = _non_negative(slopes, 1 - here + slopes @ best, best, _floors(names))
        moved = False
        for share in (1.0, 0.5, 0.25, 0.1, 0.02):  # across a kink the linear answer may be too far
            trial = best + share * (target - best)
            if (found := _loss(predicted(trial))) < loss * (1 - 1e-9):
                best, loss, moved = trial, found, True
                break
        if not moved:
            break
    return _with_costs(profile, names, np.where(best < _floors(names) / 100, 0.0, best))


def median_error(profile: CostProfile, measurements: Sequence[Measurement]) -> float:
    """Of the relative errors' sizes."""
    return statistics.median(abs(m.off(profile)) for m in measurements)


def _loss(ratios: Array) -> float:
    return float(((ratios - 1) ** 2).sum())


def _non_negative(slopes: Array, wanted: Array, costs: Array, floors: Array) -> Array:
    """Costs ≥ 0 with slopes · costs nearest to `wanted`: the most negative one is held at 0 until none is."""
    inertia = _INERTIA / np.maximum(costs, floors)
    free = np.ones(len(costs), dtype=bool)
    while True:
        found = np.zeros(len(costs))
        rows = np.vstack([slopes[:, free], np.diag(inertia)[:, free][free]])
        found[free] = np.linalg.lstsq(rows, np.concatenate([wanted, (inertia * costs)[free]]), rcond=None)[0]
        if not (found < 0).any():
            return found
        free[int(np.argmin(found * inertia))] = False


def _is_rate(name: str) -> bool:
    return name.endswith("bytes_per_s")


def _cost(profile: CostProfile, name: str) -> float:
    value = float(getattr(profile, name))
    return 1 / value if _is_rate(name) else value


def _floors(names: Sequence[str]) -> Array:
    return np.array([_RATE_FLOOR if _is_rate(name) else _FLOOR for name in names])


def _with_costs(profile: CostProfile, names: Sequence[str], costs: Array) -> CostProfile:
    values: dict[str, Any] = {
        name: 1 / max(float(cost), _RATE_FLOOR) if _is_rate(name) else float(cost)
        for name, cost in zip(names, costs, strict=True)
    }
    return replace(profile, **values)
