"""Where a run's tokens come from: a seed, or a safetensors file.  A rank makes or reads only its own."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from gdncp.backends.base import GateSpace

TokenRanges = Sequence[tuple[int, int]]  # global half-open ranges
MAX_HALF_LIFE, MIN_HALF_LIFE = 16384.0, 4.0  # tokens, of the profile "mixed"


@dataclass(frozen=True)
class Shape:
    """What the planner needs to know of an input."""

    seq_lens: tuple[int, ...]
    num_q_heads: int
    num_k_heads: int
    num_v_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        return sum(self.seq_lens)

    @property
    def num_state_heads(self) -> int:
        return max(self.num_q_heads, self.num_v_heads)


@dataclass(frozen=True)
class Defaults:
    """What an input says of the call, for keys that the configuration leaves open."""

    scale: float | None = None
    use_qk_l2norm_in_kernel: bool = False
    checkpoint_every_n_tokens: int = 0


class Source(Protocol):
    shape: Shape
    defaults: Defaults

    def tokens(self, ranges: TokenRanges, gate_space: GateSpace) -> dict[str, torch.Tensor]:
        """q, k, v [n, heads, D] and, unless they are ones, g and beta [n, H] fp32, of these tokens in this order."""
        ...

    def initial_states(self, sequences: Sequence[int]) -> torch.Tensor | None:
        """[N, H, V, K]: rows of `sequences`; the others are zeros, not meant to be read.  None: all start at zero."""
        ...

    def expected(self, name: str, rows: tuple[int, int]) -> torch.Tensor | None:
        """Rows of what should come out: name "output" by token, "final_state" by sequence, "checkpoints" by row."""
        ...


class Synthetic:
    """Tokens from a seed: each block of 1024 has a generator of its own, so that they do not depend on who makes them.

    q and k have unit length, unless the call normalises them: then they are left as drawn, to show a forgotten norm.
    """

    BLOCK = 1024

    def __init__(
        self,
        shape: Shape,
        *,
        gates: str = "mixed",
        beta: tuple[float, float] = (0.0, 1.0),
        initial_state: bool = False,
        seed: int = 0,
        normalise: bool = True,
    ):
        if gates not in PROFILES:
            raise ValueError(f"input.gates={gates!r}, must be one of {', '.join(PROFILES)}")
        if len(beta) != 2 or not beta[0] <= beta[1]:
            raise ValueError(f"input.beta={list(beta)}, must be [lowest, highest]")
        if min(shape.num_q_heads, shape.num_k_heads, shape.num_v_heads, shape.head_dim) < 1 or not shape.seq_lens:
            raise ValueError(f"input: heads, head_dim and the number of sequences must be positive, got {shape}")
        if min(shape.seq_lens) < 0:
            raise ValueError(f"input.seq_lens={list(shape.seq_lens)}, must not be negative")
        self.shape, self.defaults = shape, Defaults()
        self._gates, self._beta, self._initial_state = gates, beta, initial_state
        self._seed, self._normalise = seed, normalise

    def _generator(self, stream: int, index: int) -> torch.Generator:
        # hashed: torch's CPU generator looks at 32 bits of its seed only
        return torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {stream} {index}".encode()))

    def _block(self, index: int) -> dict[str, torch.Tensor]:
        shape, generator = self.shape, self._generator(0, index)

        def normal(heads: int) -> torch.Tensor:
            return torch.randn(self.BLOCK, heads, shape.head_dim, generator=generator)

        q, k, v = normal(shape.num_q_heads), normal(shape.num_k_heads), normal(shape.num_v_heads)
        if self._normalise:
            q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        heads = shape.num_state_heads
        log_alpha = PROFILES[self._gates](torch.rand(self.BLOCK, heads, generator=generator, dtype=torch.float64))
        low, high = self._beta
        beta = low + (high - low) * torch.rand(self.BLOCK, heads, generator=generator)
        return {"q": q.to(shape.dtype), "k": k.to(shape.dtype), "v": v.to(shape.dtype), "g": log_alpha, "beta": beta}

    def tokens(self, ranges: TokenRanges, gate_space: GateSpace) -> dict[str, torch.Tensor]:
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("q", "k", "v", "g", "beta")}
        made: tuple[int, dict[str, torch.Tensor]] = (0, self._block(0))
        for start, stop in ranges:
            for index in range(start // self.BLOCK, -(-stop // self.BLOCK)):
                if made[0] != index:  # two ranges may meet inside a block
                    made = (index, self._block(index))
                first = index * self.BLOCK
                for name, part in parts.items():
                    part.append(made[1][name][max(start - first, 0) : stop - first])
        tokens = {name: torch.cat(part or [made[1][name][:0]]) for name, part in parts.items()}
        log_alpha = tokens["g"]
        return tokens | {"g": (log_alpha if gate_space == "log" else log_alpha.exp()).float()}

    def initial_states(self, sequences: Sequence[int]) -> torch.Tensor | None:
        if not self._initial_state:
            return None
        shape = self.shape
        states = torch.zeros(len(shape.seq_lens), shape.num_state_heads, shape.head_dim, shape.head_dim)
        for sequence in sequences:
            states[sequence].normal_(generator=self._generator(1, sequence))
        return states

    def expected(self, name: str, rows: tuple[int, int]) -> torch.Tensor | None:
        return None


def _half_lives(uniform: torch.Tensor, tokens: torch.Tensor | float) -> torch.Tensor:
    """log alpha of gates that halve a state in `tokens` tokens, give or take a half."""
    return -math.log(2) * (0.5 + uniform) / tokens


def _mixed(uniform: torch.Tensor) -> torch.Tensor:
    low, high = math.log2(MIN_HALF_LIFE), math.log2(MAX_HALF_LIFE)
    return _half_lives(uniform, torch.logspace(low, high, uniform.shape[1], base=2.0, dtype=torch.float64))


def _real(uniform: torch.Tensor) -> torch.Tensor:
    """As seen in trained models: mostly weak, now and then strong enough to underflow, one token in 500 a reset."""
    spikes = torch.where(uniform > 0.95, ((uniform - 0.95) / 0.05) ** 3 * -320, 0.0)
    return torch.where(uniform > 0.998, -math.inf, _mixed(uniform) + spikes)


PROFILES = {
    "never_forgets": torch.zeros_like,
    "weak": lambda uniform: _half_lives(uniform, 8192.0),
    "mixed": _mixed,
    "real": _real,
    "strong": lambda uniform: _half_lives(uniform, 0.5),
}


class TensorFile:
    """A safetensors file; see conf/input/tensors.yaml for its names.  Slices are read, never whole token tensors."""

    def __init__(self, path: Path):
        self._path = path
        try:
            opened = self._open()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"input.path={path} is not a whole safetensors file: {error}") from None
        with opened as file:
            names = set(file.keys())
            missing = {"q", "k", "v", *({"state_indices"} if "state_pool" in names else ())} - names
            if missing:
                raise ValueError(f"input.path={path} lacks tensors {sorted(missing)}; it has {sorted(names)}")
            case = self._case(file.metadata() or {})
            shapes = {name: file.get_slice(name).get_shape() for name in names}
            dtype = file.get_slice("q")[:0].dtype
            offsets = file.get_tensor("cu_seqlens").tolist() if "cu_seqlens" in names else None
            self._slots = file.get_tensor("state_indices").tolist() if "state_indices" in names else None
        self._names = names
        for name in ("q", "k", "v"):
            if len(shapes[name]) != 3:
                raise ValueError(f"input.path={path}: {name} must be [tokens, heads, head_dim], got {shapes[name]}")
        num_tokens, num_q_heads, head_dim = shapes["q"]
        if offsets is not None:
            seq_lens = [stop - start for start, stop in pairwise(offsets)]
        else:
            seq_lens = case.get("seq_lens", [num_tokens])
        if sum(seq_lens) != num_tokens or min(seq_lens, default=-1) < 0 or (offsets or [0])[0] != 0:
            raise ValueError(f"input.path={path}: sequence lengths {seq_lens} do not make up its {num_tokens} tokens")
        self.shape = Shape(tuple(seq_lens), num_q_heads, shapes["k"][1], shapes["v"][1], head_dim, dtype)
        self._check_slots(shapes)
        for name, rows in (("expected_output", num_tokens), ("expected_final_state", len(seq_lens))):
            if name in names and shapes[name][0] != rows:
                raise ValueError(f"input.path={path}: {name} must have {rows} rows, got {shapes[name][0]}")
        self.defaults = Defaults(
            case.get("scale"), case.get("use_qk_l2norm_in_kernel", False), case.get("checkpoint_every_n_tokens", 0)
        )

    def _case(self, metadata: Mapping[str, str]) -> dict[str, Any]:
        """What the metadata key "case" says of the call."""
        try:
            case = json.loads(metadata.get("case", "{}"))
        except json.JSONDecodeError:
            case = None
        if not isinstance(case, dict):
            raise ValueError(
                f"input.path={self._path}: metadata 'case' must be a JSON object, got {metadata['case']!r}"
            )
        return case

    def _check_slots(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """One slot of the pool for each sequence: a negative one would otherwise count from the pool's end."""
        if "state_pool" not in self._names or self._slots is None:
            return
        num_slots, num_sequences = shapes["state_pool"][0], len(self.shape.seq_lens)
        in_range = all(0 <= slot < num_slots for slot in self._slots)
        if len(self._slots) != num_sequences or len(set(self._slots)) != num_sequences or not in_range:
            raise ValueError(
                f"input.path={self._path}: state_indices must be {num_sequences} different slots in [0, {num_slots}), "
                f"one per sequence, got {self._slots}"
            )

    def _open(self) -> Any:
        return safe_open(self._path, "pt")

    def tokens(self, ranges: TokenRanges, gate_space: GateSpace) -> dict[str, torch.Tensor]:
        gate = "g_log" if gate_space == "log" else "g"
        if gate not in self._names and self._names & {"g", "g_log"}:
            raise ValueError(f"gate_space={gate_space} reads tensor {gate!r}, which input.path={self._path} lacks")
        wanted = {"q": "q", "k": "k", "v": "v", "g": gate, "beta": "beta"}
        with self._open() as file:
            return {name: _read_rows(file, stored, ranges) for name, stored in wanted.items() if stored in self._names}

    def initial_states(self, sequences: Sequence[int]) -> torch.Tensor | None:
        name = "initial_state" if "initial_state" in self._names else "state_pool"
        if name not in self._names:
            return None
        with self._open() as file:
            rows = file.get_slice(name)
            states = torch.zeros(len(self.shape.seq_lens), *rows.get_shape()[1:], dtype=rows[:0].dtype)
            for sequence in sequences:
                slot = self._slots[sequence] if name == "state_pool" and self._slots is not None else sequence
                states[sequence] = rows[slot]
        return states

    def expected(self, name: str, rows: tuple[int, int]) -> torch.Tensor | None:
        stored = f"expected_{name}"
        if stored not in self._names:
            return None
        with self._open() as file:
            return file.get_slice(stored)[rows[0] : rows[1]]


