"""Calls of one kind are checked once: what differs in one property only must be another kind, refused or right."""

import enum
import inspect
import pickle
from types import SimpleNamespace

import numpy
import pytest
import torch

import gdncp
from gdncp import api, calls, validation
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


def run_flashinfers(base, **changes):
    """FlashInfer's call of the same work."""
    arguments = {"plan": PLAN, **TOKENS, **base, **changes}
    if "state_pool" in arguments:
        arguments["initial_state"] = arguments["output_state"] = arguments.pop("state_pool")
    output, final = gdncp.chunk_gated_delta_rule(**arguments, cu_seqlens_host=[0, 70, 130], output_final_state=True)
    return SimpleNamespace(output=output, final_state=final)


RUNS = {"prefill": run, "chunk_gated_delta_rule": run_flashinfers}


def strided(x):
    return torch.stack([x, x], dim=-1)[..., 0]


class Word(str, enum.Enum):
    LINEAR = "linear"


BAD = {
    **{f"{n} strides": (GOOD, {n: strided(TOKENS[n])}, f"{n} must be contiguous") for n in TOKENS},
    **{f"{n} tokens": (GOOD, {n: TOKENS[n][:-1]}, f"{n} must have|the number of tokens") for n in TOKENS},
    **{f"{n} dtype": (GOOD, {n: TOKENS[n].double()}, f"{n} must have dtype") for n in TOKENS},
    **{f"{n} device": (GOOD, {n: TOKENS[n].to("meta")}, "must be on|meta") for n in ("k", "v", "g", "beta")},
    **{f"{n} type": (GOOD, {n: TOKENS[n].numpy()}, f"{n} must be a torch.Tensor") for n in TOKENS},
    "state strides": (GOOD, {"initial_state": STATE[:1].expand(2, -1, -1, -1)}, "initial_state must have positive"),
    "state dtype": (GOOD, {"initial_state": STATE.double()}, "initial_state must have dtype"),
    "state rows": (GOOD, {"initial_state": STATE[:1]}, "initial_state must have shape"),
    "output dtype": (GOOD, {"output": torch.zeros(T, H, D).half()}, "output must have dtype"),
    "output that requires grad": (
        GOOD,
        {"output": torch.zeros(T, H, D).requires_grad_()},
        "output must not require grad",
    ),
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
    "scale that no float holds": (GOOD, {"scale": 10**5000}, "scale must be a finite float.*an int of 16610 bits"),
    "forget_below that no float holds": (GOOD, {"forget_below": 10**400}, "forget_below must lie"),
    "L2 norm tensor": (GOOD, {"use_qk_l2norm_in_kernel": torch.ones(2)}, "use_qk_l2norm_in_kernel must be one of True"),
    "L2 norm int": (GOOD, {"use_qk_l2norm_in_kernel": 1}, "use_qk_l2norm_in_kernel must be one of True, False, got 1"),
    "group word": (GOOD, {"group": "x"}, "group must be a group of torch.distributed, got 'x'"),
    "gates above 1": (GOOD, {"g": TOKENS["g"] + 1}, "g must be linear.*got a maximum of"),
    "forget_below bool": (GOOD, {"forget_below": False}, "forget_below must lie"),
    "word that is equal": (GOOD, {"gate_space": Word.LINEAR}, "gate_space must be one of"),
    "backend": (GOOD, {"backend": "hopper"}, "backend 'hopper' cannot run"),
    "final_state": (GOOD, {"final_state": "each"}, "final_state must be one of"),
    "plan of other lengths": (
        GOOD,
        {"plan": gdncp.plan_prefill([70, 61], **HEADS)},
        r"q must have 131 tokens|sequence lengths \(70, 60\), got \(70, 61\)",
    ),
    "plan of other heads": (GOOD, {"plan": gdncp.plan_prefill([70, 60], **{**HEADS, "num_q_heads": 4})}, "q must have"),
}


ONLY_PREFILL = ("checkpoints", "both states", "slots alone", "final_state")  # arguments of its own
CASES = [("prefill", name) for name in BAD]
CASES += [("chunk_gated_delta_rule", name) for name in BAD if name not in ONLY_PREFILL]


@pytest.mark.parametrize(("call", "name"), CASES)
def test_one_bad_property_is_refused_after_good_calls_as_before(call, name):
    base, changes, message = BAD[name]
    run = RUNS[call]
    with pytest.raises((ValueError, NotImplementedError), match=message) as before:
        run(base, **changes)
    run(base)
    run(base)
    with pytest.raises(type(before.value)) as after:
        run(base, **changes)
    assert str(after.value) == str(before.value)
    run(base)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_kind_is_checked_once(run, checked):
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


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_gives_what_it_gives_alone(name, run, checked):
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


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"backend": "cuda"}, "backend must be one of"),
        ({"gate_space": "log2"}, "gate_space must be one of"),
        ({"final_state": "each"}, "final_state must be one of"),
        ({"scale": "0.1"}, "scale must be a finite float"),
        ({"output": torch.zeros(T, H, D)}, "output must not be given to warmup, which takes backend, "),
        ({"state_pool": STATE, "state_indices": torch.tensor([0, 1])}, "state_pool must not be given to warmup"),
        ({"spelling": 1}, "spelling must not be given to warmup"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_warmup_refuses_what_it_would_write_and_what_a_call_refuses(dtype, bad, message):
    before = STATE.clone()
    with pytest.raises(ValueError, match=message):
        gdncp.warmup(PLAN, dtype=dtype, **bad)
    assert torch.equal(STATE, before)


def test_the_public_calls_can_be_pickled_and_say_what_they_take():
    # another test may have imported the command, which then has the name `gdncp.prefill` and can be called as well
    prefill = api.prefill
    for call in (prefill, gdncp.summarise, gdncp.fixup, gdncp.finish, gdncp.chunk_gated_delta_rule):
        assert pickle.loads(pickle.dumps(call)) is call
    assert inspect.signature(prefill).return_annotation == "PrefillResult"
    assert list(inspect.signature(prefill).parameters)[:6] == ["plan", "q", "k", "v", "g", "beta"]
    assert "state_pool, state_indices:" in prefill.__doc__ and "Raises:" in gdncp.summarise.__doc__
