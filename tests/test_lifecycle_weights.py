"""The lifecycle round a real model: its weights change in place, and its cache goes and comes back."""

import contextlib
import threading
from collections.abc import Generator

import anyio
import pytest
import torch
from anyio import to_thread
from megatron.core.inference.config import (
    InferenceConfig,
    KVCacheManagementMode,
    PrefixCachingEvictionPolicy,
)

from megallm.core_async.llm import MegatronAsyncLLM
from megallm.core_async.result import Result
from megallm.sync.llm import MegatronLLM
from tests.device.models import Megatron, plain_continuation
from tests.fakes import FakeTokenizer
from tests.small_llm import (
    Brake,
    brake,
    expected,
    greedy,
    native_llm,
    new_model,
    settings,
    sync_llm,
    tokens_of,
)

EVERY_KV_MODE = pytest.mark.parametrize("kv_mode", list(KVCacheManagementMode), ids=lambda mode: mode.value)

PROMPTS = [[3, 1, 4, 1, 5], list(range(20, 50)), [7]]
LONG = 24


def change(model: Megatron) -> None:
    """Trains a step, in place: enough to change what is generated."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def sharing(kv_mode: KVCacheManagementMode) -> InferenceConfig:
    """Gives a config with a prefix cache that outlives its requests."""
    return settings(
        kv_cache_management_mode=kv_mode,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
    )


@contextlib.contextmanager
def held_after(brakes: Brake, num_forwards: int) -> Generator[None]:
    """Lets some forward passes through and holds the next; goes on when the block ends."""
    brakes.hold(after=num_forwards)
    try:
        yield
    finally:
        brakes.release()


# ---- the same weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pause", "suspend"])
@EVERY_KV_MODE
def test_a_round_trip_changes_no_output_of_a_real_model(kv_mode: KVCacheManagementMode, how: str) -> None:
    """With requests in flight, one of them streamed: as without, to the token."""
    with brake() as brakes, sync_llm(config=settings(kv_cache_management_mode=kv_mode)) as llm:
        results: list[Result] = []
        tokens: list[int] = []

        def read() -> None:
            tokens.extend(token for delta in llm.stream([9, 8], greedy(LONG)) for token in delta.token_ids)

        threads = [
            threading.Thread(target=lambda: results.extend(llm.generate(PROMPTS, greedy(LONG)))),
            threading.Thread(target=read),
        ]
        brakes.hold(after=8)
        for thread in threads:
            thread.start()
        assert brakes.is_holding.wait(5)
        stop = threading.Thread(target=getattr(llm, how))
        stop.start()
        brakes.release()
        stop.join()
        assert llm.engine.phase == {"pause": "paused", "suspend": "suspended"}[how]
        num_forwards = brakes.num_forwards
        llm.resume()
        assert brakes.num_forwards == num_forwards
        llm.unpause()
        for thread in threads:
            thread.join()
        assert tokens_of(results) == [expected(prompt, LONG) for prompt in PROMPTS]
        assert tokens == expected([9, 8], LONG)


@EVERY_KV_MODE
@pytest.mark.anyio
async def test_a_native_facade_does_the_same_in_the_callers_loop(kv_mode: KVCacheManagementMode) -> None:
    """Its calls wait in the loop that reads the stream."""
    async with native_llm(config=settings(kv_cache_management_mode=kv_mode)) as llm:
        tokens: list[int] = []
        async for delta in llm.stream([9, 8], greedy(LONG)):
            tokens += delta.token_ids
            if len(tokens) in range(5, 12):
                await llm.suspend()
                assert llm.engine.phase == "suspended"
                await llm.resume()
                await llm.unpause()
        assert tokens == expected([9, 8], LONG)


# ---- other weights -------------------------------------------------------------------------------


@EVERY_KV_MODE
def test_after_an_update_answers_are_those_of_a_fresh_engine(kv_mode: KVCacheManagementMode) -> None:
    """No key of the old weights is found by a prefix, and no copy of a weight was kept anywhere."""
    model = new_model()
    config = sharing(kv_mode)
    with MegatronLLM(model=model, tokenizer=FakeTokenizer(), inference_config=config) as llm:
        llm.generate(PROMPTS, greedy(LONG))
        before = llm.generate(PROMPTS, greedy(LONG))
        assert tokens_of(before) == [expected(prompt, LONG) for prompt in PROMPTS]
        assert before[1].num_cached_tokens > 0, "there is something stale to be found"
        with llm.updating_weights(epoch=1):
            assert llm.engine.phase == "suspended"
            change(model)
        assert llm.engine.phase == "running"
        after = llm.generate(PROMPTS, greedy(LONG))
        assert {result.num_cached_tokens for result in after} == {0}
        assert {str(result.policy_epoch) for result in after} == {"[(0, 1)]"}
    with MegatronLLM(model=model, tokenizer=FakeTokenizer(), inference_config=config) as fresh:
        assert tokens_of(after) == tokens_of(fresh.generate(PROMPTS, greedy(LONG)))
    assert tokens_of(after) == [plain_continuation(model, prompt, LONG) for prompt in PROMPTS]
    assert tokens_of(after) != tokens_of(before)


@EVERY_KV_MODE
@pytest.mark.anyio
async def test_a_request_in_flight_goes_on_with_the_new_weights(kv_mode: KVCacheManagementMode) -> None:
    """Up to its mark it is the old model's; where the cache was recomputed, the rest is the new one's."""
    model = new_model()
    config = sharing(kv_mode)
    prompt = PROMPTS[1]
    brakes = Brake(model)
    async with MegatronAsyncLLM(model=model, tokenizer=FakeTokenizer(), inference_config=config) as llm:
        await llm.set_generation_epoch(1)
        results: list[Result] = []

        async def generate() -> None:
            results.extend(await llm.generate([prompt], greedy(LONG)))  # pyright: ignore[reportArgumentType] - a list for a list

        async with anyio.create_task_group() as tasks:
            with held_after(brakes, 8):
                tasks.start_soon(generate)
                assert await to_thread.run_sync(brakes.is_holding.wait, 5)
            async with llm.updating_weights(epoch=2):
                change(model)
    brakes.remove()
    (result,) = results
    _, (place, epoch) = result.policy_epoch or []
    num_old = place + 1 - len(prompt)
    assert epoch == 2
    assert 8 <= num_old < LONG
    assert result.generated_tokens[:num_old] == expected(prompt, num_old)
    assert len(result.generated_tokens) == LONG
    if kv_mode is KVCacheManagementMode.RECOMPUTE:
        known = [*prompt, *result.generated_tokens[:num_old]]
        assert result.generated_tokens[num_old:] == plain_continuation(model, known, LONG - num_old)
        assert result.kv_cache_epoch == [(0, 2)]
    else:
        assert result.kv_cache_epoch == result.policy_epoch


def test_an_update_that_fails_leaves_the_engine_running_with_its_epoch() -> None:
    """The trainer's error is the caller's; the requests of others go on."""
    with sync_llm() as llm:
        llm.set_generation_epoch(4)
        with pytest.raises(ArithmeticError, match="loss is NaN"), llm.updating_weights(epoch=5):
            raise ArithmeticError("loss is NaN")
        assert llm.engine.phase == "running"
        assert llm.generate([PROMPTS[0]], greedy(4))[0].policy_epoch == [(0, 4)]


@pytest.mark.anyio
async def test_an_update_that_is_cancelled_leaves_the_engine_running() -> None:
    """A timeout round a stuck transfer must not leave everybody else suspended."""
    async with native_llm() as llm:
        with anyio.CancelScope() as scope:
            async with llm.updating_weights(epoch=5):
                scope.cancel()
                await anyio.sleep_forever()
        result = await llm.generate([PROMPTS[0]], greedy(4))
        assert llm.engine.phase == "running"
        assert tokens_of(result if isinstance(result, list) else [result]) == [expected(PROMPTS[0], 4)]
