"""Lanes that divide heads: each group is a prefill of its own, on its own stream, on views of the caller's tensors.

So one group's exchange runs beside another's scans.  Groups enqueue their exchanges in one order on all ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from gdncp import stages
from gdncp.collectives import FixupStats
from gdncp.stage_timer import StageTimer
from gdncp.stages import Call, PrefillResult
from gdncp.streams import lane_stream


def run_groups(call: Call) -> PrefillResult:
    """All stages of every group; joined before return."""
    assert call.plan is not None
    device = call.inputs.q.device
    calls = [_of_heads(call, lane, *heads) for lane, heads in enumerate(call.plan.head_groups)]
    streams = []  # the first group is on the current one
    if device.type == "cuda":
        streams = [lane_stream(device, group.lane) for group in calls[1:]]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))

    def on_lane(lane: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(streams[lane - 1]) if lane and streams else nullcontext()

    entries = []
    for group in calls:
        with on_lane(group.lane):
            entries.append(stages.fixup(stages.summarise(group)))
    results = []
    for group, entry in zip(calls, entries, strict=True):
        with on_lane(group.lane):
            results.append(stages.finish(entry))
    for stream in streams:
        torch.cuda.current_stream(device).wait_stream(stream)

    kept = tuple(result.entry for result in results if result.entry is not None)
    timer = _Timers(call, [group.timer for group in calls])
    sent = _sum([result.fixup for result in results])
    return PrefillResult(call.output, call.states.destination, call.checkpoints, sent, None, timer, kept)


def _of_heads(call: Call, lane: int, start: int, stop: int) -> Call:
    """The same call for state heads [start, stop) alone."""
    inputs, io, (num_heads, v_dim, k_dim) = call.inputs, call.states, call.state_shape

    def some(x: torch.Tensor | None) -> Any:
        """Those heads of [rows, heads, ..]; a tensor has as many as there are state heads, or one for several."""
        return None if x is None else x[:, start * x.shape[1] // num_heads : stop * x.shape[1] // num_heads]

    return replace(
        call,
        inputs=replace(
            inputs,
            **{name: some(getattr(inputs, name)) for name in ("q", "k", "v", "gate", "beta")},
            some_heads=True,
        ),
        states=replace(io, source=some(io.source), destination=some(io.destination)),
        state_shape=(stop - start, v_dim, k_dim),
        output=some(call.output),
        checkpoints=some(call.checkpoints),
        timer=StageTimer(enabled=call.timer.enabled, device=inputs.q.device),
        lane=lane,
    )


def _sum(sent: list[FixupStats]) -> FixupStats:
    counts = ("messages_sent", "messages_received", "bytes_sent", "bytes_received")
    return replace(sent[0], **{name: sum(getattr(of_group, name) for of_group in sent) for name in counts})


class _Timers(StageTimer):
    """Per stage the sum over groups, which ran side by side."""

    def __init__(self, call: Call, timers: list[StageTimer]):
        super().__init__(enabled=call.timer.enabled, device=call.inputs.q.device)
        self._timers = timers

    def seconds(self) -> dict[str, float]:
        of_groups = [timer.seconds() for timer in self._timers]
        return {stage: sum(of_group[stage] for of_group in of_groups) for stage in of_groups[0]}