def _read_rows(file: Any, name: str, ranges: TokenRanges) -> torch.Tensor:
    rows = file.get_slice(name)
    return torch.cat([rows[start:stop] for start, stop in ranges] or [rows[:0]])


def open_source(config: Mapping[str, Any], *, use_qk_l2norm_in_kernel: bool | None) -> Source:
    """The source that an `input` node describes: a file if it has a path (already absolute), else a seed."""
    if "path" in config:
        return TensorFile(Path(config["path"]))
    shape = Shape(
        tuple(config["seq_lens"]),
        config["num_q_heads"],
        config["num_k_heads"],
        config["num_v_heads"],
        config["head_dim"],
        getattr(torch, config["dtype"]),
    )
    return Synthetic(
        shape,
        gates=config["gates"],
        beta=tuple(config["beta"]),
        initial_state=config["initial_state"],
        seed=config["seed"],
        normalise=not use_qk_l2norm_in_kernel,
    )


def find_input(path: str, *folders: Path) -> Path:
    """An input file by its path from the first of `folders` that has it; the error names every place looked at."""
    given = Path(path).expanduser()
    places = [folder / given for folder in dict.fromkeys(folders)]  # an absolute path stays as it is
    for place in places:
        if place.is_file():
            return place.resolve()
    raise ValueError(f"input.path={path} is no file; looked for {', '.join(map(str, dict.fromkeys(places)))}")
