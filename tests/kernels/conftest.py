"""A compiler and a driver that are pretended, for what is launched where there is no GPU."""

from types import SimpleNamespace

import pytest
from triton.runtime.jit import JITFunction

METADATA = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}


def compiled_kernel(machine, number, num_maps):
    """What Triton hands back, as far as it is used: `triton-3.6` has a launcher per kernel, behind one that encodes."""

    def launcher(*arguments):
        machine.launched.append((number, arguments))

    def inner(*arguments):
        raise AssertionError(f"encodes maps again, for {launcher}")

    run = SimpleNamespace(
        global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=False, launch=inner
    )
    if machine.triton == "3.9":
        run.arg_annotations, run.kernel_signature = "annotations", "types"
    return SimpleNamespace(
        run=run,
        function=f"f{number}",
        packed_metadata="packed",
        metadata=SimpleNamespace(tensordesc_meta=[METADATA] * num_maps),
        launch_metadata=lambda grid, stream: ("metadata", grid, stream),
    )


@pytest.fixture(params=["3.6", "3.9"])
def machine(monkeypatch, request):
    """`compiled`: arguments and options; `launched`: variant and what Triton's launcher in C got; `encoded`: maps."""
    # a device that no machine has: variants are kept by launcher and device, and tests on a GPU may follow
    m = SimpleNamespace(
        device=1000, stream=-900, triton=request.param, compiled=[], launched=[], encoded=[], late=False
    )

    def run(kernel, *arguments, grid, warmup, **options):
        assert warmup
        m.compiled.append((arguments, options))
        number = len(m.compiled) - 1
        kernel = compiled_kernel(m, number, sum(hasattr(x, "block_shape") for x in arguments))
        m.one_launcher = lambda *all_: m.launched.append((int(all_[5 - 1][1:]), (*all_[:-1], *all_[-1])))
        return SimpleNamespace(result=lambda: kernel) if m.late else kernel

    def fill(*arguments):
        m.encoded.append(arguments)
        return f"map {len(m.encoded) - 1}"

    from gdncp_kernels.hopper import launch

    name = "fill_tma_descriptor_tiled" if m.triton == "3.9" else "fill_tma_descriptor"
    utils = SimpleNamespace(launch=lambda *all_: m.one_launcher(*all_), **{name: fill})
    monkeypatch.setattr(JITFunction, "run", run)
    active = SimpleNamespace(
        get_current_device=lambda: m.device, get_current_stream=lambda device: device + m.stream, utils=utils
    )
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    return m
