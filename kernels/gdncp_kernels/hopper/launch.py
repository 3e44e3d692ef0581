"""Launches at the price of a launch: what stays the same from call to call is prepared once, addresses are filled in.

Triton finds the variant to run by specialising every argument anew, and encodes every tensor map anew, which takes
longer than enqueuing the kernel.  Here a variant is known by its constexprs and by which pointers are there and
aligned: the rest never changes, as a launch sees one dtype per pointer, one box per tensor map, and integers that are
not specialised.  Pointers go to Triton's launcher in C as addresses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton.backends.nvidia.driver as nvidia
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_ALIGNMENT = 16  # bytes: what Triton compiles pointers for
_MOST_FILLED = 128  # argument lists that `Launches` keep, half a KiB a kernel: a model's layers have a pool each


@dataclass(frozen=True)
class Pointer:
    """An argument that changes: the address that a `Launch` gets under this name, plus `offset` bytes."""

    name: str
    dtype: torch.dtype
    offset: int = 0
    aligned: bool = True

    def data_ptr(self) -> int:
        """All that a compiler asks of a tensor, beside its dtype."""
        return 0 if self.aligned else 1


@dataclass(frozen=True)
class Tile:
    """A tensor map of what lies at the address that a `Launch` gets under this name, plus `offset` bytes."""

    name: str
    like: TensorDescriptor
    offset: int = 0


@dataclass(frozen=True)
class Number:
    """A number that changes."""

    name: str
    like: int | float


def _is_wide(x: object) -> bool:
    """Triton compiles ints of more than 32 bits as another type."""
    return isinstance(x, int) and not -(1 << 31) <= x < 1 << 31


class Launcher:
    """A kernel.  Called as `launcher(num_programs, *arguments)` with all its arguments in order, or prepared."""

    def __init__(self, kernel: JITFunction[Callable[..., None]], **options: int):
        self.kernel, self.options = kernel, options
        self.jitted = isinstance(kernel, JITFunction)  # else by the interpreter
        self._constants = frozenset(p.num for p in kernel.params if p.is_constexpr) if self.jitted else frozenset()
        self._variants: dict[tuple[Any, ...], _Variant] = {}

    def __call__(self, num_programs: int, *arguments: Any) -> None:
        if not self.jitted:
            self.kernel[(num_programs,)](*arguments, **self.options)
            return
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        variant = self.variant(arguments)
        variant.launch(*variant.arguments(num_programs, stream, values))

    def variant(self, arguments: Sequence[Any]) -> _Variant:
        """The variant for such arguments, in order, on the current device; compiled, or loaded, once."""
        key = (driver.active.get_current_device(), *map(self._fact, range(len(arguments)), arguments))
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = self.compiled(arguments)
        return variant

    def _fact(self, i: int, x: Any) -> Any:
        """What a variant depends on in argument i."""
        if x is None or i in self._constants:
            return x
        if isinstance(x, (torch.Tensor, Pointer)):
            return x.dtype, x.data_ptr() % _ALIGNMENT == 0
        if isinstance(x, TensorDescriptor):
            return x.base.dtype, tuple(x.block_shape), x.layout
        return type(x), _is_wide(x)

    def compiled(self, arguments: Sequence[Any]) -> _Variant:
        """By Triton, which keeps what it has compiled."""
        kernel: Any = self.kernel.run(*arguments, grid=(1,), warmup=True, **self.options)
        return _Variant(kernel.result() if hasattr(kernel, "result") else kernel)  # which may still be compiled

    def prepare(self, num_programs: int, arguments: Mapping[str, Any]) -> Launch:
        """Arguments by name; those that change are a `Pointer`, `Tile` or `Number`."""
        return Launch(self, num_programs, [arguments[name] for name in self.kernel.arg_names])


class Launch:
    """A kernel with its grid and arguments, but for what changes."""

    def __init__(self, launcher: Launcher, num_programs: int, arguments: Sequence[Any]):
        self._launcher, self.num_programs, self._arguments = launcher, num_programs, arguments
        self._aligned = launcher.variant([getattr(x, "like", x) for x in arguments])
        metadata = iter(self._aligned.tensor_maps)
        self._values: list[Any] = []
        self._pointers: list[tuple[int, str, int]] = []  # position in `_values`, name, offset
        self._tiles: list[tuple[int, str, int, Callable[[int], Any]]] = []  # the same, and what encodes a map
        self._numbers: list[tuple[int, str]] = []
        for x in arguments:
            at = len(self._values)
            if isinstance(x, Tile):
                encode = _encoder(_fill(), _frozen(next(metadata)), *x.like.shape, x.like.strides[0])
                self._tiles.append((at, x.name, x.offset, encode))
                self._values += [None, *x.like.shape, *x.like.strides]  # the last four always follow a map
                continue
            if isinstance(x, Pointer):
                self._pointers.append((at, x.name, x.offset))
            elif isinstance(x, Number):
                self._numbers.append((at, x.name))
            self._values.append(x.data_ptr() if isinstance(x, torch.Tensor) else x)

    def fill(self, changing: Mapping[str, Any]) -> tuple[_Variant, list[Any]]:
        """The variant for such values, by name, and all arguments as Triton's launcher takes them."""
        values, bits = self._values.copy(), 0
        for at, name, offset in self._pointers:
            values[at] = address = changing[name] + offset
            bits |= address
        for at, name, offset, encode in self._tiles:
            values[at] = encode(changing[name] + offset)
        for at, name in self._numbers:
            values[at] = changing[name]
        if bits % _ALIGNMENT == 0:
            return self._aligned, values
        aligned = iter([values[at] % _ALIGNMENT == 0 for at, _, _ in self._pointers])
        arguments = [
            replace(x, aligned=next(aligned)) if isinstance(x, Pointer) else getattr(x, "like", x)
            for x in self._arguments
        ]
        return self._launcher.variant(arguments), values


