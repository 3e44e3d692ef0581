"""Calls of one kind are checked once: what differs in one property only must be another kind, refused or right."""

import enum

import numpy
import pytest
import torch

import gdncp
from gdncp import calls, validation
from tests.numeric import random_state, random_tokens

T, H, D = 130, 2, 32
HEADS = {"num_q_heads": H, "num_k_heads": H, "num_v_heads": H, "head_dim": D}
PLAN = gdncp.plan_prefill([70, 60], cp_chunk_len=64, **HEADS)
TOKENS = random_tokens(T, dim=D)
STATE = random_state(2, H, D)
GOOD = {
    "initial_state": STATE,
    "output_state": torch.zeros(2, H, D, D),
    "output": torch.zeros(T, H, D),
    "scale": 1.0,
    "forget_below": 0.0,
}
POOLED = {"state_pool": random_state(3, H, D), "state_indices": torch.tensor([2, 0])}


@pytest.fixture(autouse=True)
def no_kinds(monkeypatch):
    monkeypatch.setattr(calls, "_KINDS", {})


@pytest.fixture
def checked(monkeypatch):
    """How often tokens were checked."""
    seen, real = [], validation.token_tensors
    monkeypatch.setattr(validation, "token_tensors", lambda *args: seen.append(1) or real(*args))
    return seen


def run(base, **changes):
    arguments = {**TOKENS, **base, **changes}
    return gdncp.prefill(arguments.pop("plan", PLAN), **arguments)


def strided(x):
    return torch.stack([x, x], dim=-1)[..., 0]


class Word(str, enum.Enum):
    LINEAR = "linear"


