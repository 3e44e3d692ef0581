"""Dump what a Gated DeltaNet layer of a transformers model hands to the delta rule, on any text.

    python -m gdncp.capture --out layer.safetensors --model PATH --layer 0 --text book.txt --tokens 8192

The file has the tensors that `input=tensors` reads: q, k, v after the convolution, the gates as linear alpha (`g`) and
as natural logarithm (`g_log`), beta.  Works for any model whose layers call a function `...chunk_gated_delta_rule` with
flash-linear-attention's signature: Qwen3-Next, Qwen3.5 and kin.  Needs transformers: pip install 'gdncp[capture]'.

Exit codes: 0 all went well, 2 the command line is wrong, or what it names cannot be read or written.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gdncp import store
from gdncp.argument_parser import Parser

DELTA_RULE = "chunk_gated_delta_rule"


class _Captured(Exception):
    """Raised from inside the layer: nothing after its inputs needs to run."""


def gated_delta_net_layers(model: nn.Module) -> list[nn.Module]:
    """The Gated DeltaNet layers of a model, first to last."""
    return [module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet")]


@contextmanager
def _intercept(layer: nn.Module, record: Callable[..., Any]) -> Iterator[None]:
    """While the layer runs, `record` stands in for its delta rule, be that an attribute or a global of its module."""
    if hasattr(layer, DELTA_RULE):
        owner: Any = layer
        name = DELTA_RULE
    else:
        owner = sys.modules[type(layer).__module__]
        names = [n for n in vars(owner) if n.endswith(DELTA_RULE)]
        used = [n for n in names if n in type(layer).forward.__code__.co_names] or names
        if not used:
            raise ValueError(f"layer {type(layer).__name__} calls no function named ...{DELTA_RULE}")
        name = used[0]
    original = getattr(owner, name)
    signature = inspect.signature(original)
    inside = False

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        # the global is shared by all layers of the model: only the chosen one is recorded
        return record(signature, args, kwargs) if inside else original(*args, **kwargs)

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    hook = layer.register_forward_pre_hook(enter)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, original)
        hook.remove()


def capture_layer(model: nn.Module, layer: int, sequences: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run `model` on each sequence of token ids [len] and keep what its `layer`-th Gated DeltaNet layer computes with.

    Returns q, k [T, Hk, K] and v [T, Hv, V] in the model's dtype, g (linear alpha), g_log and beta [T, Hv] fp32, and
    cu_seqlens int32 [N + 1], T being all tokens of all sequences.  A model may repeat q and k heads itself: they are
    kept as it passes them.
    """
    layers = gated_delta_net_layers(model)
    if not 0 <= layer < len(layers):
        raise ValueError(f"layer={layer}, but the model has {len(layers)} Gated DeltaNet layers (counted from 0)")
    parts: list[dict[str, torch.Tensor]] = []

    def record(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        if not bound.get("use_qk_l2norm_in_kernel"):
            raise ValueError("this model does not leave the L2 norm of q and k to the delta rule, as Qwen3-Next does")
        q, k, v = (x[0] for x in list(bound.values())[:3])  # named query, key, value or q, k, v
        log_alpha, beta = bound["g"][0].float(), bound["beta"][0].float()
        parts.append({"q": q, "k": k, "v": v, "g": log_alpha.exp(), "g_log": log_alpha, "beta": beta})
        raise _Captured

    with torch.no_grad(), _intercept(layers[layer], record):
        for ids in sequences:
            try:
                model(input_ids=ids[None], use_cache=False)
            except _Captured:
                continue
            raise ValueError(f"layer {layer} did not call its delta rule on a sequence of {len(ids)} tokens")
    offsets = [0, *(len(ids) for ids in sequences)]
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return tensors | {"cu_seqlens": torch.tensor(offsets).cumsum(0).to(torch.int32)}


def tiny_qwen3_next(seed: int = 0) -> nn.Module:
    """A small Qwen3-Next with seeded weights: one Gated DeltaNet layer of 2 key and 4 value heads, head dim 64.

    Freshly made weights forget within a token, which would leave nothing for context parallelism to get wrong, so
    the decay rates are set as trained models have them: half-lives log-spaced from 8 to 8192 tokens over the heads.
    """
    transformers = _transformers()
    torch.manual_seed(seed)
    model = transformers.Qwen3NextModel(
        transformers.Qwen3NextConfig(
            vocab_size=256,  # bytes
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        )
    )
    for layer in gated_delta_net_layers(model):
        dt_bias, a_log = layer.get_parameter("dt_bias"), layer.get_parameter("A_log")
        half_lives = torch.logspace(math.log10(8), math.log10(8192), len(a_log))
        with torch.no_grad():
            # log alpha = -exp(A_log) softplus(a + dt_bias); at a = 0 the half-life is then as wanted
            a_log.copy_((math.log(2) / half_lives / nn.functional.softplus(dt_bias)).log())
    return model.eval()


def load_model(name_or_path: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """A model and its tokenizer (None for "tiny", which reads bytes)."""
    if name_or_path == "tiny":
        return tiny_qwen3_next().to(dtype), None
    transformers = _transformers()
    model = transformers.AutoModel.from_pretrained(name_or_path, dtype=dtype).eval()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError):
        tokenizer = None
    return model, tokenizer


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"a model needs transformers ({error}): pip install 'gdncp[capture]'") from None
    return transformers


