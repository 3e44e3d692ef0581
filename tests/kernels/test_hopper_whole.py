"""A call of the Hopper set in one go launches what its stages launch one by one; on a GPU: to the same bits."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.runtime.jit import JITFunction

import gdncp
from gdncp import calls, stages, validation
from gdncp.backends import get_backend
from gdncp.backends.hopper_backend import HopperBackend
from gdncp.collectives import FixupStats
from gdncp.collectives.chain import mail_on
from gdncp.collectives.peer_memory import Mailboxes
from gdncp.collectives.wire import Wire
from gdncp_kernels.hopper import checkpoints, launch, precompute_t, recurrence_launches, state_fixup, states
from gdncp_kernels.hopper.launch import Launcher, Launches, Number, Pointer, Tile
from tests.conftest import hopper_only
from tests.numeric import random_state, random_tokens

H, D = 2, 128
HEADS = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": H}
LENGTHS = {"one CP chunk": [200], "several sequences": [700, 0, 130], "one short": [60, 900]}
STATES = {
    "none": {},
    "initial": {"initial_state": torch.float32},
    "narrow": {"initial_state": torch.bfloat16, "output_state": torch.float16},
    "pool": {"state_pool": torch.float32},
    "another pool": {"state_pool": torch.bfloat16, "output_state": torch.float32},
    "on every rank": {"final_state": "all"},
    "fp8": {"initial_state": torch.float8_e4m3fn, "output_state": torch.float8_e4m3fn},  # which torch moves
}
GRIDS = {
    "whole": (1024, True, 1),
    "split": (128, True, 1),
    "split, not opened": (128, False, 1),
    "spans": (128, True, 3),
    "one span": (128, True, 8),
}
SCRATCH = ("tiles", "maps", "entry_states", "final_states", "composed", "spans", "exits")
CALLS = {
    f"{states}, {lengths}, {grid}, {every}, {dim}": (states, lengths, grid, every, dim)
    for states in STATES
    for lengths in LENGTHS
    for grid in GRIDS
    for every in (0, 64)
    for dim in (D, 64)
    if dim == D or (states in ("narrow", "pool") and lengths == "several sequences")
}


def call_of(states, lengths, grid, every, dim=D, device="cpu"):
    """A plan, and a call of it with memory for all that it writes."""
    seq_lens, words, given = LENGTHS[lengths], STATES[states], {}
    grid = dict(zip(("cp_chunk_len", "opens", "fold_span"), GRIDS[grid], strict=True))
    plan = gdncp.plan_prefill(seq_lens, checkpoint_every_n_tokens=every, head_dim=dim, **grid, **HEADS)
    tokens, count = random_tokens(sum(seq_lens), heads=(1, 1, H), dim=dim, dtype=torch.bfloat16), len(seq_lens)
    for name, value in words.items():
        rows = 2 * count if "state_pool" in words else count
        given[name] = random_state(rows, H, dim).to(value) if isinstance(value, torch.dtype) else value
    if "state_pool" in words:
        given["state_indices"] = 2 * torch.arange(count).flip(0)
    else:
        given.setdefault("output_state", torch.zeros(count, H, dim, dim))
    if every:
        given["state_checkpoints"] = torch.zeros(len(plan.checkpoint_rows(0)), H, dim, dim)
    given["output"] = torch.zeros(sum(seq_lens), H, dim, dtype=torch.bfloat16)
    tensors = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in {**tokens, **given}.items()}
    return plan, {**tensors, "backend": "hopper"}


@pytest.fixture
def recorded(machine, monkeypatch):
    """`recorded(run, arguments)`: the launches of `run()`; addresses told by what of the caller's lies there, those in
    scratch by the order in which they first come."""
    seen, scratch = [], set()

    def argument(x, values):
        if isinstance(x, (Pointer, Tile)):
            like = x.dtype if isinstance(x, Pointer) else (x.like.shape, x.like.block_shape)
            return ("at", values[x.name], x.offset, like)
        return values[x.name] if isinstance(x, Number) else x.data_ptr() if isinstance(x, torch.Tensor) else x

    def enqueue(launches, *changing):
        values = {**launches._fixed, **dict(zip(launches._changing, changing, strict=True))}
        scratch.update(filter(None, map(values.get, SCRATCH)))
        for x in launches._launches:
            arguments = [argument(a, values) for a in x._arguments]
            seen.append((x._launcher.kernel.__name__, x.num_programs, arguments))

    def run_and_record(run, arguments):
        seen.clear()
        scratch.clear()
        kept, order = run(), {}
        callers = {x.data_ptr(): n for n, x in arguments.items() if isinstance(x, torch.Tensor) and x.numel()}
        del kept

        def place(x):  # a table's tensor is an address in both
            if not (type(x) is tuple and x[:1] == ("at",)):
                return x
            _, address, offset, like = x
            if address in callers:
                return callers[address], offset, like
            return (order.setdefault(address + offset, len(order)), like) if address in scratch else address

        return [(kernel, grid, [place(x) for x in given]) for kernel, grid, given in seen]

    monkeypatch.setattr(Launches, "__call__", enqueue)
    moves = Launcher(JITFunction(getattr(states.move_kernel, "fn", states.move_kernel)), num_warps=4)
    monkeypatch.setattr(states, "_launcher", moves)
    monkeypatch.setattr(type(get_backend("hopper")), "rejection_reason", lambda *_, **__: None)
    monkeypatch.setattr(validation, "_seen", lambda *_: False)
    monkeypatch.setattr(calls, "_KINDS", {})
    launch._encoder.cache_clear()
    states._prepared.cache_clear()
    yield run_and_record
    states._prepared.cache_clear()


def in_stages(plan, arguments):
    """With the entry states, kept so that no memory is handed out twice."""
    entry = gdncp.fixup(gdncp.summarise(plan, **arguments))
    return entry, gdncp.finish(entry)


@pytest.mark.parametrize("machine", ["3.6"], indirect=True)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_launches_what_the_stages_launch(recorded, monkeypatch, call):
    plan, arguments = call_of(*call)
    staged = recorded(lambda: in_stages(plan, arguments), arguments)
    whole = recorded(lambda: gdncp.prefill(plan, **arguments), arguments)
    assert [kernel for kernel, *_ in whole] == [kernel for kernel, *_ in staged] and whole == staged
    monkeypatch.setattr("gdncp.stages.summarise", None)  # not asked for, unless torch has to do something
    if call[0] != "fp8":
        assert recorded(lambda: gdncp.prefill(plan, **arguments), arguments) == staged


ONLY_IN_STAGES = {  # over the plan, over the arguments
    "lanes": ({"lanes_per_rank": 2}, {}),
    "checkpoints inside chunks": ({"checkpoint_every_n_tokens": 0, "checkpoint_positions": [[5], [], []]}, {}),
    "narrow checkpoints": ({}, {"state_checkpoints": torch.zeros(12, H, D, D).half()}),
    "entry states that are kept": ({}, {"keep_entry": True}),
    "times": ({}, {"timed": True}),
    "strided slots": ({}, {"state_pool": random_state(6, H, D), "state_indices": torch.arange(6)[::2]}),
}


@pytest.mark.parametrize("name", ONLY_IN_STAGES)
def test_where_something_comes_between_the_stages_run(recorded, monkeypatch, name):
    changes, more = ONLY_IN_STAGES[name]
    grid = {"cp_chunk_len": 128, "checkpoint_every_n_tokens": 64, "head_dim": D, **HEADS, **changes}
    plan, asked, real = gdncp.plan_prefill(LENGTHS["several sequences"], **grid), [], stages.summarise
    monkeypatch.setattr("gdncp.stages.summarise", lambda call: asked.append(call) or real(call))
    tokens = random_tokens(830, heads=(1, 1, H), dim=D, dtype=torch.bfloat16)
    monkeypatch.setattr(checkpoints, "finish", lambda *_: None)  # of the plain kind
    gdncp.prefill(plan, **tokens, backend="hopper", **more)
    assert len(asked) == 1


@pytest.fixture
def ranks(monkeypatch):
    """`ranks(rank, world_size)`: a group in which messages go nowhere; what is sent and received is told."""
    messages = []

    def join(rank, world_size=2):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        return messages

    def exchange(wire, sends, receives):
        messages.append([[(peer, x.data_ptr(), x.numel()) for peer, x in given] for given in (sends, receives)])
        return send(wire, sends, receives)

    send = Wire.exchange
    monkeypatch.setattr(Wire, "exchange", exchange)
    monkeypatch.setattr("gdncp.collectives.wire.backend_of", lambda group, device_type: "fake")
    monkeypatch.setattr("gdncp.collectives.compare_digest_once", lambda plan, group, **facts: None)
    yield join
    dist.destroy_process_group()


@pytest.mark.parametrize("machine", ["3.6"], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("ownership", ["contiguous", "zigzag"])
@pytest.mark.parametrize("span", [1, 2])
def test_so_do_calls_that_hand_states_on(recorded, ranks, monkeypatch, rank, initial, ownership, span):
    """Launches are those of the stages, and between the same ones the same messages."""
    messages = ranks(rank)
    words = {"cp_chunk_len": 128, "fixup": "chain", "finish": "entry_first", "ownership": ownership, "fold_span": span}
    plan = gdncp.plan_prefill([1000, 0, 330], world_size=2, **words, **HEADS)
    tokens = random_tokens(plan.num_tokens(rank), heads=(1, 1, H), dim=D, dtype=torch.bfloat16)
    arguments = {**tokens, "backend": "hopper", "output": torch.empty_like(tokens["v"])}
    arguments["output_state"] = torch.zeros(3, H, D, D)
    if initial:
        arguments["initial_state"] = random_state(3, H, D)

    def call():
        return [(kernel, grid) for kernel, grid, _ in recorded(lambda: gdncp.prefill(plan, **arguments), arguments)]

    run_whole = HopperBackend.run_whole
    monkeypatch.setattr(HopperBackend, "run_whole", lambda *_: None)
    staged = call()
    in_stages = [[[(peer, n) for peer, _, n in given] for given in both] for both in messages]
    monkeypatch.setattr(HopperBackend, "run_whole", run_whole)
    messages.clear()
    monkeypatch.setattr("gdncp.stages.summarise", None)
    assert call() == staged
    assert [[[(peer, n) for peer, _, n in given] for given in both] for both in messages] == in_stages != []


@pytest.mark.parametrize("machine", ["3.6"], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ownership", ["contiguous", "zigzag"])
@pytest.mark.parametrize("span", [1, 2])
def test_by_mail_they_are_launches_and_nothing_else(recorded, ranks, monkeypatch, rank, ownership, span):
    """The same ones in stages, with the same arguments; prepared once, for whatever mailboxes there are."""
    messages = ranks(rank)
    words = {"cp_chunk_len": 128, "fixup": "chain", "finish": "entry_first", "ownership": ownership, "fold_span": span}
    plan = gdncp.plan_prefill([1000, 0, 330], world_size=2, **words, **HEADS)
    tokens = random_tokens(plan.num_tokens(rank), heads=(1, 1, H), dim=D, dtype=torch.bfloat16)
    arguments = {**tokens, "backend": "hopper", "output": torch.empty_like(tokens["v"])}
    arguments |= {"output_state": torch.zeros(3, H, D, D), "initial_state": random_state(3, H, D)}
    boxes, asked, results = [Mailboxes(64, torch.zeros(8, dtype=torch.int64)) for _ in range(2)], [], []

    def mailboxes_of(group, device, num_channels):
        asked.append(num_channels)
        return boxes[-1]

    monkeypatch.setattr("gdncp.collectives.peer_memory.mailboxes_of", mailboxes_of)
    entry = []  # kept, so that no memory is handed out twice

    def staged_call():
        entry.append(gdncp.fixup(gdncp.summarise(plan, **arguments)))
        results.append(gdncp.finish(entry[-1]))

    staged = recorded(staged_call, arguments)
    monkeypatch.setattr("gdncp.stages.summarise", None)
    assert recorded(lambda: results.append(gdncp.prefill(plan, **arguments)), arguments) == staged
    tables = [
        [x for kernel, _, given in staged if kernel == "fold_runs_kernel" for x in given if x == box.address]
        for box in boxes
    ]
    assert not tables[0] and len(tables[1]) == len(mail_on(plan, rank, torch.device("cpu"))) > 0
    boxes.reverse()  # as where the group got more of them
    others = recorded(lambda: gdncp.prefill(plan, **arguments), arguments)
    assert [call[:2] for call in others] == [call[:2] for call in staged] and others != staged
    assert not messages and set(asked) == {H * D // 8 * (2 if ownership == "zigzag" else 1)}
    sent = results[0].fixup
    assert results[1].fixup == sent and sent.transport == "peer memory"
    assert sent.bytes_sent == sent.messages_sent * 4 * H * D * D
    counts = (sent.messages_sent, sent.messages_received)
    assert counts == ((1 + rank, 2 - rank) if ownership == "zigzag" else (1 - rank, rank))


@pytest.mark.parametrize("machine", ["3.6"], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_sent_has_left_before_stage_4_takes_the_sms(recorded, ranks, monkeypatch, rank):
    ranks(rank)
    words = {"cp_chunk_len": 128, "fixup": "chain", "finish": "entry_first"}
    plan, order, enqueue = gdncp.plan_prefill([1000], world_size=2, **words, **HEADS), [], Launches.__call__

    def note(launches, *changing):
        order.append([x._launcher.kernel.__name__ for x in launches._launches])
        enqueue(launches, *changing)

    monkeypatch.setattr(Launches, "__call__", note)
    monkeypatch.setattr(Wire, "finish", lambda wire: order.append("all has left"))
    tokens = random_tokens(plan.num_tokens(rank), heads=(1, 1, H), dim=D, dtype=torch.bfloat16)
    recorded(lambda: gdncp.prefill(plan, **tokens, backend="hopper"), tokens)
    assert order[-2] == "all has left" and "recurrence_kernel" in order[-1] and len(order) == 3


@pytest.mark.parametrize("machine", ["3.6"], indirect=True)
def test_a_rank_without_messages_connects_with_the_others(recorded, ranks, monkeypatch):
    """NCCL connects in a call of all ranks: those that exchange states would wait for it."""
    ranks(2, world_size=3)
    owners = [[(0, 256)], [(256, 640)], [(640, 1200)]]
    words = {"cp_chunk_len": 128, "fixup": "chain", "finish": "entry_first", "ownership": owners}
    plan, connected = gdncp.plan_prefill([640, 560], world_size=3, **words, **HEADS), []
    monkeypatch.setattr(Wire, "open_point_to_point", lambda wire: connected.append(wire.stage))
    monkeypatch.setattr("gdncp.stages.summarise", None)
    tokens = random_tokens(560, heads=(1, 1, H), dim=D, dtype=torch.bfloat16)
    arguments = {**tokens, "backend": "hopper", "output_state": torch.zeros(2, H, D, D)}
    results = []
    recorded(lambda: results.append(gdncp.prefill(plan, **arguments)), arguments)
    assert connected == ["state_fixup by chain"]
    assert results[0].fixup == FixupStats("chain", transport="fake")


def test_what_the_copy_engine_cannot_read_runs_in_stages(recorded):
    plan, arguments = call_of("pool", "several sequences", "split", 64)

    def off(x):
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)

    whole = recorded(lambda: gdncp.prefill(plan, **arguments), arguments)
    for name in ("q", "k", "v", "output"):
        odd = arguments | {name: off(arguments[name])}
        assert odd[name].data_ptr() % 16 and odd[name].is_contiguous()
        staged = recorded(lambda odd=odd: gdncp.prefill(plan, **odd), odd)
        assert [kernel for kernel, *_ in staged] == [kernel for kernel, *_ in whole]
        assert all(x[0] != name for *_, given in staged for x in given if type(x) is tuple)


def launchers_of(dim):
    return precompute_t._launcher, recurrence_launches._launchers[dim], state_fixup._launcher(dim, by_mail=False)


@pytest.mark.parametrize("machine", ["3.6"], indirect=True)
def test_lengths_that_only_the_device_knows_compile_once(machine, monkeypatch):
    """Their tables are new in every call, and so is what is prepared; the variants of the kernels are not."""
    monkeypatch.setattr(type(get_backend("hopper")), "rejection_reason", lambda *_, **__: None)
    monkeypatch.setattr(validation, "_seen", lambda *_: False)
    monkeypatch.setattr(validation, "cu_seqlens_arguments", lambda *_: None)
    for launcher in launchers_of(D):
        monkeypatch.setattr(launcher, "_variants", {})
    tokens = random_tokens(700, heads=(1, 1, H), dim=D, dtype=torch.bfloat16)
    counts = []
    for offsets in ([0, 700], [0, 300], [0, 700]):
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        gdncp.chunk_gated_delta_rule(**tokens, cu_seqlens=cu_seqlens, _cp_chunk_len=128, backend="hopper")
        counts.append((len(machine.compiled), len(machine.launched)))
    assert counts == [(4, 4), (4, 8), (4, 12)]


@pytest.mark.parametrize("machine", ["3.6"], indirect=True)
@pytest.mark.parametrize("dim", [128, 64])
def test_head_dims_have_boxes_stages_and_registers_of_their_own(recorded, machine, monkeypatch, dim):
    """Two CTAs of 64 share an SM, where one of 128 fills it."""
    for launcher in launchers_of(dim):
        monkeypatch.setattr(launcher, "_variants", {})
    plan, arguments = call_of("initial", "one CP chunk", "split", 64, dim)
    recorded(lambda: gdncp.prefill(plan, **arguments), arguments)
    caps = {options.get("maxnreg") for _, options in machine.compiled}
    assert caps == ({None, 80, 128} if dim == 64 else {None})
    boxes = [[x.block_shape for x in given if hasattr(x, "block_shape")] for given, _ in machine.compiled]
    tokens, square, gates = [64, dim], [64, 64], [1, 256]
    assert [tokens, square] in boxes and [[dim, dim]] in boxes
    assert [tokens, tokens, tokens, square, gates, square] in boxes


@hopper_only
@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_has_the_bits_of_the_stages(monkeypatch, call):
    results = []
    for staged in (True, False):
        plan, arguments = call_of(*call, device="cuda")
        if not staged and call[0] != "fp8":
            monkeypatch.setattr("gdncp.stages.summarise", None)
        result = in_stages(plan, arguments)[1] if staged else gdncp.prefill(plan, **arguments)
        written = (arguments.get(name) for name in ("output", "output_state", "state_pool", "state_checkpoints"))
        results.append([x.view(torch.uint8) for x in written if x is not None])
        assert result.output is arguments["output"]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
