"""What machines take, in seconds and bytes: the only place where the cost model has numbers.

To refit one, run `bench/sweep_cp_chunk_len.py` on the machine and change the fields that its lines contradict.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CostProfile:
    """What one machine takes with one kernel set.  "One tile" is a 64-token chunk of one head with head_dim 128.

    Stages 2 and 4 are launches of units, each on one worker: an N and an M, or the outputs, of a CP chunk and head.  A
    worker takes the next unit as soon as it is free, so a partial wave costs a whole one.
    """

    name: str
    workers: int  # units that run side by side: SMs of a GPU; 1 where one call uses the whole device
    opens: bool  # stage 2's launch also runs stage 4 of first CP chunks (`gdncp.backends.base.OpeningBackend`)
    launch_s: float  # starting a stage
    unit_s: float  # a unit's own start and end
    tile_t_s: float  # stage 1, which fills the workers however it is cut: per chunk and state head
    key_tile_t_s: float  # and per chunk and key head
    tile_n_s: float  # stage 2, the scan of N
    tile_m_s: float  # stage 2, the scan of M
    tile_prefill_s: float  # stage 4
    forget_bits: float  # −log2 of the `forget_below` that a call takes by default
    fold_launch_s: float  # starting one step of a fold
    fold_head_s: float  # folding one map of one head into a state
    collective_s: float  # starting a collective
    message_s: float  # one message between ranks of a node
    bytes_per_s: float  # of one rank, within a node
    ranks_per_node: int
    node_message_s: float  # one message between nodes
    node_peer_s: float  # one more peer of an all-to-all between nodes
    node_bytes_per_s: float  # of one rank, between nodes


PROFILES = {
    profile.name: profile
    for profile in (
        # The torch backend on one core (measured, within a factor of two), float32 tokens; gloo over the loopback.
        CostProfile(
            name="cpu",
            workers=1,
            opens=False,
            launch_s=1e-3,
            unit_s=0.0,  # heads are one call
            tile_t_s=3e-4,
            key_tile_t_s=0.0,
            tile_n_s=4e-4,
            tile_m_s=4e-4,
            tile_prefill_s=6e-4,
            forget_bits=24,
            fold_launch_s=2e-5,
            fold_head_s=1.5e-4,
            collective_s=5e-4,
            message_s=2e-4,
            bytes_per_s=1e9,
            ranks_per_node=1 << 30,  # one node
            node_message_s=2e-4,
            node_peer_s=1e-4,
            node_bytes_per_s=1e9,
        ),
        # The hopper backend on an H200, bf16 tokens, CUDA graphs, alpha = 1: bench/results/h200.json.
        CostProfile(
            name="h200",
            workers=132,  # its recurrence kernel fills an SM's shared memory
            opens=True,
            launch_s=4e-6,  # with unit_s: what 512 x 1 takes besides its tiles, two launches of one unit an SM
            unit_s=4e-6,
            # 32768 tokens, 16 key heads: 0.09 ms at 32 state heads; 0.145 at 64, what 8192 x 4 takes besides stage 4
            tile_t_s=4.4e-7,
            key_tile_t_s=5.6e-7,
            tile_n_s=1.15e-6,  # 32768 x 1, 16/32 in six CP chunks
            tile_m_s=1.15e-6,
            tile_prefill_s=2.05e-6,  # the same, and 2048 x 16
            forget_bits=16,
            # a step: 2.8 µs at 32 heads (32768 x 1), 1.9 at 8, 1.8 at 4 (262144 x 1)
            fold_launch_s=1.6e-6,
            fold_head_s=3.75e-8,
            # NVLink within 8 GPUs, 400 Gb/s a GPU between nodes: so that one map a rank at 32 heads costs what the
            # design's table of fixups says, within 25 %
            collective_s=12e-6,
            message_s=9e-6,
            bytes_per_s=400e9,
            ranks_per_node=8,
            node_message_s=10e-6,
            node_peer_s=3.6e-6,
            node_bytes_per_s=50e9,
        ),
    )
}