def tokenize(text: bytes, tokenizer: Any) -> torch.Tensor:
    """Token ids [n]; without a tokenizer the bytes themselves."""
    if tokenizer is None:
        return torch.tensor(list(text), dtype=torch.long)
    return torch.tensor(tokenizer(text.decode("utf-8"))["input_ids"], dtype=torch.long)


def cut(ids: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Consecutive runs of the text, one a sequence; a text that is too short is refused, never repeated."""
    if not lengths or min(lengths) <= 0:
        raise ValueError(f"--tokens {list(lengths)}: every sequence needs at least one token")
    if sum(lengths) > len(ids):
        raise ValueError(f"--tokens {list(lengths)} needs {sum(lengths)} tokens, but the text has {len(ids)}")
    return list(ids[: sum(lengths)].split(list(lengths)))


def _parser() -> Parser:
    parser = Parser("python -m gdncp.capture", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--model", default="tiny", help="a transformers model's path or name; tiny: a small seeded one")
    parser.add_argument("--layer", type=int, default=0, help="which of its Gated DeltaNet layers, from 0")
    parser.add_argument("--text", type=Path, required=True, help="text to read")
    parser.add_argument("--tokens", type=int, nargs="+", help="length of each sequence cut from the text; default: all")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--checkpoint-every", type=int, default=0, help="state checkpoint interval, kept in the file")
    return parser


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    try:
        _capture(arguments)
    except (ValueError, OSError) as error:  # a model, layer, text or file that is not there
        parser.error(str(error))


def _capture(arguments: argparse.Namespace) -> None:
    model, tokenizer = load_model(arguments.model, getattr(torch, arguments.dtype))
    ids = tokenize(arguments.text.read_bytes(), tokenizer)
    sequences = cut(ids, arguments.tokens or [len(ids)])
    tensors = capture_layer(model, arguments.layer, sequences)
    case = {
        "seq_lens": [len(ids) for ids in sequences],
        "checkpoint_every_n_tokens": arguments.checkpoint_every,
        "use_qk_l2norm_in_kernel": True,
        "scale": None,
        "gate": "captured",
    }
    store.write_tensors(arguments.out, tensors, {"case": case})
    half_lives = math.log(2) / -tensors["g_log"].mean(0)
    print(f"{arguments.out}: {', '.join(f'{name} {list(x.shape)}' for name, x in tensors.items())}")
    print(f"half-life per head, in tokens: {', '.join(f'{x:.3g}' for x in half_lives.tolist())}")


if __name__ == "__main__":
    main()
