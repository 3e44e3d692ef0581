"""What every file below conf/ and every override is checked against, and how a bad one is explained.

Values and their comments are in conf/prefill.yaml and conf/input/; types are here.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

PACKAGE = Path(__file__).resolve().parents[1]
CONF_DIR = next(d for d in (PACKAGE / "conf", PACKAGE.parent / "conf") if d.is_dir())  # installed, or a checkout

Fixup = Enum("Fixup", ["auto", "chain", "all_gather", "head_sharded", "tree"])
LanesBy = Enum("LanesBy", ["cp_chunks", "heads"])
Finish = Enum("Finish", ["auto", "entry_first", "entry_late"])
GateSpace = Enum("GateSpace", ["linear", "log"])
Precision = Enum("Precision", ["fast", "high"])
FinalState = Enum("FinalState", ["owner", "all"])
Device = Enum("Device", ["auto", "cpu", "cuda"])
Gates = Enum("Gates", ["never_forgets", "weak", "mixed", "real", "strong"])
Dtype = Enum("Dtype", ["bfloat16", "float16", "float32"])


@dataclass  # not frozen: OmegaConf makes a frozen dataclass read-only, which refuses command-line overrides
class InputConfig:
    pass


@dataclass
class SyntheticConfig(InputConfig):
    seq_lens: list[int] = MISSING
    num_q_heads: int = MISSING
    num_k_heads: int = MISSING
    num_v_heads: int = MISSING
    head_dim: int = MISSING
    dtype: Dtype = MISSING
    gates: Gates = MISSING
    beta: tuple[float, float] = MISSING
    initial_state: bool = MISSING
    seed: int = MISSING


@dataclass
class TensorsConfig(InputConfig):
    path: str = MISSING


@dataclass
class PrefillConfig:
    _cp_chunk_len: int | None = MISSING
    ownership: Any = MISSING
    fixup: Fixup = MISSING
    fold_span: int | None = MISSING
    finish: Finish = MISSING
    lanes_per_rank: int | None = MISSING
    lanes_by: LanesBy = MISSING
    require_reproducible: bool = MISSING
    profile: str | None = MISSING
    checkpoint_every_n_tokens: int | None = MISSING
    scale: float | None = MISSING
    gate_space: GateSpace = MISSING
    use_qk_l2norm_in_kernel: bool | None = MISSING
    backend: str = MISSING
    use_cp: Any = MISSING
    precision: Precision = MISSING
    forget_below: float | None = MISSING
    final_state: FinalState = MISSING
    check: bool = MISSING
    device: Device = MISSING
    warmup: int = MISSING
    repeat: int = MISSING
    verify: bool = MISSING
    run_dir: str = MISSING
    input: InputConfig = field(default_factory=InputConfig)


def register_schema() -> None:
    store = ConfigStore.instance()
    store.store(name="prefill_schema", node=PrefillConfig)
    store.store(group="input", name="synthetic_schema", node=SyntheticConfig)
    store.store(group="input", name="tensors_schema", node=TensorsConfig)


register_schema()


class UsageError(Exception):
    """The command line or a file it names is wrong; the text says how and names what is meant."""


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The configuration in plain values: enums as words, interpolations resolved."""
    return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)  # type: ignore[return-value]  # a dict


# ---- --config NAME_OR_PATH


