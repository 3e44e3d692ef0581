"""Each adapter hands over what its library asks for: stand-ins with the libraries' signatures, computing in torch."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import gdncp
from gdncp import compat
from gdncp.bench.cases import Case, Shape
from gdncp.bench.peers import Fla, FlashInfer, FlashQla, peers
from gdncp.bench.prepare import jobs
from gdncp.bench.reference import errors, truth
from gdncp.bench.run import TOLERANCE, all_engines

CPU = torch.device("cpu")


@pytest.fixture
def libraries(monkeypatch):
    """The libraries' modules; what each was last asked for is in the dict."""
    asked = {}

    def module(name, **contents):
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    def flashinfer(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, **arguments):
        asked["flashinfer"] = arguments | {"g": g}
        arguments.pop("use_cp")
        return gdncp.chunk_gated_delta_rule(
            q, k, v, g, beta, scale, initial_state, output_final_state, **arguments, use_cp=False
        )

    def flash_qla(q, k, v, g, beta, scale=None, cp_context=None, **arguments):
        asked["flash_qla"] = arguments | {"cp_context": cp_context}
        return compat.chunk_gated_delta_rule(q, k, v, g, beta, scale, **arguments)

    def fla(q, k, v, g=None, beta=None, scale=None, **arguments):
        asked["fla"] = arguments
        return compat.chunk_gated_delta_rule(q, k, v, g, beta, scale, **arguments)

    def build_cp_context(cu_seqlens, *, enable_intra, num_v_heads, chunk_size, is_train, g):
        assert enable_intra and not is_train and chunk_size == 64 and g.shape == (1, 200, num_v_heads)
        return SimpleNamespace(is_intra=True)

    module("flashinfer")
    module("flashinfer.gdn_prefill", chunk_gated_delta_rule=flashinfer, chunk_gated_delta_rule_sm90=object())
    module("flash_qla", chunk_gated_delta_rule=flash_qla, __version__="9.9")
    for name in ("flash_qla.ops", "flash_qla.ops.gated_delta_rule", "fla", "fla.ops"):
        module(name)
    module("flash_qla.ops.gated_delta_rule.chunk", build_cp_context=build_cp_context, CHUNK_SIZE=64)
    module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=fla)
    return asked


@pytest.mark.parametrize("engine", peers(), ids=lambda engine: engine.name)
@pytest.mark.parametrize("num_seqs", [1, 2])
def test_inputs_and_results_are_converted(libraries, engine, num_seqs):
    case = Case(Shape(200 // num_seqs, num_seqs, 1, 2, 32), "forget", torch.bfloat16, CPU)
    tokens = case.tokens(0)
    bound = engine.bind(case, [tokens])
    result = bound.calls[0]()
    error = errors(case, result.output, result.final_state, truth(case, tokens))
    assert error.worst < TOLERANCE[torch.bfloat16], error

    (asked,) = libraries.values()
    if isinstance(engine, FlashInfer):
        assert asked["use_cp"] == {"auto": "auto", "cp": True, "no-cp": False}[engine.name.split(":")[1]]
        assert asked["g"] is tokens.alpha and asked["max_seqlen"] == case.shape.seq_len
        assert asked["cu_seqlens"].dtype == torch.int32
    else:  # no offsets for one sequence: the forms that the libraries are fastest in
        wanted = torch.int64 if isinstance(engine, Fla) else torch.int32
        assert asked["cu_seqlens"] is None if num_seqs == 1 else asked["cu_seqlens"].dtype == wanted
    if isinstance(engine, FlashQla):
        assert (asked["cp_context"] is not None) == (engine.name == "flashqla:gates")
        assert engine.version() == "9.9"


def test_what_is_not_installed_says_so(monkeypatch):
    cuda = torch.device("cuda")
    for name in ("flashinfer", "flash_qla", "fla"):
        monkeypatch.setitem(sys.modules, name, None)
    for engine in peers():
        assert engine.absent_reason(cuda).startswith("cannot be imported (ModuleNotFoundError: ")
        assert engine.absent_reason(CPU) == "needs a CUDA device."


def test_what_a_peer_cannot_run_is_rejected():
    case = Case(Shape(64, 1, 1, 1, 64), "one", torch.bfloat16, CPU)
    assert FlashInfer("auto", "auto").rejection_reason(case) == "the head dim is 64; it takes 128."
    assert "float32" in Fla().rejection_reason(Case(Shape(64, 1, 1, 1), "one", torch.float32, CPU))


def test_each_library_compiles_each_head_configuration_once_peers_first():
    shapes = [Shape.parse(text) for text in ("64x1:2/4", "128x1:2/4", "64x2:1/1")]
    assert jobs(all_engines(), shapes) == [
        (library, heads) for library in ("flashqla", "fla", "hopper", "triton", "torch") for heads in ("2/4", "1/1")
    ]
