"""Planning a few sequences is quick, and predicts no worse plans than before it was made so."""

from __future__ import annotations

import gc
import random
import time

import pytest

from gdncp.plan import plan_prefill
from gdncp.plan.stage_model import kinds_of_run, model_of

LAYER = {"num_q_heads": 16, "num_k_heads": 16, "num_v_heads": 32, "profile": "h200"}
# sequences, ranks, tokens a sequence, whether lengths differ, ownership -> predicted µs at commit f2f8e54
BEFORE = {
    (1, 1, 8192, True, "contiguous"): 195.932,
    (1, 1, 131072, True, "contiguous"): 2730.981,
    (1, 2, 8192, True, "contiguous"): 180.773,
    (1, 2, 32768, True, "contiguous"): 473.567,
    (1, 2, 131072, False, "contiguous"): 1372.144,
    (1, 2, 131072, True, "contiguous"): 1639.697,
    (1, 2, 524288, False, "contiguous"): 5310.095,
    (1, 2, 524288, True, "contiguous"): 6370.214,
    (1, 8, 8192, True, "contiguous"): 169.614,
    (1, 8, 32768, True, "contiguous"): 278.283,
    (1, 8, 131072, False, "contiguous"): 497.375,
    (1, 8, 131072, True, "contiguous"): 568.049,
    (1, 8, 524288, False, "contiguous"): 1466.626,
    (1, 8, 524288, True, "contiguous"): 1734.179,
    (1, 64, 32768, True, "contiguous"): 424.481,
    (1, 64, 131072, True, "contiguous"): 499.602,
    (1, 64, 524288, False, "contiguous"): 841.494,
    (1, 64, 524288, True, "contiguous"): 865.702,
    (2, 1, 131072, False, "contiguous"): 3773.646,
    (2, 1, 524288, True, "contiguous"): 16874.162,
    (2, 2, 32768, True, "contiguous"): 703.766,
    (2, 2, 131072, False, "contiguous"): 2464.635,
    (2, 2, 131072, True, "contiguous"): 2611.782,
    (2, 2, 524288, False, "contiguous"): 10012.170,
    (2, 2, 524288, True, "contiguous"): 10105.340,
    (2, 8, 8192, True, "contiguous"): 172.338,
    (2, 8, 32768, True, "contiguous"): 307.514,
    (2, 8, 32768, True, "zigzag"): 332.342,
    (2, 8, 131072, False, "contiguous"): 783.218,
    (2, 8, 131072, True, "contiguous"): 768.591,
    (2, 8, 131072, True, "zigzag"): 816.968,
    (2, 8, 524288, False, "contiguous"): 2721.719,
    (2, 8, 524288, True, "contiguous"): 2652.798,
    (2, 64, 8192, True, "contiguous"): 212.366,
    (2, 64, 131072, False, "contiguous"): 594.004,
    (2, 64, 131072, True, "contiguous"): 563.712,
    (2, 64, 524288, False, "contiguous"): 917.087,
    (2, 64, 524288, True, "contiguous"): 976.720,
    (8, 1, 32768, True, "contiguous"): 3307.599,
    (8, 2, 8192, True, "contiguous"): 617.747,
    (8, 2, 32768, True, "contiguous"): 2465.756,
    (8, 2, 131072, True, "contiguous"): 9547.575,
    (8, 2, 524288, True, "contiguous"): 37878.899,
    (8, 8, 8192, True, "contiguous"): 289.518,
    (8, 8, 32768, True, "contiguous"): 964.657,
    (8, 8, 32768, True, "zigzag"): 1081.862,
    (8, 8, 131072, True, "contiguous"): 3361.171,
    (8, 8, 131072, True, "zigzag"): 3857.811,
    (8, 8, 524288, True, "contiguous"): 12049.646,
    (8, 64, 32768, True, "contiguous"): 450.870,
    (8, 64, 32768, True, "zigzag"): 963.375,
    (8, 64, 131072, True, "contiguous"): 811.853,
    (8, 64, 131072, True, "zigzag"): 1910.153,
    (8, 64, 524288, True, "contiguous"): 2252.633,
    (32, 2, 131072, True, "contiguous"): 25153.617,
    (32, 8, 32768, True, "zigzag"): 3962.423,
    (32, 8, 131072, True, "zigzag"): 13671.308,
    (32, 64, 8192, True, "contiguous"): 284.074,
    (32, 64, 32768, True, "contiguous"): 674.098,
    (32, 64, 32768, True, "zigzag"): 2913.507,
    (32, 64, 131072, True, "contiguous"): 1857.020,
    (32, 64, 131072, True, "zigzag"): 6047.494,
}
SLOWEST = 0.2  # seconds: three times what the slowest take on a busy machine


def batch(number: int, tokens: int, differ: bool) -> list[int]:
    if not differ:
        return [tokens] * number
    generator = random.Random(1)
    return [max(int(tokens * generator.lognormvariate(-0.3, 0.8)), 1) for _ in range(number)]


@pytest.mark.parametrize("case", BEFORE)
def test_plans_are_as_good_as_before_and_come_soon(case: tuple[int, int, int, bool, str]) -> None:
    number, world_size, tokens, differ, ownership = case
    lengths = batch(number, tokens, differ)
    kinds_of_run.cache_clear()
    model_of.cache_clear()
    gc.disable()  # what other tests left on the heap is no part of it
    try:
        start = time.process_time()
        plan = plan_prefill(lengths, world_size=world_size, ownership=ownership, **LAYER)
        taken = time.process_time() - start
    finally:
        gc.enable()
    assert taken < SLOWEST
    seconds = max(map(sum, zip(*plan.predicted.values(), strict=True)))
    assert seconds <= 1.005 * BEFORE[case] * 1e-6