def translate(arguments: Sequence[str]) -> tuple[list[str], str, list[Path]]:
    """A command line as Hydra wants it: without `--config X`, which it finds ambiguous, and with its flags in front.

    Returns also the name of the config to start from, and the folder of a file given by path, which is searched for the
    groups that it names.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    try:
        known, left = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from None
    overrides = get_args_parser().parse_intermixed_args(left).overrides  # Hydra's own call wants them in one run
    left = [argument for argument in left if argument not in overrides] + overrides
    if not known.config:
        return left, "prefill", []
    if len(known.config) > 1:
        raise UsageError(f"--config takes one name or path, got {', '.join(known.config)}")
    given, path = known.config[0], Path(known.config[0]).expanduser()
    names = config_names()
    if given in names:
        return left, given, []
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(
            f"--config {given}: no such name in conf/ and no path to a .yaml file; {_nearest(given, names)}"
        )
    folder = path.absolute().parent
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return [*left, f"hydra.searchpath=['file://{quoted}']"], _store_file(path), [folder]


def _store_file(path: Path) -> str:
    """Register a YAML file under a name that nothing in conf/ has; returns the name.

    A file without `defaults` adds to `prefill`: Hydra by itself would drop the schema and check nothing.
    """
    if not path.is_file():
        raise UsageError(f"--config {path}: no such file")
    try:
        node = OmegaConf.load(path)
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from None
    if not isinstance(node, DictConfig):
        raise UsageError(f"--config {path}: must hold keys and values")
    content = {"defaults": ["prefill", "_self_"]} | OmegaConf.to_container(node, resolve=False)  # type: ignore[operator]  # dicts
    name = f"{path.stem}_given_by_path"
    ConfigStore.instance().store(name=name, node=content)
    return name


def config_names() -> list[str]:
    """What `--config` takes by name."""
    return sorted(file.stem for file in CONF_DIR.glob("*.yaml"))


# ---- errors that name the nearest valid key


def check(name: str, arguments: Sequence[str]) -> None:
    """Compose every value of every override once, before anything runs.

    Raises:
        UsageError: an unknown key or a wrong type, with the nearest valid key.
    """
    parsed = get_args_parser().parse_args(list(arguments))
    if parsed.help or parsed.hydra_help or parsed.info or parsed.shell_completion:
        return
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        for overrides in _points(parsed.overrides, parsed.multirun):
            try:
                cfg = compose(parsed.config_name or name, overrides)
            except (HydraException, OmegaConfBaseException) as error:
                raise UsageError(explain(error)) from None
            unknown = {*_keys(cfg)} - {*valid_keys()}
            if unknown:  # `+key=value` passes by the schema
                raise UsageError(f"unknown key {min(unknown)}; {_nearest(min(unknown), valid_keys())}")
            missing = sorted(OmegaConf.missing_keys(cfg))
            if missing and not parsed.cfg:
                raise UsageError(f"{', '.join(missing)} must be given")


def _points(overrides: Sequence[str], multirun: bool) -> Iterator[list[str]]:
    """The first value of every override, then every other value in its place."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        values = [
            [o.get_key_element() + "=" + str(x) for x in o.sweep_string_iterator()] if o.is_sweep_override() else [text]
            for text, o in zip(overrides, parsed, strict=True)
        ]
    except HydraException as error:
        raise UsageError(str(error).split("\nSee")[0]) from None
    for text, choices in zip(overrides, values, strict=True):
        if len(choices) > 1 and not multirun:
            raise UsageError(f"{text}: several values need --multirun; a list is written {_as_list(text)}")
    first = [choices[0] for choices in values]
    yield first
    for i, choices in enumerate(values):
        for other in choices[1:]:
            yield [*first[:i], other, *first[i + 1 :]]


def _as_list(text: str) -> str:
    key, _, value = text.partition("=")
    return f"{key}=[{value}]"


def _keys(cfg: DictConfig) -> Iterator[str]:
    content: Any = OmegaConf.to_container(cfg, resolve=False)
    for key, value in content.items():
        yield from (f"{key}.{inner}" for inner in value) if isinstance(value, dict) else (key,)


def valid_keys() -> list[str]:
    """Every key of the schema, those of all input groups included."""
    inputs = itertools.chain(SyntheticConfig.__dataclass_fields__, TensorsConfig.__dataclass_fields__)
    return [*PrefillConfig.__dataclass_fields__, *(f"input.{key}" for key in inputs)]


def _nearest(word: str, among: Sequence[str]) -> str:
    return f"the nearest valid one is {difflib.get_close_matches(word, among, n=1, cutoff=0.0)[0]}"


def explain(error: BaseException) -> str:
    """Hydra's and OmegaConf's errors in one sentence that names the key and what is valid."""
    group = re.search(r"Could not find 'input/(\w+)'", str(error))
    if group:
        choices = ["input=synthetic", "input=tensors"]
        return f"input={group[1]}: no such choice; {_nearest(f'input={group[1]}', choices)}"
    # Hydra raises from OmegaConf's error or quotes it; either way these lines are in the text
    text = f"{error}\n{error.__cause__ or ''}"
    full_key = re.search(r"full_key: ([^\s\[]+)", text)
    what = re.search(r"^(Key|Value|Invalid value|Incompatible value|Cannot|Unsupported).*", text, re.MULTILINE)
    if not full_key or not what:
        return str(error)
    key = full_key[1]
    if what[1] != "Key":
        return f"{key}: {what[0]}"
    if key in valid_keys():
        owner = "synthetic" if key.removeprefix("input.") in SyntheticConfig.__dataclass_fields__ else "tensors"
        return f"key {key} belongs to input={owner}"
    return f"unknown key {key}; {_nearest(key, valid_keys())}"
