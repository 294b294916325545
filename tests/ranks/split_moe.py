"""A small random mixture of experts, whole or one rank's part of it: the same weights either way."""

import zlib
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

from tests.device.models import Megatron, gpt, untyped
from tests.ranks.split_model import random_part
from tests.ranks.staged_model import cuda_is_cpu

NUM_EXPERTS = 8


class _NoStream:
    """What megatron asks of a CUDA stream, on a CPU, where everything has run when it is asked for."""

    def wait_stream(self, _other: "_NoStream") -> None:
        """Has nothing to wait for."""

    def record_event(self) -> "_NoStream":
        """Gives what `synchronize` is called of."""
        return self

    def synchronize(self) -> None:
        """Has nothing to wait for."""


def _as_current(_stream: object) -> AbstractContextManager[None]:
    return nullcontext()


def _on_host(part: object, *, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Does what megatron's `maybe_move_tensor_to_cpu` does of a tensor that is elsewhere."""
    del record_stream
    return part.numpy() if as_numpy and isinstance(part, Tensor) else part


@contextmanager
def cpu_as_cuda() -> Generator[None]:
    """Lets megatron's all-to-all, which is made of CUDA streams, run on a machine without CUDA."""
    stream = _NoStream()
    with (
        mock.patch.multiple(
            torch.cuda,
            Stream=_NoStream,
            current_stream=lambda: stream,
            stream=_as_current,
            current_device=lambda: torch.device("cpu"),
        ),
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _on_host),
    ):
        yield


def split_moe(dispatcher: str = "allgather", *, sequence_parallel: bool = False) -> Megatron:
    """Gives this rank's part of a model with eight experts, two a token, and a shared one.

    The part is the one that megatron's groups say.
    """
    state = untyped(parallel_state)
    num_tp: int = state.get_tensor_model_parallel_world_size()
    num_etp: int = state.get_expert_tensor_parallel_world_size()
    num_ep: int = state.get_expert_model_parallel_world_size()
    with cuda_is_cpu():  # whose norms stand sequence parallelism
        model = gpt(
            spec={"num_experts": NUM_EXPERTS, "moe_grouped_gemm": False},
            num_layers=2,
            num_attention_heads=8,
            num_query_groups=4,
            tensor_model_parallel_size=num_tp,
            sequence_parallel=sequence_parallel,
            expert_model_parallel_size=num_ep,
            expert_tensor_parallel_size=num_etp,
            num_moe_experts=NUM_EXPERTS,
            moe_router_topk=2,
            moe_ffn_hidden_size=64,
            moe_shared_expert_intermediate_size=32,
            moe_token_dispatcher_type=dispatcher,
            moe_router_load_balancing_type="none",
            moe_grouped_gemm=False,
        )
    first: int = state.get_expert_model_parallel_rank() * (NUM_EXPERTS // num_ep)
    for name, parameter in model.named_parameters():
        before, is_expert, after = name.partition("local_experts.")
        if is_expert:
            place, _, rest = after.partition(".")
            key = f"{before}{first + int(place)}.{rest}"
            rank, num_ranks = state.get_expert_tensor_parallel_rank(), num_etp
        else:
            key = name
            rank, num_ranks = state.get_tensor_model_parallel_rank(), num_tp
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        parameter.data.copy_(random_part(name, parameter, rank, num_ranks, generator))
    return model
