"""The context parallelism of peers, as processes: equal contiguous parts of one sequence, a scan of each part for its
map, one all-gather, then the pass over the part.  Nothing of theirs looks at the gates across GPUs.

All constants are here, with where they come from: times on H200s that the peers published, or that were measured
(`gdncp.simulate.tables`); of those, the rows that a constant was fitted to.  Heads have 128 elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from gdncp.plan.checks import CHUNK
from gdncp.plan.profiles import CostProfile
from gdncp.simulate.engine import Process
from gdncp.simulate.machine import Machine
from gdncp.simulate.schemes import Outcome, outcome

STAGES = ("scan", "all_gather", "pass")


@dataclass(frozen=True)
class Cost:
    """Of one 64-token chunk: a serial part, and one that grows with the state heads."""

    chunk_s: float
    head_s: float = 0.0

    def seconds(self, chunks: int, heads: int) -> float:
        return chunks * (self.chunk_s + heads * self.head_s)


@dataclass(frozen=True)
class Peer:
    name: str
    scan: Cost  # of a part, for its map
    walk: Cost  # the pass
    map_element_bytes: int
    host_before_s: float  # until the host has enqueued the scan
    host_after_s: float  # and from there until the pass; from the gather's end where that blocks the host
    blocks: bool  # the host waits for the gather
    last_scans: bool  # the last part too, whose map nobody needs
    split_from_tokens: int | None = None  # tokens a GPU from which a part is split within the GPU; None: never
    split_scan: Cost | None = None
    split_walk: Cost | None = None


# The pass: 1.14 µs a chunk and 83 ns a chunk and head give what FLA 0.6.0 takes on one GPU (measured, 131072 tokens at
# 32 and at 8 heads: 7.76 and 3.69 ms).  The host: 0.58 to 1.15 ms a call (measured), of which 0.3 before the scan.
# of a fold, a step and a head of it: taken for what ours was when the other constants were fitted
FOLD_STEP_S, FOLD_HEAD_S = 1.6e-6, 37.5e-9
_FLA_WALK = Cost(1.14e-6, 82.8e-9)
# FlashQLA's pass on one GPU: 2.66 ms for 131072 tokens at 32 heads (measured); unsplit it is taken to be serial.
_QLA_WALK = Cost(1.3e-6)
_QLA_SPLIT_WALK = Cost(0.0, 40.6e-9)


def _fla(version: str, scan_s: float) -> Peer:
    return Peer(f"fla-cp:{version}", Cost(scan_s), _FLA_WALK, 4, 0.30e-3, 0.80e-3, blocks=False, last_scans=False)


def _qla(version: str, scan: Cost, split_scan: Cost, split_from: int, host_s: float) -> tuple[Peer, Peer]:
    inter = Peer(f"flashqla-inter:{version}", scan, _QLA_WALK, 2, host_s / 2, host_s / 2, blocks=True, last_scans=True)
    both = Peer(
        f"flashqla-inter-intra:{version}", scan, _QLA_WALK, 2, host_s / 2, host_s / 2, blocks=True, last_scans=True,
        split_from_tokens=split_from, split_scan=split_scan, split_walk=_QLA_SPLIT_WALK,
    )  # fmt: skip
    return inter, both


PEERS = {
    peer.name: peer
    for peer in (
        # 0.5.1's TF32 scan: about 5 µs a chunk; 0.6.0's of three: 10.4 ms for 65536 tokens (measured)
        _fla("0.5.1", 5.0e-6),
        _fla("0.6.0", 10.16e-6),
        # Fitted to the differences between measured times of 131072 and 524288 tokens on 2 GPUs: 6.87 µs a chunk, and
        # 2.3 µs where split; the host's share to the 131072 tokens alone.  16384 tokens a GPU were not split.
        *_qla("0.1.3", Cost(5.57e-6), Cost(0.0, 31.3e-9), 32768, 0.42e-3),
        # The same from published times of 256K and 1M tokens at 16/32 on 8 GPUs: 5.49 and 2.13 µs a chunk.
        *_qla("published", Cost(4.19e-6), Cost(0.0, 25.9e-9), 0, 0.65e-3),
    )
}
DEFAULT_VERSIONS = {"fla-cp": "0.6.0", "flashqla-inter": "0.1.3", "flashqla-inter-intra": "0.1.3"}


def find(scheme: str) -> Peer:
    """By name, with a version or without: then the newest measured one."""
    name = scheme if ":" in scheme else f"{scheme}:{DEFAULT_VERSIONS.get(scheme, '')}"
    if name not in PEERS:
        raise ValueError(f"--scheme must be ours or one of {', '.join(PEERS)}, got {scheme!r}")
    return PEERS[name]


def simulate_peer(peer: Peer, profile: CostProfile, world_size: int, tokens: int, num_heads: int) -> Outcome:
    """One sequence on GPUs like the H200; links are the profile's.  On one GPU there is the pass alone."""
    machine = Machine(profile, world_size)
    engine = machine.engine
    part = -(-tokens // world_size)
    split = peer.split_from_tokens is not None and part >= peer.split_from_tokens
    scan, walk = (peer.split_scan, peer.split_walk) if split else (peer.scan, peer.walk)
    assert scan is not None and walk is not None
    state = num_heads * 128 * 128 * peer.map_element_bytes
    marks: list[list[float]] = [[] for _ in range(world_size)]

    def run(rank: int) -> Process:
        gpu = machine.gpus[rank]
        chunks = -(-max(min(tokens - rank * part, part), 0) // CHUNK)
        yield engine.after(peer.host_before_s)
        if world_size > 1:
            scans = peer.last_scans or rank < world_size - 1
            scanned = gpu.use(scan.seconds(chunks, num_heads) if scans else 0.0)
            enqueued = engine.after(0.0 if peer.blocks else peer.host_after_s)
            yield scanned
            marks[rank].append(engine.now)
            machine.count(rank, world_size - 1, *[(world_size - 1) * 2 * state] * 2)
            yield machine.meet("maps", machine.all_gather_seconds(2 * state))
            yield enqueued
            yield engine.after(peer.host_after_s if peer.blocks else 0.0)
            yield gpu.use(rank * (FOLD_STEP_S + num_heads * FOLD_HEAD_S))
            marks[rank].append(engine.now)
        else:
            marks[rank] += [engine.now] * 2
        yield gpu.use(walk.seconds(chunks, num_heads))
        marks[rank].append(engine.now)

    for rank in range(world_size):
        engine.start(run(rank))
    engine.run()
    return outcome(machine, STAGES, marks)
