"""Facades over a random model of three small layers: real tensors, real threads, answers in milliseconds."""

import functools
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from megatron.core.inference.config import InferenceConfig

from megallm.core_async.config import GIB
from megallm.core_async.llm import MegatronAsyncLLM
from megallm.core_async.result import Result
from megallm.core_async.sampling_params import SamplingParams
from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron
from megallm.sync.llm import MegatronLLM
from tests.device.models import Megatron, gpt, plain_continuation
from tests.device.test_model import snapshot
from tests.engines import expect_balanced, is_alive
from tests.fakes import FakeTokenizer

BLOCK_SIZE = 4
BYTES_PER_BLOCK = BLOCK_SIZE * 3 * 2 * (16 + 16) * 4
"""Tokens, layers, KV heads, the size of a key and a value, bytes of a float32."""


def new_model() -> Megatron:
    """Gives a model of its own; all of them have the same weights."""
    with quiet_megatron():
        ensure_process_groups()
        return gpt()


@functools.cache
def shared_model() -> Megatron:
    """Gives the model that tests bind one after the other."""
    return new_model()


@functools.cache
def _model_for_reference() -> Megatron:
    return new_model()


@functools.cache
def _expected(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    return tuple(plain_continuation(_model_for_reference(), list(prompt), num_tokens))


def expected(prompt: str | Sequence[int], num_tokens: int = 8) -> list[int]:
    """Gives the greedy continuation, from whole forward passes of a model that no engine touches."""
    tokens = FakeTokenizer().tokenize(prompt) if isinstance(prompt, str) else prompt
    return list(_expected(tuple(tokens), num_tokens))


def greedy(num_tokens: int | None = 8, **fields: Any) -> SamplingParams:  # Any: fields of many types
    """Gives greedy parameters that no token ends."""
    chosen: dict[str, Any] = {"temperature": 0.0, "num_tokens_to_generate": num_tokens, "termination_id": -1}
    return SamplingParams(**{**chosen, **fields})


def settings(*, num_blocks: int = 256, **changes: Any) -> InferenceConfig:  # Any: fields of many types
    """Gives a config for the small model, with exactly `num_blocks` blocks of 4 tokens."""
    fields: dict[str, Any] = {
        "block_size_tokens": BLOCK_SIZE,
        "buffer_size_gb": num_blocks * BYTES_PER_BLOCK / GIB,
        "max_requests": 16,
        "max_tokens": 256,
        "max_sequence_length": 128,
        **changes,
    }
    return InferenceConfig(**fields)


def threads_of_engines() -> list[str]:
    """Gives the names of the threads that engines have started and not ended."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("megallm")]


@contextmanager
def untouched(model: Megatron) -> Generator[None]:
    """Fails unless the block leaves the model as it was, to the attribute, and no thread behind."""
    before = snapshot(model)
    yield
    assert threads_of_engines() == []
    assert snapshot(model) == before, "the model was not given back as it was"


def make_llm(
    *, config: InferenceConfig | None = None, **arguments: Any
) -> MegatronLLM:  # Any: the public API
    """Gives a sync facade over the shared model; whoever takes it shuts it down."""
    return MegatronLLM(**_arguments(config, arguments))


def make_async_llm(
    *, config: InferenceConfig | None = None, **arguments: Any
) -> MegatronAsyncLLM:  # Any: the same
    """Gives an async facade over the shared model, not started."""
    return MegatronAsyncLLM(**_arguments(config, arguments))


def _arguments(config: InferenceConfig | None, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": shared_model(),
        "tokenizer": FakeTokenizer(),
        "inference_config": settings() if config is None else config,
        **arguments,
    }


@contextmanager
def sync_llm(*, config: InferenceConfig | None = None, **arguments: Any) -> Generator[MegatronLLM]:
    """Runs a sync facade; in the end all blocks are free, the threads gone, the model as it was."""
    with untouched(shared_model()):
        with make_llm(config=config, **arguments) as llm:
            yield llm
            expect_all_free(llm)
        del llm


@asynccontextmanager
async def native_llm(
    *, config: InferenceConfig | None = None, **arguments: Any
) -> AsyncGenerator[MegatronAsyncLLM]:
    """Runs an async facade natively in the test's loop, and holds it to the same."""
    with untouched(shared_model()):
        async with make_async_llm(config=config, **arguments) as llm:
            yield llm
            await expect_all_free_async(llm)
        del llm


@asynccontextmanager
async def hosted_llm(
    *, config: InferenceConfig | None = None, **arguments: Any
) -> AsyncGenerator[MegatronAsyncLLM]:
    """Runs an async facade on its private loop thread, and holds it to the same."""
    with untouched(shared_model()):
        llm = make_async_llm(config=config, **arguments)
        try:
            yield llm
            await expect_all_free_async(llm)
        finally:
            await llm.shutdown()
        del llm


def expect_all_free(llm: MegatronLLM) -> None:
    """Fails unless all blocks are free once nothing runs; one more request updates the figures."""
    if is_alive(llm.engine):
        llm.generate([1], greedy(1))
        expect_balanced(llm.engine.stats(), llm.engine.config.num_blocks)


async def expect_all_free_async(llm: MegatronAsyncLLM) -> None:
    """Fails unless all blocks are free once nothing runs; one more request updates the figures."""
    if is_alive(llm.engine):
        await llm.generate([1], greedy(1))
        expect_balanced(llm.engine.stats(), llm.engine.config.num_blocks)


def tokens_of(results: Sequence[Result]) -> list[list[int]]:
    """Gives what each result generated."""
    return [result.generated_tokens for result in results]


class Brake:
    """A hook on the model's first layer: counts the forward passes, holds them, and breaks them."""

    def __init__(self, model: Megatron) -> None:
        self._handle = model.decoder.layers[0].register_forward_pre_hook(self._before_forward)
        self._goes = threading.Event()
        self._goes.set()
        self._hold_from = 0
        self.is_holding = threading.Event()
        """Set while a forward pass is held."""
        self.num_forwards = 0
        self.failure: BaseException | None = None
        """What the next forward pass raises."""
        self.on_forward: Callable[[], None] = lambda: None

    def hold(self, *, after: int = 0) -> None:
        """Holds every forward pass from now on, the next `after` ones apart."""
        self._hold_from = self.num_forwards + after + 1
        self.is_holding.clear()
        self._goes.clear()

    def release(self) -> None:
        """Lets the forward passes run."""
        self._goes.set()

    def _before_forward(self, _module: object, _args: object) -> None:
        self.num_forwards += 1
        self.on_forward()
        if not self._goes.is_set() and self.num_forwards >= self._hold_from:
            self.is_holding.set()
            self._goes.wait()
        if self.failure is not None:
            raise self.failure

    def remove(self) -> None:
        """Takes the hook off the model."""
        self.release()
        self._handle.remove()


@contextmanager
def brake() -> Generator[Brake]:
    """Puts a brake on the shared model."""
    braked = Brake(shared_model())
    try:
        yield braked
    finally:
        braked.remove()
