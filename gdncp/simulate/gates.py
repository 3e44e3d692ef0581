"""Half-lives of heads for the kinds of gates that a simulation is asked about."""

from __future__ import annotations

import math

from gdncp.plan.choose import typical_half_lives

GATES = ("one", "forget", "fresh")


def half_lives(gates: str, num_heads: int) -> list[float]:
    """Tokens per head.

    one: nothing forgets. forget: log-spaced from 4 to 16384. fresh: as the layers of Qwen3-Next are initialised, A
    uniform in [1, 16] and dt log-uniform in [0.001, 0.1], independent of each other: a token multiplies the state by
    exp(−A · dt). Heads take quantiles of both instead of random draws.
    """
    if gates == "one":
        return [1e30] * num_heads
    if gates == "forget":
        return typical_half_lives(num_heads)
    if gates == "fresh":
        return [
            math.log(2) / ((1 + 15 * (head + 0.5) / num_heads) * 1e-3 * 100 ** _radical_inverse(head))
            for head in range(num_heads)
        ]
    raise ValueError(f"gates must be one of {', '.join(GATES)}, got {gates!r}")


def _radical_inverse(number: int) -> float:
    """The van der Corput sequence, half a step in: quantiles whose order is unlike that of `number`."""
    value, step = 0.0, 0.5
    while number:
        value += step * (number & 1)
        number >>= 1
        step /= 2
    return value + step / 2
