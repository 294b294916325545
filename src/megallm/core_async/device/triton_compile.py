"""How kernels are launched; and how those of many steps are compiled beside each other, before any runs.

A kernel is compiled for the types and constants that it is launched with, the first time that it is: in
tenths of a second, a few dozen times for the steps of one model. Most of that runs outside of Python's lock,
so threads share it. Knows kernels and threads; knows no step. Import it only where it runs, as the kernels.
"""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what a kernel's parameters are is Triton's own matter)

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any

from triton import AsyncCompileMode, FutureKernel
from triton.runtime import driver

MAX_THREADS = 32
"""Threads that compile: there are not many more kernels."""

_is_compiling = ContextVar("megallm_is_compiling", default=False)
"""The calling thread runs steps for `compile_all`."""


def launch(kernel, grid, *args, **options) -> None:
    """Launches a kernel; within `compile_all` has it compiled instead, and its outputs stay what they were.

    What indexes something of torch's must not come from a kernel that did not run: the few kernels that
    make such run within `compile_all` as well, by `launch_always`.
    """
    if not _is_compiling.get():
        kernel[grid](*args, **options)
        return
    compiled = kernel.warmup(*args, grid=grid, **options)
    if isinstance(compiled, FutureKernel) and compiled.future.done():
        compiled.result()  # from now on Triton knows it at once


def launch_always(kernel, grid, *args, **options) -> None:
    """Launches a kernel, within `compile_all` too, once it is compiled there."""
    kernel[grid](*args, **options)


def compile_all(steps: Iterable[Callable[[], object]]) -> int:
    """Runs steps without their kernels, which are compiled in threads meanwhile; gives how many these are.

    Those in Triton's cache on disk are read from it, and count. What else a step does is done, on numbers
    that mean nothing. Waits until all is compiled, after an error too: Triton keeps what it waits for.
    Raises: what a step raised, or the compilation of a kernel.
    """
    # in a context of its own: after an error Triton 3.6 would leave its mode on
    return copy_context().run(_compile_all, steps)


def _compile_all(steps: Iterable[Callable[[], object]]) -> int:
    num_threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    with _CompilerThreads(num_threads, "megallm-compile") as threads, AsyncCompileMode(threads) as mode:
        _is_compiling.set(True)
        for step in steps:
            step()
    return len(mode.future_kernels)


class _CompilerThreads(ThreadPoolExecutor):
    """Threads that compile kernels, and with each what passes its arguments.

    In Triton 3.6 that is a small C library: made as long as a kernel when the kernel first runs, if it isn't
    in the cache by then, and the same for all variants of the same types.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, name)
        self._makers: dict[object, object] = {}
        """Which kernel's thread makes it, by what it depends on."""

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:  # Any: as inherited
        """Has `fn` compile a kernel."""
        return super().submit(self._compiled, fn, *args, **kwargs)

    def _compiled(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # Any: the same
        kernel = fn(*args, **kwargs)
        types = (kernel.src.fn, *kernel.src.signature.items())
        if self._makers.setdefault(types, kernel) is kernel:
            active: Any = driver.active  # Any: a base class stands for the drivers
            active.launcher_cls(kernel.src, kernel.metadata)
        return kernel
