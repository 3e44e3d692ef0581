"""A plan's tables on a device: made once, kept while something may read them."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gdncp
from gdncp import layout
from gdncp.work import upload
from tests.numeric import random_tokens

HEADS = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 2, "head_dim": 32}
CPU = torch.device("cpu")


def plan(length, **arguments):
    return gdncp.plan_prefill([length], cp_chunk_len=64, **HEADS, **arguments)


@pytest.fixture(autouse=True)
def no_layouts(monkeypatch):
    monkeypatch.setattr(layout, "_CACHE", type(layout._CACHE)())


def test_items_that_open_a_sequence_come_first_and_then_the_longest():
    varlen = gdncp.plan_prefill([300, 50, 420, 128], cp_chunk_len=128, first_cp_chunk_len=64, **HEADS)
    table = layout.layout_of_plan(varlen, 0, CPU).tables[0]
    assert table.opens.tolist() == [True] * 3 + [False] * 7
    assert table.num_tokens.tolist() == [64, 64, 64, 128, 128, 128, 108, 100, 64, 50]
    assert table.map_item.tolist() == [0, 1, 2, 3, 4, 5]  # stage 2 takes them in this order


def test_a_layout_is_made_once_per_plan_rank_and_device(monkeypatch):
    monkeypatch.setattr(layout, "_CACHE_SIZE", 2)
    first = layout.layout_of_plan(plan(300), 0, CPU)
    assert layout.layout_of_plan(plan(300), 0, CPU) is first  # another object, the same plan
    two = plan(300, world_size=2)
    shares = [layout.layout_of_plan(two, rank, CPU) for rank in range(2)]
    assert [share.num_items for share in shares] == [2, 3]
    assert layout.layout_of_plan(plan(300), 0, CPU) is not first  # the least recently used one had to go
    assert layout.layout_of_plan(two, 1, CPU) is shares[1]


def test_threads_share_layouts_that_come_and_go(monkeypatch):
    monkeypatch.setattr(layout, "_CACHE_SIZE", 2)
    plans = [plan(64 * n) for n in range(1, 7)]

    def use(seed):
        order = random.Random(seed)
        return [(p.num_cp_chunks, layout.layout_of_plan(p, 0, CPU).num_items) for p in order.choices(plans, k=300)]

    with ThreadPoolExecutor(4) as pool:
        assert all(wanted == got for pairs in pool.map(use, range(4)) for wanted, got in pairs)
    assert len(layout._CACHE) == 2


def test_what_graphs_read_is_kept_until_it_is_released(monkeypatch):
    """... and the current stream counts as one that reads it."""
    monkeypatch.setattr(layout, "_CACHE_SIZE", 1)
    used = []
    monkeypatch.setattr(layout._Cached, "use", lambda cached: used.append(cached))
    plans = [plan(64 * n) for n in range(1, 5)]
    kept = []
    for p in plans:
        kept.append(layout.layout_of_plan(p, 0, CPU))
        layout._CACHE[p.digest, 0, CPU, p.head_dim].captured = True
    layout.layout_of_plan(plan(640), 0, CPU)
    assert [layout.layout_of_plan(p, 0, CPU) for p in plans] == kept
    assert gdncp.release_captured(plans[1]) == 1 and gdncp.release_captured(plans[1]) == 0
    assert [cached.layout for cached in used] == [kept[1]]
    layout.layout_of_plan(plan(640), 0, CPU)
    assert layout.layout_of_plan(plans[0], 0, CPU) is kept[0] and layout.layout_of_plan(plans[1], 0, CPU) is not kept[1]
    assert gdncp.release_captured() == 3 and len(layout._CACHE) == 1


def test_no_table_is_copied_while_a_graph_is_captured(monkeypatch):
    """A layout is kept for graphs; tables of fixups may have been dropped since."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"tables are not all on cuda:0: call gdncp\.warmup, or run once"):
        upload({"rows": [1, 2]}, torch.device("cuda:0"))


def test_all_of_a_layouts_memory_is_known():
    """... also tables that are made on first use."""
    made = layout.layout_of_plan(plan(300, lanes_per_rank=2, world_size=2, finish="entry_late"), 1, CPU)
    derived = [*made.tables_from_zeros, *(table.before_exchange for table in made.tables)]
    known = {x.data_ptr() for x in layout._tensors(made)}
    for part in (*made.tables, *derived, made.tables[0].early, made.runs):
        assert {x.data_ptr() for x in vars(part).values() if isinstance(x, torch.Tensor)} <= known
    assert {x.data_ptr() for x in (made.first_rows, made.first_sequences, made.final_sequences)} <= known


