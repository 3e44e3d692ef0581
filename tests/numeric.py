"""The numeric contract, and inputs for tests: gates that remember beside gates that forget."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

DATA = Path(__file__).parent / "data"
CASES = sorted(path.stem for path in DATA.glob("*.safetensors"))

# Relative L2 against the float64 oracle.  float32: 64-token triangular inverses and fp32 folds, 40 times what is
# measured.  bf16, fp16: the output's own rounding is 2^-9 = 2e-3 at worst; beta above 1 amplifies operand rounding.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
TOLERANCE_BETA_ABOVE_1 = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
UNDERFLOW = 1e-36  # fp32's underflow floor: what is smaller than this may be zero


def tolerance_of(dtype: torch.dtype, beta: torch.Tensor | None) -> float:
    """The contract for tokens of that dtype with those update gates."""
    table = TOLERANCE if beta is None or float(beta.max()) <= 1 else TOLERANCE_BETA_ABOVE_1
    return table[dtype]


def assert_within(x: torch.Tensor, reference: torch.Tensor, tol: float, bound: float = 0.0, what: str = "") -> None:
    """‖x − ref‖₂ ≤ tol·‖ref‖₂ + bound for each [i, j] of x [rows, heads, ..]."""
    x, reference = x.detach().double().cpu(), reference.detach().double().cpu()
    assert x.shape == reference.shape, f"{what}: {tuple(x.shape)} against {tuple(reference.shape)}"
    error = (x - reference).flatten(2).norm(dim=2)
    allowed = tol * reference.flatten(2).norm(dim=2) + bound + UNDERFLOW
    worst = (error / allowed).nan_to_num(torch.inf)
    assert bool((error <= allowed).all()), f"{what}: {float(worst.max()):.3g} times the allowed error"


def assert_output(x: torch.Tensor, reference: torch.Tensor, seq_lens, tol: float, bound: float = 0.0, what="output"):
    """The contract for outputs [T, H, V]: per sequence and head, over all its tokens."""
    start = 0
    for i, n in enumerate(seq_lens):
        stop = start + n
        assert_within(
            x[start:stop].transpose(0, 1)[None],
            reference[start:stop].transpose(0, 1)[None],
            tol,
            bound,
            f"{what} of sequence {i}",
        )
        start = stop


@dataclass
class Case:
    seq_lens: list[int]
    checkpoint_every_n_tokens: int
    use_qk_l2norm_in_kernel: bool
    scale: float | None
    gate: str
    tensors: dict[str, torch.Tensor] = field(repr=False, default_factory=dict)

    def __getitem__(self, name: str) -> torch.Tensor | None:
        return self.tensors.get(name)

    def to(self, device: str) -> Case:
        moved = {name: x.to(device) for name, x in self.tensors.items()}
        return Case(**{**self.__dict__, "tensors": moved})

    @property
    def tolerance(self) -> float:
        return tolerance_of(self.tensors["q"].dtype, self["beta"])


def load_case(name: str) -> Case:
    with safe_open(DATA / f"{name}.safetensors", "pt") as f:
        return Case(**json.loads(f.metadata()["case"]), tensors={key: f.get_tensor(key) for key in f.keys()})


def offsets(seq_lens) -> list[int]:
    total = [0]
    for n in seq_lens:
        total.append(total[-1] + n)
    return total


def cu(seq_lens, device="cpu", dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(offsets(seq_lens), dtype=dtype, device=device)


def checkpoint_starts(seq_lens, every: int, device="cpu") -> torch.Tensor:
    return cu([n // every for n in seq_lens], device)


GATES = ("never", "weak", "mixed", "resets", "strong")


def random_tokens(
    num_tokens: int,
    heads: tuple[int, int, int] = (2, 2, 2),
    dim: int = 32,
    *,
    dtype: torch.dtype = torch.float32,
    gates: str = "mixed",
    beta_max: float = 1.0,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """q, k (unit keys), v, g (linear), beta; deterministic."""
    r = torch.Generator().manual_seed(seed)
    hq, hk, hv = heads
    h = max(hq, hv)
    q = torch.randn(num_tokens, hq, dim, generator=r)
    k = torch.nn.functional.normalize(torch.randn(num_tokens, hk, dim, generator=r), dim=-1)
    v = torch.randn(num_tokens, hv, dim, generator=r)
    u = torch.rand(num_tokens, h, generator=r)
    if gates == "never":
        log_alpha = torch.zeros(num_tokens, h)
    elif gates == "weak":
        log_alpha = -0.001 * u
    elif gates == "strong":
        log_alpha = -3.0 - 3.0 * u
    else:  # half-lives from 4 to 16384 tokens over the heads
        log_alpha = -torch.logspace(-2, -14, h, base=2.0) * 0.7 * (0.5 + u)
    g = log_alpha.exp()
    if gates == "resets":
        g = torch.where(torch.rand(num_tokens, h, generator=r) < 0.02, 0.0, g)
    beta = torch.rand(num_tokens, h, generator=r) * beta_max
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": g, "beta": beta}


def random_state(rows: int, heads: int, dim: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, heads, dim, dim, generator=torch.Generator().manual_seed(seed))


class Target(NamedTuple):
    """Where a numeric test runs, and the tokens it runs on where any would do: what is exact and small, if allowed."""

    device: str
    backend: str
    dim: int = 64  # K and V

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.backend == "hopper" else torch.float32

    @property
    def tolerance(self) -> float:
        """For beta in [0, 1]."""
        return TOLERANCE[self.dtype]

    def takes(self, dtype: torch.dtype, dim: int) -> bool:
        """What `hopper` refuses, and says so, has tests of its own; it has a target for each head dim that it takes."""
        return self.backend != "hopper" or (dtype != torch.float32 and dim == self.dim)

    def tokens(self, num_tokens: int, heads: tuple[int, int, int] = (2, 2, 2), **arguments) -> dict[str, torch.Tensor]:
        """`random_tokens`, rounded to the target's dtype: it and the oracle see the same."""
        return random_tokens(num_tokens, heads, self.dim, dtype=self.dtype, **arguments)

    def states(self, rows: int, heads: int = 2) -> torch.Tensor:
        return random_state(rows, heads, self.dim)


def cut(seq_lens, x: torch.Tensor) -> list[torch.Tensor]:
    return [x[a:b] for a, b in pairwise(offsets(seq_lens))]