class Launches:
    """Kernels one after the other: `launches(*values)`, what changes in any of them in the order of `changing`."""

    def __init__(self, changing: Sequence[str], *launches: Launch, **fixed: Any):
        """`fixed`: values that do not change, by name."""
        self._changing, self._launches, self._fixed = tuple(changing), launches, fixed
        self._device, self._current_stream = driver.active.get_current_device(), driver.active.get_current_stream
        # allocators hand out the same memory again and again
        self._filled = lru_cache(maxsize=_MOST_FILLED)(self._fill)

    def __call__(self, *changing: Any) -> None:
        fill = self._fill if _hooked() else self._filled
        for launch, arguments in fill(self._current_stream(self._device), *changing):
            launch(*arguments)

    def _fill(self, stream: int, *changing: Any) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
        """Triton's launcher for each kernel, and all its arguments."""
        by_name = {**self._fixed, **dict(zip(self._changing, changing, strict=True))}
        filled = [(launch.num_programs, *launch.fill(by_name)) for launch in self._launches]
        return [(variant.launch, variant.arguments(count, stream, values)) for count, variant, values in filled]


class _Variant:
    """A kernel compiled for, and loaded on, the current device, and how Triton's launcher in C is called."""

    def __init__(self, kernel: Any):
        self._kernel = kernel  # its code is unloaded with it
        run = kernel.run  # loads it
        assert not (run.global_scratch_size or run.profile_scratch_size), "our kernels need no scratch of Triton's"
        self.tensor_maps = getattr(kernel.metadata, "tensordesc_meta", None) or ()
        flags: tuple[Any, ...] = (kernel.function, run.launch_cooperative_grid, run.launch_pdl)
        self._one_list = hasattr(run, "arg_annotations")
        if self._one_list:  # Triton has one launcher for all kernels, which takes their arguments as a list
            self.launch = driver.active.utils.launch
            self._flags: tuple[Any, ...] = (*flags, kernel.packed_metadata)
            self._behind_hooks: tuple[Any, ...] = (None, None, run.arg_annotations, run.kernel_signature)
        else:  # it made one for this kernel
            self.launch = _unwrapped(run.launch)
            self._flags, self._behind_hooks = (*flags, None, None, kernel.packed_metadata), ()

    def arguments(self, num_programs: int, stream: int, values: list[Any]) -> tuple[Any, ...]:
        """All of `launch`, a profiler's hooks among them where there are."""
        grid, hooks = (num_programs, 1, 1), (None, None, None)
        if _hooked():
            runtime = knobs.runtime
            hooks = (self._kernel.launch_metadata(grid, stream), runtime.launch_enter_hook, runtime.launch_exit_hook)
        return (*grid, stream, *self._flags, *hooks, *self._behind_hooks, *((values,) if self._one_list else values))


def _hooked() -> bool:
    """Whether a profiler wants to see launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def _unwrapped(launch: Any) -> Any:
    """Triton's launcher in C, without the Python around it that encodes tensor maps at every launch."""
    return inspect.getclosurevars(launch).nonlocals["launcher"] if inspect.isfunction(launch) else launch


def _frozen(metadata: Mapping[str, Any]) -> tuple[int, int, int, tuple[int, ...]]:
    assert not metadata["fp4_padded"]
    host_type = nvidia.TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]]
    return metadata["swizzle"], metadata["elem_size"], host_type, tuple(metadata["block_size"])


def _fill() -> Callable[..., Any]:
    """What encodes a tensor map: address, element and box, shape, strides, padding -> what Triton's launcher takes."""
    utils = driver.active.utils
    name = "fill_tma_descriptor_tiled" if hasattr(utils, "fill_tma_descriptor_tiled") else "fill_tma_descriptor"
    fill: Callable[..., Any] = getattr(utils, name)
    return fill


@lru_cache(maxsize=256)
def _encoder(
    fill: Callable[..., Any],
    metadata: tuple[int, int, int, tuple[int, ...]],
    num_rows: int,
    num_columns: int,
    stride: int,
) -> Callable[[int], Any]:
    """address -> the encoded tensor map of [num_rows, num_columns], rows `stride` elements apart, that lies there."""
    shape, strides = (num_rows, num_columns), (stride, 1)

    @lru_cache(maxsize=256)  # a map says nothing but where what lies
    def encode(address: int) -> Any:
        return fill(address, *metadata, shape, strides, 0)

    return encode