@pytest.mark.gpu
def test_a_layout_that_goes_is_read_to_the_end_on_every_stream(monkeypatch):
    monkeypatch.setattr(layout, "_CACHE_SIZE", 1)
    tokens, prepared = {n: x.cuda() for n, x in random_tokens(300, dim=32).items()}, plan(300)
    expected = gdncp.prefill(prepared, **tokens, backend="triton").output  # compiles
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        output = gdncp.prefill(prepared, **tokens, backend="triton").output
    layout.layout_of_plan(plan(64), 0, tokens["q"].device)
    taken = [torch.full((n,), 1 << 40, device="cuda") for n in range(1, 200) for _ in range(4)]
    torch.cuda.synchronize()
    assert torch.equal(output, expected) and taken


@pytest.mark.gpu
def test_a_captured_graph_keeps_the_tables_that_it_reads(monkeypatch):
    tokens = {n: x.cuda() for n, x in random_tokens(300, dim=32).items()}
    stream, graph, prepared = torch.cuda.Stream(), torch.cuda.CUDAGraph(), plan(300, lanes_per_rank=2)
    with torch.cuda.stream(stream):
        gdncp.prefill(prepared, **tokens, backend="triton")  # compiles
        layout._CACHE.clear()
        with pytest.raises(RuntimeError, match=r"call gdncp.warmup, or run once, before a capture"):
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                gdncp.prefill(prepared, **tokens, backend="triton")
        gdncp.warmup(prepared, device="cuda")
        with torch.cuda.graph(graph, stream=stream):
            result = gdncp.prefill(prepared, **tokens, backend="triton")
    monkeypatch.setattr(layout, "_CACHE_SIZE", 1)
    for length in range(64, 640, 64):  # would take the tables' place and memory
        layout.layout_of_plan(plan(length), 0, tokens["q"].device)
    graph.replay()
    torch.cuda.synchronize()
    expected = gdncp.gated_delta_rule_reference(**tokens)
    for x, reference in ((result.output, expected.output), (result.final_state, expected.final_state)):
        assert (x.cpu() - reference).norm() <= 2e-5 * reference.norm()


@pytest.mark.gpu
def test_tables_that_are_released_are_read_to_the_end_by_a_replay_under_way(monkeypatch):
    monkeypatch.setattr(layout, "_CACHE_SIZE", 1)
    tokens, prepared = {n: x.cuda() for n, x in random_tokens(300, dim=32).items()}, plan(300)
    expected = gdncp.prefill(prepared, **tokens, backend="triton").output  # tables of the default stream
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        output = gdncp.prefill(prepared, **tokens, backend="triton").output
    with torch.cuda.stream(stream):
        output.fill_(torch.nan)
        torch.cuda._sleep(200_000_000)
        graph.replay()
        assert gdncp.release_captured(prepared) == 1
    layout.layout_of_plan(plan(64), 0, tokens["q"].device)
    assert prepared.digest not in {digest for digest, *_ in layout._CACHE}
    taken = [torch.full((n,), 1 << 40, device="cuda") for n in range(1, 200) for _ in range(4)]
    torch.cuda.synchronize()
    assert torch.equal(output, expected) and taken


@pytest.mark.gpu
def test_a_stream_waits_for_tables_that_another_one_copies():
    tokens, prepared = {n: x.cuda() for n, x in random_tokens(300, dim=32).items()}, plan(300)
    gdncp.prefill(prepared, **tokens, backend="triton")  # compiles
    layout._CACHE.clear()
    expected = gdncp.gated_delta_rule_reference(**tokens)
    torch.cuda.synchronize()
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(200_000_000)  # a tenth of a second: the copy lies behind it
        gdncp.warmup(prepared, device="cuda")
    with torch.cuda.stream(other):
        output = gdncp.prefill(prepared, **tokens, backend="triton").output
    torch.cuda.synchronize()
    assert (output.cpu() - expected.output).norm() <= 2e-5 * expected.output.norm()
