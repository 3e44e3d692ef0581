"""Every file below conf/ composes, and what is wrong is refused with the nearest valid key."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from gdncp.cli import config as conf


@pytest.fixture(autouse=True)
def _fresh_hydra():
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


def composed(name, *overrides):
    with initialize_config_dir(str(conf.CONF_DIR), version_base="1.3"):
        return compose(name, list(overrides))


@pytest.mark.parametrize("name", conf.config_names())
def test_named_config_composes_with_every_value_set(name):
    cfg = composed(name)
    assert not OmegaConf.missing_keys(cfg)
    assert isinstance(OmegaConf.to_object(cfg), conf.PrefillConfig)


@pytest.mark.parametrize("path", sorted((conf.CONF_DIR / "input").glob("*.yaml")), ids=lambda path: path.stem)
def test_input_group_composes(path):
    cfg = composed("prefill", f"input={path.stem}")
    assert OmegaConf.missing_keys(cfg) <= {"input.path"}


def test_enums_become_words():
    config = conf.plain(composed("prefill", "fixup=chain", "_cp_chunk_len=128"))
    assert config["fixup"] == "chain" and config["input"]["dtype"] == "bfloat16" and config["_cp_chunk_len"] == 128


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["_cp_chunk=64"], "unknown key _cp_chunk; the nearest valid one is _cp_chunk_len"),
        (["input.seqlens=[3]"], "unknown key input.seqlens; the nearest valid one is input.seq_lens"),
        (["input.path=x"], "input.path belongs to input=tensors"),
        (["+fix_up=chain"], "unknown key fix_up; the nearest valid one is fixup"),
        (["_cp_chunk_len=many"], "_cp_chunk_len: Value 'many' of type 'str' could not be converted to Integer"),
        (["fixup=tre"], r"fixup: Invalid value 'tre', expected one of \[auto, chain"),
        (["input=tensor"], "the nearest valid one is input=tensors"),
        (["input=tensors"], "input.path must be given"),
        (["lanes_per_rank=1,2"], r"several values need --multirun; a list is written lanes_per_rank=\[1,2\]"),
        (["--multirun", "lanes_per_rank=1,many"], "lanes_per_rank: Value 'many'"),
        (["ownership=[["], r"\[\["),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_command_line_is_explained(arguments, says):
    with pytest.raises(conf.UsageError, match=says):
        conf.check("prefill", arguments)


def test_config_by_name_and_flags_among_overrides():
    arguments, name, folders = conf.translate(["check=false", "--config", "demo", "--multirun", "repeat=1,2"])
    assert (arguments, name, folders) == (["--multirun", "check=false", "repeat=1,2"], "demo", [])
    assert conf.translate(["--config=demo"])[1] == "demo"
    assert conf.translate(["repeat=1"]) == (["repeat=1"], "prefill", [])


@pytest.mark.parametrize("given", ["demoo", "no/such.yaml", ""])
def test_a_config_that_is_not_there(given):
    with pytest.raises(conf.UsageError, match="--config"):
        conf.translate(["--config", given])


def test_a_file_without_defaults_is_checked_too(tmp_path):
    path = tmp_path / "it's mine.yaml"
    path.write_text("repeat: 3\ninput: {head_dim: 32}\n")
    arguments, name, folders = conf.translate(["--config", str(path), "warmup=0"])
    conf.check(name, arguments)
    cfg = composed(name, *arguments)
    assert (cfg.repeat, cfg.warmup, cfg.input.head_dim, cfg.input.seed) == (3, 0, 32, 0)
    assert folders == [tmp_path]
    path.write_text("repeatt: 3\n")
    with pytest.raises(conf.UsageError, match="unknown key repeatt; the nearest valid one is repeat"):
        conf.check(conf.translate(["--config", str(path)])[1], [])


def test_a_file_may_bring_its_own_groups(tmp_path):
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "short.yaml").write_text("defaults: [synthetic, _self_]\nseq_lens: [5]\n")
    path = tmp_path / "mine.yaml"
    path.write_text("defaults:\n  - prefill\n  - override input: short\n  - _self_\n")
    arguments, name, _ = conf.translate(["--config", str(path)])
    conf.check(name, arguments)
    assert composed(name, *arguments).input.seq_lens == [5]