BAD = {
    **{f"{n} strides": (GOOD, {n: strided(TOKENS[n])}, f"{n} must be contiguous") for n in TOKENS},
    **{f"{n} tokens": (GOOD, {n: TOKENS[n][:-1]}, f"{n} must have") for n in TOKENS},
    **{f"{n} dtype": (GOOD, {n: TOKENS[n].double()}, f"{n} must have dtype") for n in TOKENS},
    **{f"{n} device": (GOOD, {n: TOKENS[n].to("meta")}, "must be on|meta") for n in ("k", "v", "g", "beta")},
    **{f"{n} type": (GOOD, {n: TOKENS[n].numpy()}, f"{n} must be a torch.Tensor") for n in TOKENS},
    "state strides": (GOOD, {"initial_state": STATE[:1].expand(2, -1, -1, -1)}, "initial_state must have positive"),
    "state dtype": (GOOD, {"initial_state": STATE.double()}, "initial_state must have dtype"),
    "state rows": (GOOD, {"initial_state": STATE[:1]}, "initial_state must have shape"),
    "output dtype": (GOOD, {"output": torch.zeros(T, H, D).half()}, "output must have dtype"),
    "output strides": (GOOD, {"output": strided(torch.zeros(T, H, D))}, "output must be contiguous"),
    "output_state rows": (GOOD, {"output_state": torch.zeros(3, H, D, D)}, "output_state must have shape"),
    "checkpoints": (GOOD, {"state_checkpoints": STATE}, "state_checkpoints must have shape"),
    "both states": (GOOD, POOLED, "initial_state must be None"),
    "slots alone": (GOOD, {"state_indices": POOLED["state_indices"]}, "must both be provided"),
    "slots dtype": (POOLED, {"state_indices": POOLED["state_indices"].short()}, "state_indices must have dtype"),
    "slots shape": (POOLED, {"state_indices": torch.tensor([2, 0, 1])}, "state_indices must have shape"),
    "slots out of range": (POOLED, {"state_indices": torch.tensor([2, 3])}, "state_indices must lie in"),
    "slots twice": (POOLED, {"state_indices": torch.tensor([2, 2])}, "state_indices must be unique"),
    "gates of the other space": (GOOD, {"g": TOKENS["g"].log()}, "g must be linear"),
    "scale bool": (GOOD, {"scale": True}, "scale must be a finite float"),
    "scale list": (GOOD, {"scale": [1.0]}, "scale must be a finite float"),
    "scale nan": (GOOD, {"scale": float("nan")}, "scale must be a finite float"),
    "forget_below bool": (GOOD, {"forget_below": False}, "forget_below must lie"),
    "word that is equal": (GOOD, {"gate_space": Word.LINEAR}, "gate_space must be one of"),
    "backend": (GOOD, {"backend": "hopper"}, "backend 'hopper' cannot run"),
    "final_state": (GOOD, {"final_state": "each"}, "final_state must be one of"),
    "plan of other lengths": (GOOD, {"plan": gdncp.plan_prefill([70, 61], **HEADS)}, "q must have 131 tokens"),
    "plan of other heads": (GOOD, {"plan": gdncp.plan_prefill([70, 60], **{**HEADS, "num_q_heads": 4})}, "q must have"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_bad_property_is_refused_after_good_calls_as_before(name):
    base, changes, message = BAD[name]
    with pytest.raises((ValueError, NotImplementedError), match=message) as before:
        run(base, **changes)
    run(base)
    run(base)
    with pytest.raises(type(before.value)) as after:
        run(base, **changes)
    assert str(after.value) == str(before.value)
    run(base)


def test_a_kind_is_checked_once(checked):
    first = run(GOOD)
    again = run(GOOD, **{n: x.clone() for n, x in TOKENS.items()}, output=torch.zeros(T, H, D))
    assert len(checked) == 1 and first.output is GOOD["output"] and again.output is not GOOD["output"]
    assert torch.equal(first.output, again.output)


OTHERS = {  # what is good too, but another kind
    "no state": {"initial_state": None},
    "a narrow state": {"initial_state": STATE.half()},
    "a transposed state": {"initial_state": STATE.transpose(-1, -2).contiguous().transpose(-1, -2)},
    "no gates": {"g": None},
    "log gates": {"g": TOKENS["g"].log(), "gate_space": "log"},
    "L2 norm": {"use_qk_l2norm_in_kernel": True},
    "scale": {"scale": 0.5},
    "numpy's scale": {"scale": numpy.float64(0.5)},
    "a narrow final state": {"output_state": torch.zeros(2, H, D, D).half()},
    "parameters": {n: torch.nn.Parameter(TOKENS[n]) for n in "qkv"},
    "another grid": {"plan": gdncp.plan_prefill([70, 60], cp_chunk_len=128, **HEADS)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_gives_what_it_gives_alone(name, checked):
    fresh = {"output": None, "output_state": None}
    expected = run({**GOOD, **fresh}, **OTHERS[name])
    calls._KINDS.clear()
    run({**GOOD, **fresh})
    result = run({**GOOD, **fresh}, **OTHERS[name])
    assert len(checked) == 3
    assert torch.equal(result.output, expected.output) and not result.output.requires_grad
    assert torch.equal(result.final_state, expected.final_state)


def test_kinds_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(calls, "_MOST_KINDS", 2)
    for scale in (1.0, 0.5, 0.25, 0.125, 1.0):
        run(GOOD, scale=scale)
        assert len(calls._KINDS) <= 2


def test_warmup_does_what_a_first_call_does(checked):
    plan = gdncp.plan_prefill([70, 64], checkpoint_every_n_tokens=64, **HEADS)
    for changes, call in (
        ({}, {}),
        ({"state_dtype": torch.float16}, {"initial_state": STATE.half()}),
        ({"pooled": True}, {"state_pool": STATE, "state_indices": torch.tensor([1, 0], dtype=torch.int32)}),
        (
            {"with_gates": False, "backend": "torch", "scale": 0.5},
            {"g": None, "beta": None, "backend": "torch", "scale": 0.5},
        ),
    ):
        gdncp.warmup(plan, dtype=torch.float32, **changes)
        before = len(checked)
        gdncp.prefill(plan, **{**random_tokens(134, dim=D), **call})
        assert len(checked) == before, changes
    with pytest.raises(ValueError, match="backend must be one of"):
        gdncp.warmup(plan, dtype=torch.float32, backend="cuda")
