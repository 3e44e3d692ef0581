"""Other libraries' prefill over ranks, and the fastest on one GPU, each called as its own documentation says.

One sequence, cut in equal parts; the same inputs as ours, on which theirs are first held against ours: what is wrong
gets no time.  A peer is optional: one that cannot be imported says why and is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gdncp.bench.cases import Case, Shape, Tokens
from gdncp.bench.multi_gpu.book import Book
from gdncp.bench.multi_gpu.clock import RankClock
from gdncp.bench.multi_gpu.ours import Planned, share
from gdncp.bench.multi_gpu.presets import GATES, Preset
from gdncp.bench.multi_gpu.ranks import Ranks
from gdncp.bench.peers import Fla, FlashInfer, FlashQla
from gdncp.bench.run import TOLERANCE

NUM_SETS = 2
TARGET_MS, MAX_ITERATIONS, FEWEST = 200.0, 30, 8

Call = Callable[[], torch.Tensor]  # -> output [T, H, V] of this rank (or of all tokens)


class FlaRanks:
    """flash-linear-attention's CP; it takes no initial state and gives no final one."""

    name, one_gpu, any_gates, library = "fla:cp", False, True, Fla()

    def bind(self, ranks: Ranks, case: Case, sets: Sequence[Tokens]) -> list[Call]:
        function = self.library._call()
        build = importlib.import_module("fla.ops.cp").build_cp_context
        context = build(cu_seqlens=case.cu_seqlens_int64, group=ranks.group)
        return [
            lambda parts=parts: function(*parts, scale=case.scale, cp_context=context)[0][0]  # type: ignore[misc]
            for parts in batches(ranks, case, sets)
        ]


class FlashQlaRanks:
    """FlashQLA's CP between GPUs, with or without its CP inside each."""

    one_gpu, any_gates, library = False, True, FlashQla("auto", gate_aware=False)

    def __init__(self, intra: bool):
        self.name, self._intra = f"flashqla:{'inter+intra' if intra else 'inter'}", intra

    def bind(self, ranks: Ranks, case: Case, sets: Sequence[Tokens]) -> list[Call]:
        function, chunk = self.library._call(), importlib.import_module("flash_qla.ops.gated_delta_rule.chunk")
        context = chunk.build_cp_context(
            case.cu_seqlens,
            enable_inter=True,
            enable_intra=self._intra,
            group=ranks.group,
            num_v_heads=case.shape.num_v_heads,
            chunk_size=chunk.CHUNK_SIZE,
        )
        return [
            lambda parts=parts: function(  # type: ignore[misc]
                *parts, scale=case.scale, output_final_state=True, cp_context=context
            )[0][0]
            for parts in batches(ranks, case, sets)
        ]


class OneGpu:
    """A peer of `gdncp.bench.peers` on all tokens, on every GPU at once."""

    one_gpu, any_gates = True, False

    def __init__(self, library: FlashQla | FlashInfer):
        self.name, self.library = library.name, library

    def bind(self, ranks: Ranks, case: Case, sets: Sequence[Tokens]) -> list[Call]:
        return [lambda call=call: call().output for call in self.library.bind(case, sets).calls]  # type: ignore[misc]


Peer = FlaRanks | FlashQlaRanks | OneGpu


def all_peers() -> list[Peer]:
    """In the order in which they run: what matters most first."""
    return [
        OneGpu(FlashQla("auto", gate_aware=False)),
        OneGpu(FlashQla("gates", gate_aware=True)),
        FlashQlaRanks(intra=True),
        FlashQlaRanks(intra=False),
        FlaRanks(),
        OneGpu(FlashInfer("auto", "auto")),
    ]


def batches(ranks: Ranks, case: Case, sets: Sequence[Tokens]) -> list[list[torch.Tensor]]:
    """[1, T / W, ...] of each input set."""
    return [[x.unsqueeze(0) for x in share(t, [equal_part(ranks, case)])] for t in sets]


def equal_part(ranks: Ranks, case: Case) -> tuple[int, int]:
    """The tokens of this rank, as peers cut them."""
    n = case.shape.num_tokens // ranks.size
    return ranks.rank * n, (ranks.rank + 1) * n


