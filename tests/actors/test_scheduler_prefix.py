"""Prefix caching through the real actors: who computes what, and that nobody's tokens change by it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal

import anyio
import pytest
from msgspec.structs import replace

from megallm.core_async.engine import Engine
from megallm.core_async.messages import Completion
from tests.actors.scheduling import Account, Prompt, Pump, limits, pumping
from tests.engines import Rig, engine_config, fake_runner, inline_worker
from tests.fakes import FakeTokenizer, continuation

pytestmark = pytest.mark.anyio

BLOCK_SIZE = 4


def stem(num_tokens: int, first: int = 10) -> tuple[int, ...]:
    """Gives tokens to begin with."""
    return tuple((first + 3 * place) % 97 for place in range(num_tokens))


def num_cached(accounts: list[Account]) -> list[int]:
    """Gives how many tokens each found in the cache when it was first admitted; all have ended."""
    for account in accounts:
        account.check()
    return [account.ending.num_cached_tokens for account in accounts if account.ending is not None]


async def answers(pump: Pump, *prompts: Prompt) -> list[Account]:
    """Runs prompts to their end, all at once."""
    accounts = await pump.submit(*prompts)
    await pump.run()
    return accounts


# ---- at once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("extra", [-1, 0, 1])
async def test_copies_that_come_at_once_compute_their_prefix_once(extra: int, max_tokens: int) -> None:
    """A prompt of some blocks, and a token less or more: what is whole is shared, the last token is not."""
    prompt = stem(5 * BLOCK_SIZE + extra)
    shared = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    bounds = limits(
        max_tokens=max_tokens, max_requests=min(32, max_tokens), chunks_prompts=True, shares_prefixes=True
    )
    async with pumping(bounds, num_blocks=256) as pump:
        accounts = await answers(pump, *[Prompt(prompt, 3)] * 32)
        assert num_cached(accounts) == [0] + [shared] * 31
        assert pump.stats.prefill_tokens == len(prompt) + 31 * (len(prompt) - shared)
        assert pump.stats.preemptions == 0
        await pump.check_all_free()


@pytest.mark.parametrize("max_tokens", [7, 64])
async def test_a_shared_beginning_is_computed_once_for_all_tails(max_tokens: int) -> None:
    """The first pays for the system prompt; for the others it is as if there were none."""
    system = stem(15 * BLOCK_SIZE)
    tails = [(key, *stem(key % 7, key)) for key in range(64)]
    bounds = limits(
        max_tokens=max_tokens, max_requests=min(16, max_tokens), chunks_prompts=True, shares_prefixes=True
    )
    async with pumping(bounds, num_blocks=512) as pump:
        accounts = await answers(pump, *[Prompt((*system, *tail), 4) for tail in tails])
        assert num_cached(accounts) == [0] + [len(system)] * 63
        assert pump.stats.prefill_tokens == len(system) + sum(map(len, tails))
        await pump.check_all_free()


async def test_copies_wait_while_the_first_is_computed_in_many_steps_and_others_go_on() -> None:
    """Waiting for a prefix takes nobody's turn."""
    bounds = limits(max_tokens=8, max_requests=4, chunks_prompts=True, shares_prefixes=True)
    async with pumping(bounds, num_blocks=64) as pump:
        (decoding,) = await pump.submit(Prompt((1,), 20))
        await pump.turn()
        copies = await pump.submit(*[Prompt(stem(33), 2)] * 2)
        (other,) = await pump.submit(Prompt((2, 3), 2))
        await pump.run()
        assert num_cached(copies) == [0, 32]
        assert num_cached([other, decoding]) == [0, 0]
        assert other.num_passes == 0
        assert copies[1].num_passes == 1


async def test_copies_of_other_tenants_neither_wait_nor_share() -> None:
    """Nobody can tell from his own delay what another tenant is asking just now."""
    bounds = limits(max_tokens=64, shares_prefixes=True)
    async with pumping(bounds, num_blocks=64) as pump:
        accounts = await pump.submit(*[Prompt(stem(13), 2, salt=salt) for salt in ("", "red", "blue")])
        await pump.turn()
        assert pump.stats.running == 3
        await pump.run()
        assert num_cached(accounts) == [0, 0, 0]


