"""Device memory of one rank of a plan, in bytes: what the stages and the fixup hold at their fullest."""

from __future__ import annotations

from gdncp.collectives.schedule import arrivals, head_range, manifests, own_links
from gdncp.collectives.spans import spans_of
from gdncp.plan import PrefillPlan
from gdncp.plan.checks import CHUNK
from gdncp.simulate.collectives import maps_before
from gdncp.work import num_stand_ins

_TOKEN_BYTES = 2  # bf16: q, k, v, outputs, and what stage 1 leaves for each pair of tokens of a chunk
_GATE_BYTES = 4


def rank_bytes(plan: PrefillPlan, rank: int) -> int:
    """Inputs, outputs, stage 1's tiles, maps and states, and the buffers of the fixup."""
    share, heads, dim = plan.rank_plan(rank), plan.num_state_heads, plan.head_dim
    token = (plan.num_q_heads + plan.num_k_heads + plan.num_v_heads + heads) * dim * _TOKEN_BYTES
    gates = 3 * heads * _GATE_BYTES  # alpha, beta and their cumulative sums
    chunks = sum(-(-item.num_tokens // CHUNK) for item in share.items)
    tiles = chunks * heads * CHUNK * CHUNK * _TOKEN_BYTES
    state = heads * dim * dim * 4
    states = (2 * share.num_maps + len(share.items) + len(share.final_sequences)) * state
    return share.num_tokens * (token + gates) + tiles + states + fixup_bytes(plan, rank)


def fixup_bytes(plan: PrefillPlan, rank: int) -> int:
    """Buffers that a fixup makes beside the maps and entry states."""
    state = plan.num_state_heads * plan.head_dim**2 * 4
    inside = 0  # states that spans, and what is known before an exchange, take
    if plan.fold_span > 1:
        spans = spans_of(plan, rank)
        inside += len(spans) + 2 * sum(span.row >= 0 for span in spans)
    if plan.finish == "entry_late":
        inside += num_stand_ins(plan.rank_plan(rank)) + (len(spans_of(plan, rank)) if plan.fold_span > 1 else 0)
    return inside * state + (_exchange_bytes(plan, rank) if plan.crosses_ranks else 0)


def _exchange_bytes(plan: PrefillPlan, rank: int) -> int:
    heads, world = plan.num_state_heads, plan.world_size
    head = plan.head_dim**2 * 4
    links = [link for link in own_links(plan, rank) if link.previous_rank is not None or link.next_rank is not None]
    if plan.fixup == "chain":  # a state that comes and one that goes
        return 2 * len(links) * heads * head
    if plan.fixup == "tree":  # composed maps: held, sent and received
        return 3 * len(links) * 2 * heads * head
    shipped = _shipped(plan)
    if plan.fixup == "all_gather":
        # what is sent and received, then the maps before its segments in order
        return ((world + 1) * max(shipped) + 2 * maps_before(plan)[rank]) * heads * head
    start, stop = head_range(rank, world, heads)
    entries = sum(map(len, arrivals(plan)))
    own = len(arrivals(plan)[rank])
    num_maps = sum(manifest.num_local_states for manifest in manifests(plan))
    # of its share: all maps as they come, in order, the states after them and those that it sends back
    share = sum(shipped) + 3 * num_maps + 1 + entries
    return (shipped[rank] * heads + share * (stop - start) + own * heads) * head


def _shipped(plan: PrefillPlan) -> list[int]:
    return [manifest.num_transitions + manifest.num_local_states for manifest in manifests(plan)]
