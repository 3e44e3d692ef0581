"""What exchanges between ranks take, eager and captured, and α and β of each: seconds to start, bytes per second."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gdncp.bench.multi_gpu.clock import RankClock
from gdncp.collectives.wire import Wire

SIZES = tuple(4096 * 4**i for i in range(8))  # bytes a rank: 4 KiB ... 64 MiB
ITERATIONS = 20
REPEATS = 8  # exchanges in one graph, one after the other: its own start counts once in so many
MEASURED_AT_ONCE = 2**22  # bytes, up to which a graph holds `REPEATS`; beyond it one


class Line(NamedTuple):
    """seconds = alpha_s + bytes / bytes_per_s."""

    alpha_s: float
    bytes_per_s: float


def measure_links(group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Time all_gather, all_to_all and send/recv around the ring, as `gdncp.collectives` issues them.

    A collective of the group.  `sizes` are bytes that each rank puts in.  Over NCCL times are the device's, on the
    slowest rank, from a common start, and `captured` is one exchange inside a CUDA graph; otherwise they are the host's
    and nothing is captured.

    Returns:
        "world_size", and "exchanges": name -> "eager" or "captured" -> "rows" of "bytes", "bytes_sent" and "seconds",
        and the line through them, "alpha_s" and "bytes_per_s".  `bytes_sent` is what leaves a rank, to which the line
        is fitted.  A single rank sends nothing: its exchanges have rows, of the calls alone, and no line.
    """
    clock, size = RankClock(group, device), dist.get_world_size(group)
    found: dict[str, Any] = {"world_size": size, "exchanges": {}}
    for name, (make, sent_share) in _exchanges(size).items():
        kinds: dict[str, Any] = {}
        for kind in ("eager", "captured") if clock.has_events else ("eager",):
            rows = []
            for nbytes in sizes:
                call = make(Wire(group, device, f"measuring {name}"), nbytes, device)
                seconds = _seconds(clock, call, nbytes, kind == "captured")
                rows.append({"bytes": nbytes, "bytes_sent": nbytes * sent_share, "seconds": seconds})
            kinds[kind] = {"rows": rows}
            if sent_share:
                kinds[kind] |= fit_line([(row["bytes_sent"], row["seconds"]) for row in rows])._asdict()
        found["exchanges"][name] = kinds
    return found


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The line through (bytes, seconds) of the least squared relative error; neither of its terms is negative."""

    def of(alpha_free: bool, slope_free: bool) -> tuple[float, float]:
        a = [(1 / s if alpha_free else 0.0, b / s if slope_free else 0.0) for b, s in points]
        xx, xy, yy = (sum(p[i] * p[j] for p in a) for i, j in ((0, 0), (0, 1), (1, 1)))
        x1, y1 = (sum(p[i] for p in a) for i in (0, 1))
        if not slope_free:
            return x1 / xx, 0.0
        if not alpha_free:
            return 0.0, y1 / yy
        det = xx * yy - xy * xy
        return ((x1 * yy - y1 * xy) / det, (y1 * xx - x1 * xy) / det) if det > 1e-12 * xx * yy else (x1 / xx, 0.0)

    alpha, slope = of(True, True)
    if alpha < 0:
        alpha, slope = of(False, True)
    elif slope < 0:
        alpha, slope = of(True, False)
    return Line(alpha, 1 / slope if slope > 0 else math.inf)


# ---- private

Exchange = Callable[[], Any]


def _exchanges(size: int) -> dict[str, tuple[Callable[[Wire, int, torch.device], Exchange], float]]:
    """name -> (binding to a wire and bytes, the share of them that each rank sends)."""
    return {
        "all_gather": (_all_gather, float(size - 1)),
        "all_to_all": (_all_to_all, (size - 1) / size),
        "send_recv": (_send_recv, float(size > 1)),
    }


def _buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.randn(max(1, nbytes // 4), device=device)


def _all_gather(wire: Wire, nbytes: int, device: torch.device) -> Exchange:
    local = _buffer(nbytes, device)
    return lambda: wire.all_gather(local).wait()


def _all_to_all(wire: Wire, nbytes: int, device: torch.device) -> Exchange:
    local = _buffer(nbytes, device)
    n = local.numel()
    splits = [(r + 1) * n // wire.size - r * n // wire.size for r in range(wire.size)]
    # piece i has the same length on every rank: what arrives is as long as this rank's own piece, from each
    return lambda: wire.all_to_all(local, splits, [splits[wire.rank]] * wire.size).wait()


def _send_recv(wire: Wire, nbytes: int, device: torch.device) -> Exchange:
    outgoing, incoming = _buffer(nbytes, device), _buffer(nbytes, device)
    wire.open_point_to_point()
    following, previous = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size

    def call() -> None:
        wire.exchange([(following, outgoing)], [(previous, incoming)]).wait()
        wire.finish()

    return call


def _seconds(clock: RankClock, call: Exchange, nbytes: int, captured: bool) -> float:
    call()
    if not captured:
        return 1e-3 * clock.median([call], ITERATIONS)
    repeats = REPEATS if nbytes <= MEASURED_AT_ONCE else 1

    def several() -> None:
        for _ in range(repeats):
            call()

    return 1e-3 * clock.median([clock.capture(several)], ITERATIONS) / repeats
