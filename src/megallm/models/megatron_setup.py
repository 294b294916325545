"""What megatron-core needs before a model is built: a quiet import, and process groups.

Knows torch.distributed and megatron's parallel state; knows no model.
"""
# torch.distributed is partly, megatron-core wholly untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from megallm.core_async.errors import UnsupportedModelError
from megallm.models.launched import launched
from megallm.models.rank_part import Place, RankPart, Sizes

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_WARNINGS: Final = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "absl.logging is not installed",
    "The following imports from `dynamic_context.py`",
    "full scope is deprecated",
    "MLP requires ffn_hidden_size",
    "When using expert parallelism and tensor parallelism for training",
    "torch.distributed is disabled, unavailable or uninitialized",
    "The argument order of load has been changed",
    "Please use DTensor instead",
)
"""How the warnings start that megatron-core 0.19 gives, or causes, at import, while it builds a model and
while it loads a distributed checkpoint."""

_LOG_LINES: Final = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
"""Loggers, and how the line starts that each writes for every user of a GPTModel, or without a GPU."""

_BACKEND: Final = "megallm_loopback"


@contextmanager
def quiet_megatron() -> Generator[None]:
    """Hides what megatron-core says about itself, and nothing else, within the block.

    Wraps imports of megatron-core and the building of a model; a caller can act on none of it.
    """
    filters = [(logging.getLogger(name), _Dropper(start)) for name, start in _LOG_LINES.items()]
    for logger, dropper in filters:
        logger.addFilter(dropper)
    try:
        with warnings.catch_warnings():
            for start in _WARNINGS:
                warnings.filterwarnings("ignore", start)
            yield
    finally:
        for logger, dropper in filters:
            logger.removeFilter(dropper)


def sizes_to_use(tp: int | None, pp: int | None, ep: int | None) -> Sizes:
    """Gives the sizes to split models by: the parallel state's where that is set up, else those asked for.

    Raises: ValueError where the two differ, or the processes are too few or left over.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    asked = {"tp": tp, "pp": pp, "ep": ep}
    if parallel_state.is_initialized():
        sizes = current_part().sizes
        for name, size in asked.items():
            if size is not None and size != getattr(sizes, name):
                raise ValueError(
                    f"{name} is {size}, and megatron's parallel state is set up with {getattr(sizes, name)}; "
                    f"leave {name} out, or set the parallel state up with {size}"
                )
        return sizes
    sizes = Sizes.asked(**{name: 1 if size is None else size for name, size in asked.items()})
    sizes.check_world(dist.get_world_size() if dist.is_initialized() else launched().num_processes)
    return sizes


def ensure_process_groups(sizes: Sizes | None = None, device: "torch.device | None" = None) -> None:
    """Sets up torch.distributed and megatron's parallel state, unless they are set up.

    For the processes that a launcher started, over NCCL where `device` is a GPU, else over gloo; for this
    process alone where none did. Groups of one never talk to anybody; they listen on a port of the loopback
    interface because gloo can't do otherwise. Groups that the caller set up are left as they are.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        return
    if not dist.is_initialized():
        if launched().num_processes > 1:
            dist.init_process_group("nccl" if device is not None and device.type == "cuda" else "gloo")
        else:
            if _BACKEND not in dist.Backend.backend_list:
                dist.Backend.register_backend(_BACKEND, _LoopbackGloo(), devices=["cpu", "cuda"])
            dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    split = sizes or Sizes()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=split.tp,
        pipeline_model_parallel_size=split.pp,
        expert_model_parallel_size=split.ep,
        expert_tensor_parallel_size=split.etp,
        create_gloo_process_groups=False,
    )


def current_part() -> RankPart:
    """Gives this rank's part of a model, as megatron's parallel state has it.

    Raises: UnsupportedModelError where it cuts the stages into smaller ones.
    """
    from megatron.core import parallel_state

    state: Any = parallel_state  # Any: its numbers may be None by their types
    num_chunks = state.get_virtual_pipeline_model_parallel_world_size()
    if num_chunks is not None and num_chunks > 1:
        raise UnsupportedModelError(
            f"the virtual pipeline model parallel size is {num_chunks}; load_model builds stages in one "
            "piece, so it must be None"
        )
    return RankPart(
        tp=Place(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        pp=Place(state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()),
        ep=Place(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        etp=Place(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
    )


class _LoopbackGloo:
    """Makes gloo groups that share one listening socket, bound to loopback.

    torch's own "gloo" opens one socket for each of megatron's 24 groups, on whatever interface the
    host's name resolves to, and 72 threads; the test of process groups counts them.
    """

    def __init__(self) -> None:
        self._device: object | None = None

    def __call__(self, store: "dist.Store", rank: int, size: int, timeout: timedelta) -> "dist.ProcessGroup":
        import torch.distributed as dist

        gloo: Any = dist.ProcessGroupGloo  # Any: its options have names with an underscore only, and no types
        if self._device is None:
            self._device = gloo.create_device(hostname="127.0.0.1")
        options = gloo._Options()  # noqa: SLF001 - as said above
        options._devices = [self._device]  # noqa: SLF001 - as said above
        options._threads = 1  # noqa: SLF001 - as said above
        options._timeout = timeout  # noqa: SLF001 - as said above
        return gloo(store, rank, size, options)


class _Dropper(logging.Filter):
    """Drops the records that start in one way."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._start)
