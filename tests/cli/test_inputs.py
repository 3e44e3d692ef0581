"""The same tokens whoever makes them, and no rank reads another's."""

import json

import pytest
import torch
from safetensors.torch import save_file

from gdncp.cli import inputs
from gdncp.cli.inputs import PROFILES, Shape, Synthetic, TensorFile

SHAPE = Shape((700, 0, 1500), 2, 2, 4, 16, torch.bfloat16)


@pytest.mark.parametrize("gates", PROFILES)
def test_synthetic_tokens_do_not_depend_on_who_makes_them(gates):
    source = Synthetic(SHAPE, gates=gates)
    whole = source.tokens([(0, 2200)], "linear")
    parts = [source.tokens(ranges, "linear") for ranges in ([(0, 100), (2100, 2200)], [(100, 1030)], [(1030, 2100)])]
    for name, x in whole.items():
        first, rest = parts[0][name], torch.cat([part[name] for part in parts[1:]])
        assert torch.equal(x, torch.cat([first[:100], rest, first[100:]])), name
        assert x.shape[0] == 2200
    assert source.tokens([], "linear")["q"].shape == (0, 2, 16)


def test_seeds_and_blocks_differ():
    draws = [Synthetic(SHAPE, seed=s).tokens([(at, at + 1)], "linear")["v"] for s in (0, 1) for at in (0, 1024)]
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 4


@pytest.mark.parametrize("gates", PROFILES)
def test_gate_profiles_are_what_they_say(gates):
    source = Synthetic(Shape((4096,), 1, 1, 4, 16, torch.float32), gates=gates)
    log_alpha = source.tokens([(0, 4096)], "log")["g"]
    alpha = source.tokens([(0, 4096)], "linear")["g"]
    torch.testing.assert_close(log_alpha.exp(), alpha, rtol=1e-4, atol=0)  # a log of -300 rounds by 1.5e-5
    assert log_alpha.dtype == torch.float32 and bool((log_alpha <= 0).all())
    resets = int((log_alpha == -torch.inf).sum())
    assert (resets > 0) == (gates == "real")
    half_lives = -(0.5 ** torch.ones(4)).log() / -log_alpha.median(0).values
    if gates == "never_forgets":
        assert bool((log_alpha == 0).all())
    elif gates in ("mixed", "real"):
        torch.testing.assert_close(half_lives, torch.tensor([4.0, 64.0, 1024.0, 16384.0]), rtol=0.1, atol=0)
    else:
        assert bool((half_lives > 4000).all() if gates == "weak" else (half_lives < 1).all())


def test_keys_have_unit_length_unless_the_call_normalises_them():
    for normalise in (True, False):
        k = Synthetic(SHAPE, normalise=normalise).tokens([(0, 50)], "linear")["k"].float()
        assert bool((k.norm(dim=-1) - 1).abs().max() < 1e-2) == normalise


@pytest.fixture
def file(tmp_path):
    tokens = Synthetic(SHAPE).tokens([(0, 2200)], "linear")
    tensors = {
        **tokens,
        "g_log": tokens["g"].log(),
        "cu_seqlens": torch.tensor([0, 700, 700, 2200], dtype=torch.int32),
        "state_pool": torch.arange(5.0)[:, None, None, None].expand(5, 4, 16, 16).contiguous(),
        "state_indices": torch.tensor([4, 0, 2]),
        "expected_output": torch.zeros(2200, 4, 16),
    }
    case = {"seq_lens": [700, 0, 1500], "scale": 0.5, "checkpoint_every_n_tokens": 64, "use_qk_l2norm_in_kernel": True}
    save_file(tensors, tmp_path / "x.safetensors", {"case": json.dumps(case)})
    return tmp_path / "x.safetensors", tensors


def test_a_rank_reads_only_its_own_tokens(file, monkeypatch):
    path, tensors = file
    source = TensorFile(path)
    read = []

    class Rows:
        def __init__(self, name, rows):
            self.name, self.rows = name, rows

        def __getitem__(self, key):
            read.append((self.name, key.start, key.stop))
            return self.rows[key]

    class Spy:
        def __init__(self, *args):
            self.file = real(*args)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def get_slice(self, name):
            return Rows(name, self.file.get_slice(name))

    real = inputs.safe_open
    monkeypatch.setattr(inputs, "safe_open", Spy)
    got = source.tokens([(10, 20), (800, 900)], "log")
    assert {entry[1:] for entry in read} == {(10, 20), (800, 900)}
    for name, stored in {"q": "q", "k": "k", "v": "v", "g": "g_log", "beta": "beta"}.items():
        assert torch.equal(got[name], torch.cat([tensors[stored][10:20], tensors[stored][800:900]]))


def test_a_file_says_what_its_call_is(file):
    source = TensorFile(file[0])
    assert source.shape == SHAPE
    assert source.defaults == inputs.Defaults(0.5, True, 64)
    states = source.initial_states([0, 2])
    assert states.shape == (3, 4, 16, 16) and states[:, 0, 0, 0].tolist() == [4.0, 0.0, 2.0]
    assert source.expected("output", (3, 5)).shape == (2, 4, 16)
    assert source.expected("final_state", (0, 1)) is None


def test_a_file_that_does_not_add_up_is_refused(tmp_path):
    x = torch.zeros(10, 1, 8)
    for tensors, says in [
        ({"q": x, "k": x.clone()}, "lacks tensors"),
        ({"q": x, "k": x.clone(), "v": x.clone(), "cu_seqlens": torch.tensor([0, 9])}, "do not make up its 10 tokens"),
    ]:
        save_file(tensors, tmp_path / "x.safetensors")
        with pytest.raises(ValueError, match=says):
            TensorFile(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "change, says",
    [
        (
            {"state_indices": torch.tensor([4, -1, 2])},
            r"3 different slots in \[0, 5\), one per sequence, got \[4, -1, 2\]",
        ),
        ({"state_indices": torch.tensor([4, 5, 2])}, "different slots in"),
        ({"state_indices": torch.tensor([4, 4, 2])}, "different slots in"),
        ({"state_indices": torch.tensor([4])}, "different slots in"),
        ({"state_indices": None}, r"lacks tensors \['state_indices'\]"),
        ({"expected_output": torch.zeros(9, 4, 16)}, "expected_output must have 2200 rows, got 9"),
        ({"metadata": "{"}, "metadata 'case' must be a JSON object, got '{'"),
        ({"metadata": "[1]"}, "metadata 'case' must be a JSON object"),
    ],
)
def test_a_file_that_would_be_misread_is_refused(file, change, says):
    path, tensors = file
    tensors = {name: tensor for name, tensor in (tensors | change).items() if isinstance(tensor, torch.Tensor)}
    save_file(tensors, path, {"case": change.get("metadata", "{}")})
    with pytest.raises(ValueError, match=says):
        TensorFile(path)


@pytest.mark.parametrize("size", [0, 5, 3000])
def test_a_file_that_was_cut_short_is_refused_by_name(file, size):
    path, _ = file
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"input.path=.*x\.safetensors is not a whole safetensors file"):
        TensorFile(path)


def test_an_input_is_found_from_here_or_in_the_repository(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.st").touch()
    assert inputs.find_input("x.st", tmp_path, tmp_path / "a") == tmp_path / "a" / "x.st"
    with pytest.raises(ValueError, match="looked for"):
        inputs.find_input("y.st", tmp_path, tmp_path / "a")
