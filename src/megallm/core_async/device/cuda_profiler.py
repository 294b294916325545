"""Starts and stops the CUDA profiler of this process, for tools that record from there to there (nsys, ncu).

Knows torch where something has imported it, and imports it for nobody: without it nothing runs on CUDA.
"""

import sys

from megallm.core_async.errors import NoProfilerError


def profile_cuda(action: str) -> None:
    """Starts or stops recording; does nothing more where no such tool runs the process.

    Raises: ValueError for another action than "start" and "stop"; NoProfilerError where this process has
    no CUDA, or CUDA refuses.
    """
    if action not in {"start", "stop"}:
        raise ValueError(f'action is {action!r}; it must be "start" or "stop"')
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        raise NoProfilerError("the model does not run on CUDA, whose profiler this starts and stops")
    profiler = torch.cuda.profiler
    try:
        (profiler.start if action == "start" else profiler.stop)()
    except RuntimeError as error:
        raise NoProfilerError(f"CUDA does not {action} its profiler: {error}") from error
