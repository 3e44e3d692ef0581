"""What a layer hands to its delta rule is what lands in the file."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from gdncp import capture
from gdncp.cli.inputs import TensorFile

transformers = pytest.importorskip("transformers")
DATA = Path(__file__).parents[2] / "launch" / "data" / "qwen3_next_layer_8k.safetensors"


def tiny_qwen3_5():
    torch.manual_seed(0)
    return transformers.Qwen3_5TextModel(
        transformers.Qwen3_5TextConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            layer_types=["linear_attention", "linear_attention"],
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        )
    ).eval()


@pytest.mark.parametrize(
    "make, layer", [(capture.tiny_qwen3_next, 0), (tiny_qwen3_5, 1)], ids=["qwen3_next", "qwen3_5"]
)
def test_captured_inputs_give_the_layers_own_output(make, layer):
    """Run transformers' function on what was captured: it must give what the layer computes by itself."""
    model, ids = make(), torch.arange(70) * 7 % 256
    module = sys.modules[type(capture.gated_delta_net_layers(model)[layer]).__module__]
    rule, calls = module.torch_chunk_gated_delta_rule, []

    def listen(*args, **kwargs):
        result = rule(*args, **kwargs)
        calls.append(result[0])
        return result

    module.torch_chunk_gated_delta_rule = listen
    try:
        with torch.no_grad():
            model(input_ids=ids[None], use_cache=False)
    finally:
        module.torch_chunk_gated_delta_rule = rule
    x = capture.capture_layer(model, layer, [ids])
    assert module.torch_chunk_gated_delta_rule is rule, "the model must be left as it was"
    q, k, v, g, beta = (x[name][None] for name in ("q", "k", "v", "g_log", "beta"))
    again = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
    assert torch.equal(again, calls[layer])
    torch.testing.assert_close(x["g"], x["g_log"].exp())


def test_sequences_are_captured_apart():
    model, ids = capture.tiny_qwen3_next(), torch.arange(50)
    both = capture.capture_layer(model, 0, [ids, ids[:20]])
    alone = capture.capture_layer(model, 0, [ids[:20]])
    assert both["cu_seqlens"].tolist() == [0, 50, 70] and both["cu_seqlens"].dtype == torch.int32
    for name in ("q", "v", "g_log"):  # the convolution does not reach back into the sequence before
        torch.testing.assert_close(both[name][50:], alone[name])


def test_command_writes_a_file_that_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_bytes(b"Some text, read as bytes." * 10)
    out = tmp_path / "layer.safetensors"
    monkeypatch.setattr(
        sys, "argv", ["capture", "--out", str(out), "--text", str(tmp_path / "text"), "--tokens", "100", "30"]
    )
    capture.main()
    source = TensorFile(out)
    assert source.shape.seq_lens == (100, 30) and source.shape.dtype == torch.bfloat16
    assert source.defaults.use_qk_l2norm_in_kernel
    assert "half-life" in capsys.readouterr().out


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="has 1 Gated DeltaNet layers"):
        capture.capture_layer(capture.tiny_qwen3_next(), 1, [torch.arange(4)])
    with pytest.raises(ValueError, match="needs 11 tokens, but the text has 10"):
        capture.cut(torch.arange(10), [8, 3])


def test_the_shipped_file_is_what_the_readme_promises():
    source = TensorFile(DATA)
    assert source.shape.seq_lens == (8192, 700) and DATA.stat().st_size < 10e6
    with safe_open(DATA, "pt") as file:
        half_lives = 0.693 / -file.get_tensor("g_log").mean(0)
    assert half_lives.min() < 16 and half_lives.max() > 4096, "gates that forget and gates that remember"