@pytest.mark.parametrize("max_tokens", [8, 64])
async def test_forks_share_their_prompt_although_the_cache_is_off(max_tokens: int) -> None:
    """One prompt, n continuations: they come at once, and wait for one step only."""
    prompt = stem(5 * BLOCK_SIZE + 2)
    bounds = limits(max_tokens=max_tokens, max_requests=8, chunks_prompts=True)
    async with pumping(bounds, num_blocks=64, keeps_cached=False) as pump:
        forks = await pump.submit(*[Prompt(prompt, 6, is_fork=True, salt="one of many")] * 8)
        num_turns = 0
        while pump.stats.running < 8:
            await pump.turn()
            num_turns += 1
        assert num_turns <= 2 * -(-len(prompt) // max_tokens) + 2
        await pump.run()
        assert num_cached(forks) == [0] + [20] * 7
        assert pump.stats.prefill_tokens == len(prompt) + 7 * 2
        assert (pump.stats.cached_blocks, pump.stats.used_blocks) == (0, 0)
        (alone,) = await answers(pump, Prompt(prompt, 6, salt="one of many"))
        assert num_cached([alone]) == [0]


# ---- one after the other -------------------------------------------------------------------------


async def test_the_next_turn_of_a_conversation_finds_the_last() -> None:
    """Prompt and answer, as far as their blocks are whole; the last token of an answer is never computed."""
    async with pumping(limits(max_tokens=64, shares_prefixes=True), num_blocks=64) as pump:
        tokens = stem(10)
        for _ in range(3):
            (account,) = await answers(pump, Prompt(tokens, 7))
            (found,) = num_cached([account])
            assert found == (0 if len(tokens) == 10 else (len(tokens) - 4) // BLOCK_SIZE * BLOCK_SIZE)
            tokens = (*tokens, *account.tokens, 1, 2, 3)


async def test_what_was_evicted_is_computed_again() -> None:
    """The tail first: the beginning of a prompt outlives its end."""
    async with pumping(limits(max_tokens=64, shares_prefixes=True), num_blocks=12) as pump:
        prompt = Prompt(stem(24), 2)
        assert num_cached(await answers(pump, prompt)) == [0]
        assert num_cached(await answers(pump, prompt)) == [20]
        await answers(pump, Prompt(stem(32, first=50), 2))
        assert num_cached(await answers(pump, prompt)) == [12]
        await answers(pump, Prompt(stem(44, first=50), 3))
        assert num_cached(await answers(pump, prompt)) == [0]


async def test_without_a_cache_a_prefix_lives_as_long_as_those_who_use_it() -> None:
    """REF_ZERO."""
    async with pumping(
        limits(max_tokens=64, shares_prefixes=True), num_blocks=64, keeps_cached=False
    ) as pump:
        prompt = Prompt(stem(9), 6)
        first = await pump.submit(prompt)
        await pump.turn()
        second = await pump.submit(prompt)
        await pump.run()
        assert num_cached([*first, *second]) == [0, 8]
        assert pump.stats.free_blocks == 64
        assert num_cached(await answers(pump, prompt)) == [0]


async def test_a_request_that_began_on_a_hit_can_yield_and_come_back() -> None:
    """It finds its prefix again, and what it reports is what it found at first."""
    bounds = limits(max_tokens=32, max_requests=3, block_size=2, shares_prefixes=True)
    async with pumping(bounds, num_blocks=16) as pump:
        shared = stem(8)
        await answers(pump, Prompt((*shared, 1), 1))
        accounts = await answers(pump, *[Prompt((*shared, key), 14) for key in range(3)])
        assert num_cached(accounts) == [8, 8, 8]
        num_preemptions = [account.ending.num_preemptions for account in accounts if account.ending]
        assert num_preemptions[0] == 0
        assert num_preemptions[2] > 0
        await pump.check_all_free()


async def test_a_prompt_whose_log_probs_are_wanted_is_computed_although_it_is_cached() -> None:
    """The cache holds no logits. What it computes is of use to the next."""
    async with pumping(limits(max_tokens=64, shares_prefixes=True), num_blocks=64) as pump:
        tokens = stem(18)
        scored = Prompt(tokens, 3, scores=True, wants_log_probs=True, num_top=2)
        assert num_cached(await answers(pump, scored, scored)) == [0, 0]
        assert pump.stats.prefill_tokens == 36
        assert num_cached(await answers(pump, Prompt(tokens, 3), replace_scores(scored))) == [16, 0]


def replace_scores(prompt: Prompt) -> Prompt:
    """Gives the prompt to be scored and not to be continued."""
    return Prompt(prompt.tokens, 0, scores=True)


async def test_a_scored_prompt_that_yields_half_way_reports_each_log_prob_once() -> None:
    """It takes from the cache what it has reported, and computes the rest."""
    bounds = limits(max_tokens=4, max_requests=2, block_size=2, chunks_prompts=True, shares_prefixes=True)
    async with pumping(bounds, num_blocks=12) as pump:
        (first,) = await pump.submit(Prompt((1, 2), 18))
        await pump.turn()
        (scored,) = await pump.submit(Prompt(stem(16), 4, scores=True))
        await pump.run()
        assert num_cached([first, scored]) == [0, 0]
        assert scored.ending is not None
        assert scored.ending.num_preemptions > 0
        assert pump.stats.prefill_tokens < 2 + 16 * (1 + scored.ending.num_preemptions)


@pytest.mark.parametrize("max_tokens", [1, 7, 16, 64])
async def test_no_chunk_size_changes_a_token(max_tokens: int) -> None:
    """Hits end at blocks, chunks anywhere: where they meet must not show."""
    bounds = limits(
        max_tokens=max_tokens, max_requests=min(6, max_tokens), chunks_prompts=True, shares_prefixes=True
    )
    async with pumping(bounds, num_blocks=24) as pump:
        prompts = [Prompt((*stem(5 * (key % 6)), *stem(key % 5 + 1, key)), 1 + key % 9) for key in range(40)]
        accounts = await answers(pump, *prompts)
        assert sum(num_cached(accounts)) > 100
        await pump.check_all_free()


# ---- across a suspend ----------------------------------------------------------------------------


@asynccontextmanager
async def caching_engine(
    kv_mode: Literal["persist", "offload", "recompute"] = "persist", *, shares_prefixes: bool = True
) -> AsyncGenerator[Rig]:
    """Runs an engine that shares prefixes, and stops it."""
    config = replace(engine_config(), shares_prefixes=shares_prefixes, kv_mode=kv_mode)
    runner = fake_runner(config)
    rig = Rig(
        Engine(config, runner, FakeTokenizer(), make_worker=lambda each: inline_worker(each, 0.0)), runner
    )
    async with anyio.create_task_group() as tasks:
        await tasks.start(rig.engine.run)
        yield rig
        await rig.engine.shutdown()


async def answer(rig: Rig, prompt: tuple[int, ...]) -> Completion:
    """Gives what the engine gives for a prompt; its tokens are right."""
    (completion,) = await rig.complete(rig.request(prompt, 3))
    assert completion.token_ids == continuation(prompt, 3)
    return completion


@pytest.mark.parametrize(("kv_mode", "is_kept"), [("persist", True), ("offload", True), ("recompute", False)])
async def test_a_prefix_outlives_a_suspend_that_keeps_the_cache(
    kv_mode: Literal["persist", "offload", "recompute"], *, is_kept: bool
) -> None:
    """Whoever takes the memory for a while pays for nothing twice, and lost blocks are not read."""
    async with caching_engine(kv_mode) as rig:
        assert (await answer(rig, stem(13))).num_cached_tokens == 0
        await rig.engine.suspend()
        await rig.engine.resume()
        await rig.engine.unpause()
        assert (await answer(rig, stem(13))).num_cached_tokens == (12 if is_kept else 0)
        assert (await answer(rig, stem(13))).num_cached_tokens == 12


async def test_a_prefix_ends_with_the_weights_it_was_computed_with() -> None:
    """In-place updates are seen by whoever computes; a cached block has not seen them."""
    async with caching_engine("persist") as rig:
        await answer(rig, stem(13))
        await rig.engine.set_generation_epoch(1)
        assert (await answer(rig, stem(13))).num_cached_tokens == 0
        assert (await answer(rig, stem(13))).num_cached_tokens == 12
        await rig.engine.set_generation_epoch(2)
        assert (await answer(rig, stem(13))).num_cached_tokens == 0


async def test_forks_leave_nothing_behind_where_the_cache_is_off() -> None:
    """An off switch must be one: what they shared is free once the last of them has ended."""
    async with caching_engine(shares_prefixes=False) as rig:
        forks = [replace(rig.request(stem(13), 3), shares_prefix=True) for _ in range(3)]
        completions = await rig.complete(*forks)
        assert [each.num_cached_tokens for each in completions] == [0, 12, 12]
        assert (await answer(rig, stem(13))).num_cached_tokens == 0
        stats = rig.engine.stats()
        assert (stats.cached_blocks, stats.used_blocks) == (0, 0)


async def test_the_engines_figures_tell_the_hits_and_where_a_steps_time_went() -> None:
    """One Struct a step, for whoever scrapes it; reading it disturbs nobody."""
    async with caching_engine() as rig:
        await answer(rig, stem(13))
        await answer(rig, stem(13))
        stats = rig.engine.stats()
        assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (26, 12)
        assert stats.prefix_hit_rate == 12 / 26
        assert (stats.generated_tokens, stats.prefill_tokens) == (6, 14)
        assert 0 < stats.last_step.plan_s <= stats.all_steps.plan_s
        assert 0 < stats.last_step.post_s <= stats.all_steps.post_s
        assert stats.captured_steps == 0
