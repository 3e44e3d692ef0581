"""Launches at the price of a launch: the compiled variant is found by the few things in which our calls differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_ALIGNMENT = 16  # bytes: what Triton compiles pointers for


class Launcher:
    """A kernel, called as `launcher(num_programs, *arguments, **options)` with all its arguments in order.

    Triton finds the variant to run by specialising every argument anew, which takes longer than enqueuing it.  Here a
    variant is known by the device, the constexprs, and which pointers are there and aligned: the rest never changes, as
    each of our kernels sees one dtype per pointer, one box per tensor map, and integers that are not specialised.
    """

    def __init__(self, kernel: JITFunction[Callable[..., None]], **options: int):
        self._kernel, self._options = kernel, options
        self._jitted = isinstance(kernel, JITFunction)  # else by the interpreter
        parameters = kernel.params if self._jitted else []
        self._constants = [p.num for p in parameters if p.is_constexpr]
        self._others = [p.num for p in parameters if not p.is_constexpr]
        self._variants: dict[tuple[Any, ...], Any] = {}

    def __call__(self, num_programs: int, *arguments: Any) -> None:
        if not self._jitted:
            self._kernel[(num_programs,)](*arguments, **self._options)
            return
        key = (
            driver.active.get_current_device(),
            *[arguments[i] for i in self._constants],
            *[_kind(arguments[i]) for i in self._others],
        )
        variant = self._variants.get(key)
        if variant is not None:
            variant[num_programs, 1, 1](*arguments)
            return
        compiled = self._kernel[(num_programs,)](*arguments, **self._options)
        if hasattr(compiled, "asm"):  # not a compilation that still runs
            self._variants[key] = compiled


def _kind(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.data_ptr() % _ALIGNMENT == 0
    return None if x is None else type(x)
