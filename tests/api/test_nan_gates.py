"""NaN among the gates: refused where `check` looks, and else a matter of its own sequence and head."""

import pytest
import torch

import gdncp
from tests.conftest import DEVICE, on_targets
from tests.numeric import Target, offsets

LENS, HEADS, EVERY = [200, 0, 150, 70], (2, 2, 4), 64
SEQUENCE, HEAD, TOKEN = 2, 1, 90  # in the second chunk of 64 tokens


def call(target, tokens, **arguments):
    plan = gdncp.plan_prefill(
        LENS, num_q_heads=HEADS[0], num_k_heads=HEADS[1], num_v_heads=HEADS[2], head_dim=target.dim,
        cp_chunk_len=128, checkpoint_every_n_tokens=EVERY, lanes_per_rank=2,
    )  # fmt: skip
    tokens = {name: x.to(target.device) for name, x in tokens.items()}
    initial = target.states(len(LENS), max(HEADS)).to(target.device)
    return gdncp.prefill(plan, **tokens, initial_state=initial, backend=target.backend, **arguments)


GATES = on_targets(("never", "mixed", "strong"), lambda *_: True)
GATES.append(pytest.param("mixed", Target(DEVICE, "triton", 16), id="mixed-triton", marks=pytest.mark.slow))


@pytest.mark.parametrize("name", ["g", "beta"])
@pytest.mark.parametrize("gates, target", GATES)
def test_a_nan_stays_with_its_sequence_and_head(target, gates, name):
    tokens = target.tokens(sum(LENS), HEADS, gates=gates)
    clean = call(target, tokens)
    start = offsets(LENS)[SEQUENCE]
    tokens[name][start + TOKEN, HEAD] = torch.nan
    found = call(target, tokens)
    stop, first = offsets(LENS)[SEQUENCE + 1], start + TOKEN // 64 * 64
    assert found.output[start + TOKEN : stop, HEAD].isnan().all()
    # of its two checkpoints the first, in row 3, is of the 64 tokens before
    for what, rows in {"output": slice(first, stop), "final_state": SEQUENCE, "checkpoints": 4}.items():
        x, before = getattr(found, what), getattr(clean, what)
        assert what == "output" or x[rows, HEAD].isnan().all()
        x[rows, HEAD] = before[rows, HEAD]
        assert torch.equal(x, before), what


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["g", "beta"])
def test_check_refuses_it(name, device):
    target = Target(device, "torch", 16)
    tokens = target.tokens(sum(LENS), HEADS)
    tokens[name][[290, 300], [1, 0]] = torch.nan
    with pytest.raises(
        ValueError, match=rf"{name} must hold no NaN where check=True looks, got 2, first at \[290, 1\]"
    ):
        call(target, tokens, check=True)
    call(target, tokens)
