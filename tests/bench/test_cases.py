"""Shapes, inputs and the float64 reference."""

import math

import pytest
import torch

from gdncp.bench import reference
from gdncp.bench.cases import HALF_LIVES, PRESETS, Case, Shape

CPU = torch.device("cpu")


def test_shapes_read_and_write_themselves():
    shape = Shape.parse("32768x2:16/32")
    assert (shape.num_tokens, shape.num_state_heads, str(shape)) == (65536, 32, "32768x2:16/32")
    for preset in PRESETS.values():
        assert [str(Shape.parse(text)) for text in preset.shapes] == list(preset.shapes)


@pytest.mark.parametrize("text", ["", "32768", "0x1:2/2", "64x1:3/2", "64x1:2", "64x1:2/2/2"])
def test_what_is_no_shape_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match=r"as 32768x1:16/32") as raised:
        Shape.parse(text)
    assert repr(text) in str(raised.value)


def test_the_floor_counts_products_and_bytes():
    shape = Shape(64, 1, 1, 2)
    # per state head: W S, Q S and U K are 64 x 128 x 128, T U and P U are 64 x 64 x 128; per key head: K K and Q K
    products = 2 * (3 * 64 * 128 * 128 + 2 * 64 * 64 * 128) + 2 * 64 * 64 * 128
    assert shape.tensor_flops() == 2 * products
    # q, k; v, o; two gates; two states
    assert shape.hbm_bytes(2) == 2 * 64 * 128 * (2 + 2 + 2) + 64 * 2 * 2 * 4 + 2 * 128 * 128 * 4


@pytest.mark.parametrize("gates", ["forget", "one"])
def test_inputs_are_what_the_preset_says(gates):
    case = Case(Shape(512, 1, 2, 4, 16), gates, torch.bfloat16, CPU)
    first, again, other = case.tokens(1), case.tokens(1), case.tokens(2)
    assert torch.equal(first.v, again.v) and not torch.equal(first.v, other.v)
    assert torch.allclose(first.k.float().norm(dim=-1), torch.ones(512, 2), atol=1e-2)  # bf16
    assert torch.equal(first.alpha, first.log_alpha.exp())
    if gates == "one":
        assert bool((first.alpha == 1).all())
    else:
        half_lives = math.log(2) / -first.log_alpha.double().mean(0)
        wanted = torch.logspace(*(math.log10(x) for x in HALF_LIVES), 4, dtype=torch.float64)
        assert bool(((half_lives / wanted).log2().abs() < 0.1).all())  # 512 uniform draws


def test_the_chunked_reference_is_held_against_the_oracle():
    assert reference.check_reference(CPU) <= reference.AGREEMENT


def test_a_reference_that_is_off_stops_the_run(monkeypatch):
    true = reference.chunked
    monkeypatch.setattr(reference, "chunked", lambda *a: true(*a)._replace(output=true(*a).output * (1 + 1e-9)))
    with pytest.raises(RuntimeError, match="off the oracle"):
        reference.check_reference(CPU)


def test_blocks_and_tails_of_long_sequences(monkeypatch):
    case = Case(Shape(400, 2, 2, 2, 16), "one", torch.float32, CPU)
    tokens = case.tokens(3)
    monkeypatch.setattr(reference, "BLOCK_TOKENS", 128)
    found, true = reference.chunked(case, tokens), reference.oracle(case, tokens)
    assert reference.errors(case, found.output, found.final_state, true).worst <= reference.AGREEMENT


def test_one_wrong_head_shows_and_so_does_what_was_not_written():
    case = Case(Shape(64, 2, 1, 8, 16), "one", torch.float32, CPU)
    true = reference.truth(case, case.tokens(4))
    output = true.output.clone()
    output[64:, 5] *= 1.1  # all of one head, in the second sequence alone
    error = reference.errors(case, output, true.final_state, true)
    assert error.output < 0.05 and error.output_worst == pytest.approx(0.1) and error.state == error.state_worst == 0
    output[0, 0, 0] = torch.nan
    assert reference.errors(case, output, true.final_state, true).worst == math.inf
