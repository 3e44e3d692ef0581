"""One prefill from a configuration to a run directory, on every rank in step."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gdncp import api, store, validation
from gdncp.cli.inputs import Defaults, Source, open_source
from gdncp.cli.ranks import Ranks, RunFailure
from gdncp.cli.verify import verify
from gdncp.forgetting import ForgettingBound, error_bound, joined, rank_terms
from gdncp.plan import PrefillPlan, default_profile, plan_prefill
from gdncp.plan.choose import balanced, unsplit
from gdncp.stages import STAGES, PrefillResult

if TYPE_CHECKING:
    from gdncp.cli.report import Screen

Config = dict[str, Any]  # as `gdncp.cli.config.plain` gives it
Report = dict[str, Any]  # what report.json holds


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a rank knows before anything runs."""

    source: Source
    call: Defaults  # what the input says, where the configuration does not say otherwise
    plan: PrefillPlan


def run_point(config: Config, run_dir: Path, ranks: Ranks, screen: Screen | None) -> Report:
    """Run one configuration; `screen` on rank 0 alone.  What goes wrong is in the report, the same on every rank."""
    started = time.perf_counter()
    report: Report = {"ok": False, "config": config, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    try:
        _run(config, run_dir, ranks, screen, report)
    except RunFailure as error:
        report |= {"ok": False, "error": str(error)}
    report["wall_seconds"] = time.perf_counter() - started
    if ranks.is_leader:
        store.write_json(run_dir / "report.json", report)
        if screen is not None:
            screen.finished(report, run_dir)
    return report


def _run(config: Config, run_dir: Path, ranks: Ranks, screen: Screen | None, report: Report) -> None:
    def say(text: str) -> None:
        if screen is not None:
            screen.step(text)

    device, group, transport = ranks.agree(lambda: ranks.place(config["device"]))
    prepared = ranks.agree(lambda: prepare(config, ranks.world_size, device))
    plan = prepared.plan
    report |= {
        "plan": describe_plan(plan),
        "ranks": ranks.gather(_describe_rank(plan, ranks, device, transport)),
        "versions": versions(),
    }
    if screen is not None:
        screen.plan(plan, report)

    say("reading inputs" if "path" in config["input"] else "making inputs")
    arguments = ranks.agree(lambda: call_arguments(config, prepared, ranks.rank, device) | {"group": group})
    result, seconds = measure(plan, arguments, config, ranks, say)
    report |= describe_time(plan, ranks.gather(seconds)) | describe_sent(ranks.gather(asdict(result.fixup)))

    bound = forgetting(plan, result, ranks)
    report["forgetting"] = bound.summary()
    report["backend"] = result.entries[0].summary.call.backend.name
    if report["backend"] == "triton":
        from gdncp_kernels import launch_table  # needs triton

        report["launch_table"] = launch_table.describe(launch_table.current_arch())

    say("writing results")
    ranks.agree(lambda: _write_output(run_dir, plan, ranks.rank, result))
    final_state, checkpoints = gather_states(plan, result, config["final_state"], ranks)
    ranks.agree(lambda: _write_states(run_dir, plan, final_state, checkpoints) if ranks.is_leader else None)
    report["ok"] = True
    if config["verify"]:
        say("verifying")
        words = {"gate_space": config["gate_space"], "precision": config["precision"], "bound": bound}
        verdict = ranks.agree(  # rank 0 alone; its peers wait
            lambda: verify(run_dir, plan, prepared.source, prepared.call, **words) if ranks.is_leader else None
        )
        report["error"] = ranks.broadcast(verdict)
        report["ok"] = report["error"]["ok"]


def prepare(config: Config, world_size: int, device: torch.device) -> Prepared:
    """Open the input and plan for such a device, without touching it; the same on every rank."""
    source = open_source(config["input"], use_qk_l2norm_in_kernel=config["use_qk_l2norm_in_kernel"])
    keys = ("scale", "use_qk_l2norm_in_kernel", "checkpoint_every_n_tokens")
    call = replace(source.defaults, **{key: config[key] for key in keys if config[key] is not None})
    shape, use_cp = source.shape, config["use_cp"]
    validation.one_of("use_cp", use_cp, ("auto", True, False))
    if use_cp is False and world_size > 1:
        raise ValueError(f"use_cp=false with {world_size} ranks, must be auto or true")
    if config["repeat"] < 1 or config["warmup"] < 0:
        raise ValueError(f"repeat={config['repeat']} must be at least 1, and warmup={config['warmup']} at least 0")
    cp_chunk_len, longest = config["_cp_chunk_len"], max(shape.seq_lens)
    planned = partial(
        plan_prefill,
        shape.seq_lens,
        world_size=world_size,
        ownership=config["ownership"],
        num_q_heads=shape.num_q_heads,
        num_k_heads=shape.num_k_heads,
        num_v_heads=shape.num_v_heads,
        head_dim=shape.head_dim,
        checkpoint_every_n_tokens=call.checkpoint_every_n_tokens,
        fixup=config["fixup"],
        fold_span=config["fold_span"],
        finish=config["finish"],
        lanes_per_rank=config["lanes_per_rank"],
        lanes_by=config["lanes_by"],
        forget_below=config["forget_below"],
        require_reproducible=config["require_reproducible"],
        profile=config["profile"] or default_profile(device.type),
    )
    plan = planned(cp_chunk_len=unsplit(longest) if use_cp is False else cp_chunk_len)
    if use_cp is True and cp_chunk_len is None and plan.cp_chunk_len >= longest:
        plan = planned(cp_chunk_len=balanced(longest))  # asked to split what "auto" would leave whole
    return Prepared(source, call, plan)


def call_arguments(config: Config, prepared: Prepared, rank: int, device: torch.device) -> dict[str, Any]:
    """This rank's tokens and first states, on its device, and the words that go with them."""
    source, call, plan = prepared.source, prepared.call, prepared.plan
    first = [chunk.sequence for chunk in plan.rank_plan(rank).items if chunk.is_first]
    tensors = source.tokens(plan.token_ranges(rank), config["gate_space"])
    states = source.initial_states(first)
    if states is not None:
        tensors["initial_state"] = states
    return {
        **{name: tensor.to(device) for name, tensor in tensors.items()},
        "scale": call.scale,
        "use_qk_l2norm_in_kernel": call.use_qk_l2norm_in_kernel,
        **{key: config[key] for key in ("gate_space", "backend", "precision", "forget_below", "final_state")},
    }


def measure(
    plan: PrefillPlan,
    arguments: dict[str, Any],
    config: Config,
    ranks: Ranks,
    say: Callable[[str], None],
) -> tuple[PrefillResult, dict[str, float]]:
    """Warm up, then time; returns the last result and the median seconds of each stage, "total" among them."""
    runs: list[dict[str, float]] = []
    result: PrefillResult | None = None
    for i in range(config["warmup"] + config["repeat"]):
        number = i - config["warmup"]
        say(f"warm-up {i + 1} of {config['warmup']}" if number < 0 else f"run {number + 1} of {config['repeat']}")
        del result  # so that two results never lie in memory together
        check = config["check"] and i == 0
        result, seconds = ranks.agree(partial(_timed, plan, arguments, check))
        if number >= 0:
            runs.append(seconds)
    assert result is not None
    return result, {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}


def _timed(plan: PrefillPlan, arguments: dict[str, Any], check: bool) -> tuple[PrefillResult, dict[str, float]]:
    started = time.perf_counter()
    result = api.prefill(plan, **arguments, check=check, timed=True, keep_entry=True)
    seconds = result.timings  # waits for the device
    return result, seconds | {"total": time.perf_counter() - started}


def gather_states(
    plan: PrefillPlan, result: PrefillResult, final_state: str, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor]:
    """On rank 0 all final states [N, H, V, K] and all checkpoints [rows, H, V, K]; of no use elsewhere."""
    assert result.final_state is not None
    states = result.final_state.cpu()
    if final_state == "owner":
        owned: list[list[int]] = [[] for _ in range(plan.world_size)]
        for sequence in range(plan.num_sequences):
            owned[plan.final_state_owner(sequence)].append(sequence)
        parts = ranks.to_leader(states[owned[ranks.rank]], [len(rows) for rows in owned])
        for rows, part in zip(owned, parts, strict=False):
            states[rows] = part
    rows_of = [list(plan.checkpoint_rows(rank)) for rank in range(plan.world_size)]
    mine = states[:0] if result.checkpoints is None else result.checkpoints
    checkpoints = torch.empty(plan.num_checkpoints, *states.shape[1:], dtype=mine.dtype)
    for rows, part in zip(rows_of, ranks.to_leader(mine, [len(rows) for rows in rows_of]), strict=False):
        checkpoints[rows] = part
    return states, checkpoints


def forgetting(plan: PrefillPlan, result: PrefillResult, ranks: Ranks) -> ForgettingBound:
    """What forgetting may have cost, over all ranks; the same on every rank."""
    share = plan.rank_plan(ranks.rank)
    groups = [
        rank_terms(entry.summary.call.inputs, share, entry.summary.maps, entry.states) for entry in result.entries
    ]
    return error_bound(ranks.gather(joined(groups)))


def _write_output(run_dir: Path, plan: PrefillPlan, rank: int, result: PrefillResult) -> None:
    metadata = {"token_ranges": plan.token_ranges(rank), "seq_lens": plan.seq_lens, "rank": rank}
    store.write_tensors(run_dir / "output" / f"rank{rank}.safetensors", {"output": result.output}, metadata)


def _write_states(run_dir: Path, plan: PrefillPlan, final_state: torch.Tensor, checkpoints: torch.Tensor) -> None:
    store.write_tensors(run_dir / "final_state.safetensors", {"final_state": final_state}, {"seq_lens": plan.seq_lens})
    if plan.checkpoint_every_n_tokens:
        store.write_tensors(
            run_dir / "state_checkpoints.safetensors",
            {"state_checkpoints": checkpoints, "checkpoint_cu_starts": torch.tensor(plan.checkpoint_cu_starts)},
            {"checkpoint_every_n_tokens": plan.checkpoint_every_n_tokens, "seq_lens": plan.seq_lens},
        )


# ---- what report.json says


def describe_plan(plan: PrefillPlan) -> Report:
    return {
        "explain": plan.explain(),
        "digest": plan.digest,
        "reproducible": plan.reproducible,
        "num_sequences": plan.num_sequences,
        "num_tokens": plan.num_tokens_total,
        "num_cp_chunks": plan.num_cp_chunks,
        "cp_chunk_len": plan.cp_chunk_len,
        "first_cp_chunk_len": plan.first_cp_chunk_len,
        "ownership": plan.ownership,
        "fixup": plan.fixup,
        "fold_span": plan.fold_span,
        "finish": plan.finish,
        "lanes_per_rank": plan.lanes_per_rank,
        "lanes_by": plan.lanes_by,
        "crosses_ranks": plan.crosses_ranks,
        "num_checkpoints": plan.num_checkpoints,
        "profile": plan.profile.name,
    }


def _describe_rank(plan: PrefillPlan, ranks: Ranks, device: torch.device, transport: str) -> Report:
    share = plan.rank_plan(ranks.rank)
    return {
        "host": platform.node(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "device_index": device.index,
        "threads": torch.get_num_threads(),
        "transport": transport,
        "num_tokens": share.num_tokens,
        "num_cp_chunks": len(share.items),
        "num_maps": share.num_maps,
    }


def describe_time(plan: PrefillPlan, seconds: list[dict[str, float]]) -> Report:
    """Per stage what each rank took and what the cost model said; `seconds` is the slowest rank's total."""
    predicted = {**plan.predicted, "total": [sum(stages) for stages in zip(*plan.predicted.values(), strict=True)]}
    stages = {}
    for stage in (*STAGES, "total"):
        took, said = [of_rank.get(stage, 0.0) for of_rank in seconds], list(predicted[stage])
        stages[stage] = {
            "measured_seconds": took,
            "predicted_seconds": said,
            "slowest_measured_over_predicted": max(took) / max(said) if max(said) else None,
        }
    slowest = max(of_rank["total"] for of_rank in seconds)
    return {"seconds": slowest, "tokens_per_second": plan.num_tokens_total / slowest, "stages": stages}


def describe_sent(stats: list[dict[str, Any]]) -> Report:
    """Per rank, in stage 3: messages and bytes."""
    return {"sent": {key: [of_rank[key] for of_rank in stats] for key in stats[0]}}


def versions() -> Report:
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("gdncp", "triton", "safetensors", "hydra-core"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
