"""What is run: shapes, gates, random inputs, and the least time that a shape can take."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

import torch

from gdncp.plan.checks import CHUNK


@dataclass(frozen=True)
class Shape:
    """`num_seqs` sequences of `seq_len` tokens; as many q heads as k heads."""

    seq_len: int
    num_seqs: int
    num_k_heads: int
    num_v_heads: int
    head_dim: int = 128

    @property
    def num_tokens(self) -> int:
        return self.seq_len * self.num_seqs

    @property
    def heads(self) -> str:
        return f"{self.num_k_heads}/{self.num_v_heads}"

    @property
    def num_state_heads(self) -> int:
        return max(self.num_k_heads, self.num_v_heads)

    def __str__(self) -> str:
        return f"{self.seq_len}x{self.num_seqs}:{self.heads}"

    @classmethod
    def parse(cls, text: str, head_dim: int = 128) -> Shape:
        """From "32768x1:16/32": tokens x sequences : q and k heads / v heads.  ValueError if it is anything else."""
        match = re.fullmatch(r"(\d+)x(\d+):(\d+)/(\d+)", text.strip())
        numbers = [int(n) for n in match.groups()] if match else [0]
        if min(numbers) < 1 or max(numbers[2:]) % min(numbers[2:]):
            raise ValueError(
                f"shape must be TOKENSxSEQUENCES:QK_HEADS/V_HEADS, as 32768x1:16/32, with one head count a multiple "
                f"of the other, got {text!r}"
            )
        seq_len, num_seqs, num_k_heads, num_v_heads = numbers
        return cls(seq_len, num_seqs, num_k_heads, num_v_heads, head_dim)

    def tensor_flops(self) -> float:
        """Matrix products of the chunked rule with sequences left whole, in chunks of 64; triangular inverses apart.

        A token and state head: three products with the state (S k, S q, the update), two with a [64, 64] tile (T and
        the scores with V).  A token and q or k head: its row of K Kᵀ and of Q Kᵀ.
        """
        d = self.head_dim
        per_state_head = 3 * 2 * d * d + 2 * 2 * CHUNK * d
        per_k_head = 2 * 2 * CHUNK * d
        return float(self.num_tokens * (self.num_state_heads * per_state_head + self.num_k_heads * per_k_head))

    def hbm_bytes(self, element_size: int) -> float:
        """Each input read once and each result written once: q, k, v, o, fp32 gates, fp32 final states."""
        d, h = self.head_dim, self.num_state_heads
        per_token = (2 * self.num_k_heads + self.num_v_heads + h) * d * element_size + 2 * h * 4
        return float(self.num_tokens * per_token + self.num_seqs * h * d * d * 4)


# Gate kinds by name, and the words for them in tables.
GATES = {"forget": "gates that forget", "one": "gates ≈ 1", "layer": "gates of a fresh layer"}
COMPARED = ("forget", "one")  # where engines are compared on one GPU
HALF_LIVES = (4.0, 16384.0)  # tokens; "forget": per head, log-spaced between these


@dataclass(frozen=True, eq=False)
class Tokens:
    """One set of inputs; gates in both spaces, so that nobody converts inside what is timed."""

    q: torch.Tensor  # [T, Hk, D], unit rows
    k: torch.Tensor  # [T, Hk, D], unit rows
    v: torch.Tensor  # [T, Hv, D]
    log_alpha: torch.Tensor  # [T, H] fp32, natural
    alpha: torch.Tensor  # [T, H] fp32
    beta: torch.Tensor  # [T, H] fp32 in [0, 1)

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in vars(self).values())


@dataclass(frozen=True)
class Case:
    """A shape, a kind of gates, a dtype and a device: what every engine runs."""

    shape: Shape
    gates: str
    dtype: torch.dtype
    device: torch.device

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    @property
    def seq_lens(self) -> list[int]:
        return [self.shape.seq_len] * self.shape.num_seqs

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """[N + 1] int32; one tensor per case, since some engines cache by identity."""
        return torch.arange(self.shape.num_seqs + 1, dtype=torch.int32, device=self.device) * self.shape.seq_len

    @cached_property
    def cu_seqlens_int64(self) -> torch.Tensor:
        return self.cu_seqlens.long()

    def empty_results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, H, V] and final states [N, H, V, K] fp32, filled with NaN so that unwritten rows show."""
        s = self.shape
        output = torch.full(
            (s.num_tokens, s.num_state_heads, s.head_dim), math.nan, dtype=self.dtype, device=self.device
        )
        states = torch.full((s.num_seqs, s.num_state_heads, s.head_dim, s.head_dim), math.nan, device=self.device)
        return output, states

    def tokens(self, seed: int) -> Tokens:
        """Random inputs, the same for the same seed on the same kind of device."""
        # a generator of our own: a failed graph capture can leave the default one unusable
        random = torch.Generator(self.device).manual_seed(seed)
        s, t = self.shape, self.shape.num_tokens

        def normal(heads: int) -> torch.Tensor:
            return torch.randn(t, heads, s.head_dim, generator=random, device=self.device)

        def uniform() -> torch.Tensor:
            return torch.rand(t, s.num_state_heads, generator=random, device=self.device)

        q, k = (torch.nn.functional.normalize(normal(s.num_k_heads), dim=-1).to(self.dtype) for _ in range(2))
        v = normal(s.num_v_heads).to(self.dtype)
        if self.gates == "one":
            log_alpha = torch.zeros(t, s.num_state_heads, device=self.device)
        elif self.gates == "layer":
            log_alpha = self._fresh_layer(random)
        else:
            low, high = (math.log10(x) for x in HALF_LIVES)
            half_lives = torch.logspace(low, high, s.num_state_heads, device=self.device)
            log_alpha = -(math.log(2) / half_lives) * 2 * uniform()
        return Tokens(q, k, v, log_alpha, log_alpha.exp(), uniform())

    def _fresh_layer(self, random: torch.Generator) -> torch.Tensor:
        """log alpha [T, H] as a layer initialises it: −A·softplus(a + dt_bias), per head A uniform in 1 ... 16 and
        softplus(dt_bias) log-uniform in 0.001 ... 0.1; a is normal."""
        heads = self.shape.num_state_heads

        def uniform() -> torch.Tensor:
            return torch.rand(heads, generator=random, device=self.device)

        low, high = math.log(0.001), math.log(0.1)
        a, dt = 1 + 15 * uniform(), torch.exp(low + (high - low) * uniform())
        dt_bias = dt + torch.log(-torch.expm1(-dt))  # softplus's inverse
        shift = torch.randn(self.shape.num_tokens, heads, generator=random, device=self.device)
        return -a * torch.nn.functional.softplus(shift + dt_bias)


@dataclass(frozen=True)
class Preset:
    what: str
    shapes: tuple[str, ...]
    gates: tuple[str, ...] = COMPARED
    engines: tuple[str, ...] = ("hopper", "triton", "flashinfer", "flashqla", "fla")
    stages: bool = False  # time the stages of ours, too


_PEERS_H200 = (
    "8192x1:16/32",
    "32768x1:16/32",
    "131072x1:16/32",
    "32768x1:4/8",
    "131072x1:4/8",
    "262144x1:2/4",
    "2048x16:16/32",
    "32768x1:16/64",
    "32768x1:2/8",
    "8192x4:16/64",
    "512x1:16/32",
)

PRESETS = {
    "peers-h200": Preset("the shapes and gates by which gdncp is compared with its peers on an H200", _PEERS_H200),
    "quick": Preset(
        "two small shapes, on any device",
        ("512x1:2/4", "192x3:2/2"),
        engines=("hopper", "triton", "torch", "flashinfer", "flashqla", "fla"),
    ),
    "stages": Preset("time per stage of ours", _PEERS_H200, engines=("hopper", "triton"), stages=True),
}