def run(book: Book, preset: Preset) -> None:
    for peer, case in _cases(book, preset):
        name = f"{peer.name}, {case.shape} {case.gates}"
        if book.room_for(name):
            with book.failures_of(name):
                _measure(book, preset, peer, case)


def _cases(book: Book, preset: Preset) -> Iterator[tuple[Peer, Case]]:
    """Every present peer's; those whose time no gates change (`any_gates`), on one kind of them.

    CP between GPUs exchanges and folds all maps, whatever the gates: measured, FlashQLA's differs by at most 1 %.
    """
    present = _present(book)
    for shape in preset.shapes:
        if shape.num_tokens % book.ranks.size:
            book.skip(f"{shape.num_tokens} tokens", f"peers need equal parts on {book.ranks.size} ranks")
            continue
        for gates in GATES:
            case = Case(shape, gates, preset.dtype, book.ranks.device)
            for peer in present:
                if gates == GATES[0] or not peer.any_gates:
                    yield peer, case


def _present(book: Book, library: str | None = None) -> list[Peer]:
    """Those that every rank has, of one library if it is named; why the others are absent is written down."""
    found: list[Peer] = []
    for peer in all_peers():
        if library is not None and not peer.name.startswith(f"{library}:"):
            continue
        reasons = [r for r in book.ranks.together(peer.library.absent_reason(book.ranks.device)) if r]
        if not peer.one_gpu and not reasons and (book.ranks.size < 2 or book.ranks.backend != "nccl"):
            reasons = ["its CP is run on two ranks and more, over NCCL."]
        if reasons:
            book.found["absent"][peer.name] = reasons[0]
        else:
            found.append(peer)
            book.found.setdefault("versions", {})[peer.library.distribution] = peer.library.version()
    book.save()
    book.say(f"here: {', '.join(p.name for p in found) or 'none'}; absent: {', '.join(book.found['absent']) or 'none'}")
    return found


def _measure(book: Book, preset: Preset, peer: Peer, case: Case) -> None:
    ranks, clock = book.ranks, RankClock(book.ranks.group, book.ranks.device)
    sets = [case.tokens(seed=1 + i) for i in range(NUM_SETS)]
    ours = Planned(ranks, case, sets[:1], preset, 1)  # of all tokens, whatever ranges our own plan would give a rank
    ours.calls[0]()
    calls = peer.bind(ranks, case, sets)
    output = calls[0]()
    expected = ours.output if peer.one_gpu else ours.output[slice(*equal_part(ranks, case))]
    difference = (output.float() - expected.float()).norm() / expected.float().norm()
    error = max(ranks.together(float(difference.nan_to_num(torch.inf))))
    del ours, output, expected
    row: dict[str, Any] = {"peer": peer.name, "one_gpu": peer.one_gpu, "any_gates": peer.any_gates}
    row["tokens"] = case.shape.num_tokens
    row |= {"heads": case.shape.heads, "gates": case.gates, "from_ours": error}
    if not error <= 2 * TOLERANCE[case.dtype]:
        raise ValueError(f"{error:.2g} from ours: not timed")
    calls[-1]()
    row["host_us"] = clock.host_us(calls, FEWEST)
    typical = clock.times(calls, 3, 2 * row["host_us"] / 1e3)[1]
    count = int(min(MAX_ITERATIONS, max(FEWEST, TARGET_MS / max(typical, 1e-3))))
    row |= {"eager_ms": clock.median(calls, count, 2 * row["host_us"] / 1e3), "iterations": count}
    book.add("peers", row)
    book.say(f"{peer.name}, {case.shape} {case.gates}: {row['eager_ms']:.3f} ms, {error:.1e} from ours")


def prepare(book: Book, preset: Preset, library: str | None) -> None:
    """First calls alone, which compile; the cache on disk makes `run`'s first calls short."""
    present = _present(book, library)
    for heads in preset.heads:
        case = Case(Shape(preset.prepare_tokens, 1, *heads, preset.head_dim), "one", preset.dtype, book.ranks.device)
        for peer in present:
            name = f"{peer.name}, {case.shape}"
            if book.room_for(name):
                with book.failures_of(name):
                    for call in peer.bind(book.ranks, case, [case.tokens(seed=1)]):
                        call()
                    book.ranks.synchronize()
                    book.say(f"{name} compiled")
