"""Other libraries' Gated DeltaNet prefill as engines, each called as its own documentation says.

A peer is optional: one that cannot be imported says why and is left out.  All get the same inputs, in the layout and
gate space that they want; views and conversions are made before anything is timed.  To add one: a class like these,
and its name in `gdncp.bench.run.ENGINES`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gdncp.bench.cases import Case, Tokens
from gdncp.bench.engines import Bound, Engine, Result


class Peer(Engine):
    """What they share: a module with the call, and the distribution whose version counts."""

    ours = False
    compiles_to_disk = False
    module: str
    distribution: str
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    head_dims: tuple[int, ...] | None = None

    def absent_reason(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA device."
        try:
            self._call()
        except Exception as error:  # a broken installation raises anything: ImportError, OSError, AttributeError, ...
            return f"cannot be imported ({type(error).__name__}: {error})."
        return None

    def version(self) -> str:
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            package = importlib.import_module(self.module.split(".")[0])
            return str(getattr(package, "__version__", "unknown"))

    def rejection_reason(self, case: Case) -> str | None:
        if case.dtype not in self.dtypes:
            return f"inputs are {case.dtype}; it takes {', '.join(map(str, self.dtypes))}."
        if self.head_dims is not None and case.shape.head_dim not in self.head_dims:
            return f"the head dim is {case.shape.head_dim}; it takes {', '.join(map(str, self.head_dims))}."
        return None

    def _call(self) -> Callable[..., Any]:
        return importlib.import_module(self.module).chunk_gated_delta_rule


class FlashInfer(Peer):
    """FlashInfer's `gdn_prefill`: packed [T, H, D], linear gates, states [N, H, V, K], results preallocated."""

    module, distribution, head_dims = "flashinfer.gdn_prefill", "flashinfer-python", (128,)

    def __init__(self, mode: str, use_cp: str | bool):
        self.name, self._use_cp = f"flashinfer:{mode}", use_cp

    def _call(self) -> Callable[..., Any]:
        module = importlib.import_module(self.module)
        if getattr(module, "chunk_gated_delta_rule_sm90", None) is None and torch.cuda.get_device_capability()[0] == 9:
            raise ImportError("its Hopper kernel did not load")
        return module.chunk_gated_delta_rule

    def bind(self, case: Case, sets: Sequence[Tokens]) -> Bound:
        function, (output, states), cu_seqlens = self._call(), case.empty_results(), case.cu_seqlens

        def call(t: Tokens) -> Result:
            found = function(
                t.q,
                t.k,
                t.v,
                g=t.alpha,
                beta=t.beta,
                scale=case.scale,
                output_final_state=True,
                cu_seqlens=cu_seqlens,
                output=output,
                output_state=states,
                use_cp=self._use_cp,
                max_seqlen=case.shape.seq_len,  # a host-side hint; exact, it makes CP launches smaller
            )
            return Result(*found)

        return Bound([partial(call, t) for t in sets], {})


class _BatchFirst(Peer):
    """Calls in flash-linear-attention's form: [1, T, H, D], natural-log gates, states [N, H, K, V]."""

    compiles_to_disk = True

    def bind(self, case: Case, sets: Sequence[Tokens]) -> Bound:
        function, arguments = self._call(), self._arguments(case, sets)
        # views, made once
        batches = [[x.unsqueeze(0) for x in (t.q, t.k, t.v, t.log_alpha, t.beta)] for t in sets]

        def call(batch: list[torch.Tensor]) -> Result:
            output, states = function(*batch, scale=case.scale, output_final_state=True, **arguments)
            return Result(output[0], states.transpose(-1, -2))

        return Bound([partial(call, b) for b in batches], self._detail(arguments))

    def _arguments(self, case: Case, sets: Sequence[Tokens]) -> dict[str, Any]:
        raise NotImplementedError  # each library has its own

    def _detail(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {}


class FlashQla(_BatchFirst):
    """FlashQLA, on its own decision about CP, or on the one that has looked at the gates (built before it is timed)."""

    module, distribution, head_dims = "flash_qla", "flash-qla", (128,)

    def __init__(self, mode: str, gate_aware: bool):
        self.name, self._gate_aware = f"flashqla:{mode}", gate_aware

    def _arguments(self, case: Case, sets: Sequence[Tokens]) -> dict[str, Any]:
        arguments: dict[str, Any] = {"cu_seqlens": case.cu_seqlens if case.shape.num_seqs > 1 else None}
        if self._gate_aware:
            chunk = importlib.import_module("flash_qla.ops.gated_delta_rule.chunk")
            arguments["cp_context"] = chunk.build_cp_context(
                case.cu_seqlens,
                enable_intra=True,
                num_v_heads=case.shape.num_v_heads,
                chunk_size=chunk.CHUNK_SIZE,
                is_train=False,
                g=sets[0].log_alpha.unsqueeze(0),
            )
        return arguments

    def _detail(self, arguments: dict[str, Any]) -> dict[str, Any]:
        context = arguments.get("cp_context")
        return {} if context is None else {"cp": bool(context.is_intra)}


class Fla(_BatchFirst):
    """flash-linear-attention's Triton kernels."""

    name, module, distribution = "fla", "fla.ops.gated_delta_rule", "flash-linear-attention"

    def _call(self) -> Callable[..., Any]:
        # without these it hands the call to FlashQLA or TileLang where they are installed; read when it is imported
        for switch in ("FLA_FLASH_QLA", "FLA_TILELANG"):
            os.environ.setdefault(switch, "0")
        return super()._call()

    def _arguments(self, case: Case, sets: Sequence[Tokens]) -> dict[str, Any]:
        return {"cu_seqlens": case.cu_seqlens_int64 if case.shape.num_seqs > 1 else None}


def peers() -> list[Peer]:
    return [
        FlashInfer("auto", "auto"),
        FlashInfer("cp", True),
        FlashInfer("no-cp", False),
        FlashQla("auto", gate_aware=False),
        FlashQla("gates", gate_aware=True),
        Fla(),
    ]
