"""What is refused, with the argument, the value and what is allowed; and that nothing is written before it is."""

import numpy
import pytest
import torch

import gdncp
from gdncp import flashinfer_api, validation
from tests.numeric import checkpoint_starts, cu, random_state, random_tokens

T, H, D = 128, 2, 32
TOKENS = random_tokens(T, dim=D)
STATE = random_state(2, H, D)
ROWS = torch.full((2, H, D, D), 7.0)
STARTS = checkpoint_starts([64, 64], 64)


SPLITS = gdncp.plan_prefill([T], num_q_heads=H, num_k_heads=H, num_v_heads=H, head_dim=D, cp_chunk_len=64)
LONG_FIRST = gdncp.plan_prefill(
    [T], num_q_heads=H, num_k_heads=H, num_v_heads=H, head_dim=D, cp_chunk_len=64, first_cp_chunk_len=128
)
PLAN = gdncp.plan_prefill(
    [64, 64], num_q_heads=H, num_k_heads=H, num_v_heads=H, head_dim=D, checkpoint_every_n_tokens=64
)


def strided(x):
    return torch.stack([x, x], dim=-1)[..., 0]


BAD = {  # id: (arguments over a good call, message)
    "backend word": ({"backend": "cuda"}, r"backend must be one of 'auto', .*got 'cuda'"),
    "backend of another library": ({"backend": "fla"}, r"backend 'fla' is another library's engine"),
    "use_cp word": ({"use_cp": "yes"}, r"use_cp must be one of 'auto', True, False, got 'yes'"),
    "use_cp int": ({"use_cp": 1}, r"use_cp must be one of .*got 1"),
    "gate_space": ({"gate_space": "log2"}, r"gate_space must be one of 'linear', 'log', got 'log2'"),
    "precision": ({"precision": "tf32"}, r"precision must be one of 'fast', 'high', got 'tf32'"),
    "interval negative": (
        {"checkpoint_every_n_tokens": -64},
        r"checkpoint_every_n_tokens must be non-negative, got -64",
    ),
    "interval off grid": ({"checkpoint_every_n_tokens": 16}, r"must be a multiple of the chunk size \(64\), got 16"),
    "interval bool": ({"checkpoint_every_n_tokens": True}, r"checkpoint_every_n_tokens must be an int, got True"),
    "checkpoint buffers missing": ({"checkpoint_every_n_tokens": 64}, r"must both be provided"),
    "one checkpoint buffer": (
        {"checkpoint_every_n_tokens": 64, "state_checkpoints": ROWS},
        r"must both be provided or both be None, got state_checkpoints alone",
    ),
    "spurious checkpoint buffers": (
        {"state_checkpoints": ROWS, "checkpoint_cu_starts": STARTS},
        r"state_checkpoints and checkpoint_cu_starts must be None where checkpoint_every_n_tokens is 0",
    ),
    "checkpoint dtype": (
        {"checkpoint_every_n_tokens": 64, "state_checkpoints": ROWS.double(), "checkpoint_cu_starts": STARTS},
        r"state_checkpoints must have dtype .*got torch.float64",
    ),
    "checkpoint starts dtype": (
        {"checkpoint_every_n_tokens": 64, "state_checkpoints": ROWS, "checkpoint_cu_starts": STARTS.float()},
        r"checkpoint_cu_starts must have dtype torch.int32 or torch.int64, got torch.float32",
    ),
    "checkpoint starts values": (
        {"checkpoint_every_n_tokens": 64, "state_checkpoints": ROWS, "checkpoint_cu_starts": cu([2, 0])},
        r"checkpoint_cu_starts must be \[0, 1, 2\].*got \[0, 2, 2\]",
    ),
    "checkpoint rows": (
        {"checkpoint_every_n_tokens": 64, "state_checkpoints": ROWS[:1], "checkpoint_cu_starts": STARTS},
        r"state_checkpoints must have shape \(2, 2, 32, 32\).*got \(1, 2, 32, 32\)",
    ),
    "cu_seqlens dtype": ({"cu_seqlens": cu([64, 64]).float()}, r"cu_seqlens must have dtype .*got torch.float32"),
    "cu_seqlens shape": ({"cu_seqlens": cu([64, 64])[None]}, r"cu_seqlens must have 1 dimensions, got shape \(1, 3\)"),
    "cu_seqlens empty": ({"cu_seqlens": cu([])}, r"cu_seqlens must hold at least 2 offsets .*got 1"),
    "cu_seqlens falls": (
        {"cu_seqlens": torch.tensor([0, 12, 8, 128])},
        r"cu_seqlens must be non-decreasing, got 12 then 8 at index 2",
    ),
    "cu_seqlens starts late": ({"cu_seqlens": torch.tensor([4, 128])}, r"cu_seqlens must start at 0, got 4"),
    "cu_seqlens ends short": (
        {"cu_seqlens": torch.tensor([0, 100])},
        r"cu_seqlens must end at the number of tokens \(128\), got 100",
    ),
    "cu_seqlens ends beyond": ({"cu_seqlens": torch.tensor([0, 200])}, r"must end at the number of tokens.*got 200"),
    "cu_seqlens_host differs": ({"cu_seqlens_host": [0, 63, 128]}, r"cu_seqlens_host must equal cu_seqlens"),
    "cu_seqlens_host type": ({"cu_seqlens_host": 5}, r"cu_seqlens_host must be ints or a CPU tensor, got 5"),
    "cu_seqlens_host negative": (
        {"cu_seqlens_host": [0, -4, 128]},
        r"cu_seqlens_host must be non-negative ints, got -4",
    ),
    "cu_seqlens_host length": ({"cu_seqlens_host": [0, 128]}, r"cu_seqlens_host must have 3 offsets"),
    "max_seqlen bool": ({"max_seqlen": True}, r"max_seqlen must be an int, got True"),
    "max_seqlen small": ({"max_seqlen": 63}, r"max_seqlen must lie between ceil.* = 64 and .* = 128, got 63"),
    "max_seqlen below a mean that is no int": (
        {"cu_seqlens": cu([43, 43, 42]), "max_seqlen": 42, "output_state": None},
        r"max_seqlen must lie between ceil.* = 43 and .*got 42",
    ),
    "max_seqlen large": ({"max_seqlen": 129}, r"max_seqlen must lie between .*got 129"),
    "slots dtype": (
        {"state_indices": torch.tensor([0.0, 1.0]), "initial_state": STATE, "output_state": STATE},
        r"state_indices must have dtype torch.int32 or torch.int64, got torch.float32",
    ),
    "slots shape": (
        {"state_indices": torch.tensor([0]), "initial_state": STATE, "output_state": STATE},
        r"state_indices must have shape \(2,\)",
    ),
    "slots beyond the pool": (
        {"state_indices": torch.tensor([0, 2]), "initial_state": STATE, "output_state": STATE},
        r"state_indices must lie in \[0, 2\).*got 2 at index 1",
    ),
    "slots twice": (
        {"state_indices": torch.tensor([1, 1]), "initial_state": STATE, "output_state": STATE},
        r"state_indices must be unique, got slot 1",
    ),
    "pool that overlaps": (
        {
            "state_indices": torch.tensor([0, 1]),
            "initial_state": STATE[:1].expand(2, -1, -1, -1),
            "output_state": STATE,
        },
        r"initial_state must have positive strides that do not overlap, got \(0, ",
    ),
    "slots without a pool": (
        {"state_indices": torch.tensor([0, 1]), "output_final_state": False},
        r"state_indices must be None where neither initial_state nor output_state is a pool",
    ),
    "slots without output_state": (
        {"state_indices": torch.tensor([0, 1]), "initial_state": STATE},
        r"output_state must be given with state_indices",
    ),
    "q type": ({"q": [1.0]}, r"q must be a torch.Tensor, got list"),
    "q dtype": ({"q": TOKENS["q"].double()}, r"q must have dtype .*got torch.float64"),
    "q dims": ({"q": TOKENS["q"][None]}, r"q must have 3 dimensions, got shape \(1, 128, 2, 32\)"),
    "k dtype": ({"k": TOKENS["k"].half()}, r"k must have dtype torch.float32 like q, got torch.float16"),
    "v tokens": ({"v": TOKENS["v"][:100]}, r"v must have 128 tokens like q, got shape \(100, 2, 32\)"),
    "k head dim": ({"k": TOKENS["k"][..., :16].contiguous()}, r"k must have head dim 32 like q, got 16"),
    "q strides": ({"q": strided(TOKENS["q"])}, r"q must be contiguous, got strides"),
    "heads": ({"k": TOKENS["k"][:, :1].contiguous()}, r"num_q_heads=2, num_k_heads=1, num_v_heads=2: allowed are GQA"),
    "g dtype": ({"g": TOKENS["g"].bfloat16()}, r"g must have dtype torch.float32, got torch.bfloat16"),
    "g shape": ({"g": TOKENS["g"][:, :1].contiguous()}, r"g must have shape \(128, 2\) \(tokens, state heads\)"),
    "g negative": ({"g": TOKENS["g"] - 1}, r"g must be linear .*natural-log gates need gate_space='log'"),
    "g positive logs": ({"gate_space": "log"}, r"g must be natural logs .*linear gates need gate_space='linear'"),
    "beta strides": ({"beta": strided(TOKENS["beta"])}, r"beta must be contiguous"),
    "scale": ({"scale": "0.1"}, r"scale must be a finite float.*got '0.1'"),
    "forget_below": ({"forget_below": 1.0}, r"forget_below must lie in \[0, 1\).*got 1.0"),
    "initial_state shape": ({"initial_state": STATE[:1]}, r"initial_state must have shape \(2, 2, 32, 32\)"),
    "initial_state dtype": ({"initial_state": STATE.double()}, r"initial_state must have dtype .*got torch.float64"),
    "initial_state overlaps": (
        {"initial_state": STATE[:1].expand(2, H, D, D)},
        r"initial_state must have positive strides that do not overlap, got \(0, ",
    ),
    "output_state overlaps": (
        {"output_state": torch.zeros(H * D * D + D * D).as_strided((2, H, D, D), (D * D, D * D, D, 1))},
        r"output_state must have positive strides that do not overlap",
    ),
    "output dtype": (
        {"output": torch.zeros(T, H, D).half()},
        r"output must have dtype torch.float32, got torch.float16",
    ),
    "output shape": ({"output": torch.zeros(T - 1, H, D)}, r"output must have shape \(128, 2, 32\)"),
    "output strides": ({"output": strided(torch.full((T, H, D), 7.0))}, r"output must be contiguous, got strides"),
    "checkpoint starts device": (
        {"checkpoint_every_n_tokens": 64, "state_checkpoints": ROWS, "checkpoint_cu_starts": STARTS.to("meta")},
        r"checkpoint_cu_starts must be on cpu like q, got meta",
    ),
    "_cp_chunk_len": (
        {"_cp_chunk_len": 100},
        r"_cp_chunk_len must be a positive multiple of the chunk size \(64\), got 100",
    ),
    "_cp_chunk_len bool": ({"_cp_chunk_len": True}, r"_cp_chunk_len must be a positive multiple .*got True"),
    "plan type": ({"plan": "plan"}, r"plan must be a PrefillPlan from plan_prefill, got str"),
    "plan lengths": (
        {"plan": gdncp.plan_prefill([128], num_q_heads=2, num_k_heads=2, num_v_heads=2, head_dim=D)},
        r"plan must have the call's sequence lengths \(64, 64\), got \(128,\)",
    ),
    "plan heads": (
        {"plan": gdncp.plan_prefill([64, 64], num_q_heads=4, num_k_heads=2, num_v_heads=2, head_dim=D)},
        r"q must have the plan's 4 heads, got 2",
    ),
    "plan positions": (
        {
            "plan": gdncp.plan_prefill(
                [64, 64], num_q_heads=2, num_k_heads=2, num_v_heads=2, head_dim=D, checkpoint_positions=[[5], [64]]
            )
        },
        r"plan must have no checkpoint_positions",
    ),
    "plan interval": ({"plan": PLAN}, r"plan must have checkpoint_every_n_tokens = 0 like the call, got 64"),
    "plan that splits": (
        {"plan": SPLITS, "cu_seqlens": None, "use_cp": False, "output_state": None},
        r"use_cp must be True or 'auto' with a plan that splits sequences, got False",
    ),
    "plan of another grid": (
        {"plan": SPLITS, "cu_seqlens": None, "_cp_chunk_len": 128, "output_state": None},
        r"_cp_chunk_len must be None or the plan's 64, got 128",
    ),
    "plan of another grid, by its first CP chunks": (
        {"plan": LONG_FIRST, "cu_seqlens": None, "_cp_chunk_len": 64, "output_state": None},
        r"_cp_chunk_len must be None with a plan whose first CP chunks have 128 tokens, got 64",
    ),
    "plan ranks": (
        {"plan": gdncp.plan_prefill([64, 64], num_q_heads=2, num_k_heads=2, num_v_heads=2, head_dim=D, world_size=2)},
        r"plan must have the group's 1 ranks, got 2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_is_refused(name):
    arguments, message = BAD[name]
    before = {key: x.clone() for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    output, final = torch.full((T, H, D), 7.0), torch.full((2, H, D, D), 7.0)
    good = {"cu_seqlens": cu([64, 64]), "output": output, "output_final_state": True, **TOKENS}
    if "state_indices" not in arguments:
        good["output_state"] = final
    gdncp.chunk_gated_delta_rule(**{name: x.clone() if torch.is_tensor(x) else x for name, x in good.items()})
    with pytest.raises(ValueError, match=message):
        gdncp.chunk_gated_delta_rule(**{**good, **arguments})
    assert bool((output == 7).all()) and bool((final == 7).all()), "something was written before the error"
    assert all(x.is_meta or torch.equal(arguments[key], x) for key, x in before.items())


def test_the_good_call_is_good():
    output, final = gdncp.chunk_gated_delta_rule(**TOKENS, cu_seqlens=cu([64, 64]), output_final_state=True)
    assert output.isfinite().all() and final.isfinite().all()


def test_words_come_before_shapes():
    """Errors come in one order, so that the first thing to mend is the first named."""
    with pytest.raises(ValueError, match="backend"):
        gdncp.chunk_gated_delta_rule(TOKENS["q"][None], None, None, backend="x", checkpoint_every_n_tokens=-1)
    with pytest.raises(ValueError, match="checkpoint_every_n_tokens"):
        gdncp.chunk_gated_delta_rule(TOKENS["q"][None], None, None, checkpoint_every_n_tokens=-1)


def test_a_device_that_no_backend_serves():
    meta = {name: x.to("meta") for name, x in TOKENS.items()}
    with pytest.raises(NotImplementedError, match="'meta'"):
        gdncp.chunk_gated_delta_rule(**meta, cu_seqlens_host=[0, T])
    with pytest.raises(NotImplementedError, match="'meta'"):
        gdncp.prefill(PLAN, **meta, check=True)


def test_a_plan_is_held_against_lengths_that_only_the_device_knows(monkeypatch):
    monkeypatch.setattr(validation, "cu_seqlens_arguments", lambda *_: None)
    with pytest.raises(ValueError, match="plan must have the 2 sequences of cu_seqlens, got 1"):
        gdncp.chunk_gated_delta_rule(**TOKENS, cu_seqlens=cu([64, 64]), plan=SPLITS)
    assert gdncp.chunk_gated_delta_rule(**TOKENS, cu_seqlens=cu([T]), plan=SPLITS).isfinite().all()


@pytest.mark.parametrize(
    "use_cp, asked, length",
    [("auto", None, 640), ("auto", 64, 64), (True, None, 256), (True, 128, 128), (False, None, 640), (False, 64, 640)],
)
def test_use_cp_and_the_length_asked_for_decide_how_a_sequence_is_cut(monkeypatch, use_cp, asked, length):
    """One worker gains nothing by a split, so "auto" leaves it whole; sqrt(64 · 640) is 203, rounded up to 256."""
    seen = []
    real = flashinfer_api.layout_of_plan
    monkeypatch.setattr(flashinfer_api, "layout_of_plan", lambda plan, *args: seen.append(plan) or real(plan, *args))
    gdncp.chunk_gated_delta_rule(**random_tokens(640, dim=D), use_cp=use_cp, _cp_chunk_len=asked)
    assert [plan.cp_chunk_len for plan in seen] == [length]


def test_a_prepared_plan_runs_as_it_says_and_numpy_ints_are_ints():
    tokens, heads = random_tokens(200, dim=D), {f"num_{x}_heads": H for x in "qkv"}
    plan = gdncp.plan_prefill([200], head_dim=D, cp_chunk_len=64, **heads)
    planned = gdncp.chunk_gated_delta_rule(**tokens, plan=plan, output_final_state=True)
    asked = gdncp.chunk_gated_delta_rule(
        **tokens, cu_seqlens_host=numpy.array([0, 200]), _cp_chunk_len=64, output_final_state=True
    )
    whole = gdncp.chunk_gated_delta_rule(**tokens, use_cp=False, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(planned, asked, strict=True))
    assert not torch.equal(planned[1], whole[1]), "several CP chunks round elsewhere than one"


def test_a_final_state_that_is_not_asked_for_is_still_written_where_it_is_wanted():
    final = torch.full((1, H, D, D), torch.nan)
    output = gdncp.chunk_gated_delta_rule(**TOKENS, output_state=final)
    assert isinstance(output, torch.Tensor)
    assert torch.equal(final, gdncp.chunk_gated_delta_rule(**TOKENS, output_final_state=True)[1])


def test_the_call_is_forward_only_and_takes_states_that_require_grad():
    initial, final = (random_state(1, H, D, seed=s).requires_grad_() for s in (1, 2))
    output, got = gdncp.chunk_gated_delta_rule(
        **TOKENS, initial_state=initial, output_state=final, output_final_state=True, _cp_chunk_len=64
    )
    assert got is final and not output.requires_grad


def test_a_nan_hides_no_wrong_gate():
    gates = torch.tensor([[float("nan"), -0.5]]).repeat(T, 1)
    with pytest.raises(ValueError, match=r"g must be linear .*got a minimum of -0.5"):
        gdncp.chunk_gated_delta_rule(**TOKENS | {"g": gates})
    with pytest.raises(ValueError, match=r"g must be linear .*got a maximum of 1.5"):
        gdncp.chunk_gated_delta_rule(**TOKENS | {"g": gates + 2})
    with pytest.raises(ValueError, match=r"g must be natural logs .*got a maximum of 0.5"):
        gdncp.chunk_gated_delta_rule(**TOKENS | {"g": -gates}, gate_space="log")


def test_a_default_device_changes_nothing():
    """Engines set one; what the host makes for itself stays there.  A length of its own, so that nothing is cached."""
    tokens = random_tokens(173, dim=D)
    plan = gdncp.plan_prefill([173], num_q_heads=H, num_k_heads=H, num_v_heads=H, head_dim=D, cp_chunk_len=64)
    with torch.device("meta"):
        result = gdncp.prefill(plan, **tokens, check=True)
        reference = gdncp.gated_delta_rule_reference(**tokens)
    assert (result.output - reference.output).norm() < 2e-5 * reference.output.norm()


BAD_PREFILL = {
    "tokens": ({"q": TOKENS["q"][:100]}, r"q must have 128 tokens that the plan gives this rank, got shape \(100, "),
    "heads": (
        {"q": TOKENS["q"][:, :1].contiguous(), "k": TOKENS["k"][:, :1].contiguous()},
        r"q must have the plan's 2 heads, got 1",
    ),
    "head dim": (
        {n: TOKENS[n][..., :16].contiguous() for n in "qk"},
        r"q must have the plan's head dim 32, got 16",
    ),
    "final_state": ({"final_state": "none"}, r"final_state must be one of 'owner', 'all', got 'none'"),
    "two sources": (
        {"initial_state": STATE, "state_pool": STATE, "state_indices": torch.tensor([0, 1])},
        r"initial_state must be None where state_pool is given",
    ),
    "pool without slots": ({"state_pool": STATE}, r"state_pool and state_indices must both be provided"),
    "checkpoint rows": ({"state_checkpoints": ROWS[:1]}, r"state_checkpoints must have shape \(2, 2, 32, 32\)"),
    "plan": ({"plan": 3}, r"plan must be a PrefillPlan"),
}


@pytest.mark.parametrize("check", [False, True], ids="check={}".format)
@pytest.mark.parametrize("name", BAD_PREFILL)
def test_prefill_refuses(name, check):
    arguments, message = BAD_PREFILL[name]
    with pytest.raises(ValueError, match=message):
        gdncp.prefill(**{"plan": PLAN, **TOKENS, "check": check, **arguments})


def test_a_plan_of_several_ranks_needs_a_group():
    plan = gdncp.plan_prefill([128], num_q_heads=2, num_k_heads=2, num_v_heads=2, head_dim=D, world_size=2)
    with pytest.raises(ValueError, match="group must be given for a plan of 2 ranks"):
        gdncp.prefill(plan, **TOKENS)


@pytest.mark.parametrize(
    ("dtype", "precision", "planned", "given", "expected"),
    [
        (torch.float32, "fast", None, None, 2.0**-24),
        (torch.bfloat16, "fast", None, None, 2.0**-16),
        (torch.float16, "high", None, None, 2.0**-24),
        (torch.float32, "fast", 0.01, None, 0.01),
        (torch.float32, "fast", 0, None, 0.0),
        (torch.float32, "fast", 0.01, 0, 0.0),
    ],
)
def test_the_forgetting_bound_is_the_calls_the_plans_or_the_dtypes(dtype, precision, planned, given, expected):
    heads = {f"num_{x}_heads": H for x in "qkv"}
    plan = gdncp.plan_prefill([T], head_dim=D, cp_chunk_len=64, forget_below=planned, **heads)
    tokens = random_tokens(T, dim=D, dtype=dtype)
    summary = gdncp.summarise(plan, **tokens, precision=precision, forget_below=given)
    assert summary.call.forget_below == expected
