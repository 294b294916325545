"""The scheduler's rules, one by one: who is refused, dropped, passed, put back, and told of it."""

import anyio
import pytest

from megallm.core_async.actors.allocator import Allocator
from megallm.core_async.actors.scheduler import Scheduler
from megallm.core_async.errors import ActorGone, EngineBusy
from megallm.core_async.kit.gate import Gate
from megallm.core_async.messages import (
    FinishAll,
    HoldNew,
    ListContents,
    NextStep,
    PreemptAll,
    RequestId,
    SetEpoch,
    StepResult,
    Submit,
    pack_ints,
    unpack_ints,
)
from megallm.core_async.plan.block_pool import BlockPool
from megallm.core_async.plan.roster import Roster
from tests.actors.scheduling import DEPTH, Prompt, limits, pumping
from tests.askers import Outcomes
from tests.fakes import continuation

pytestmark = pytest.mark.anyio


async def test_a_line_without_room_for_all_refuses_the_batch_whole() -> None:
    """Half a batch would be no use to its caller, and the message says what to do."""
    async with pumping(max_waiting=3) as pump:
        await pump.submit(Prompt((1,)), Prompt((2,)))
        with pytest.raises(EngineBusy, match="2 requests came and 1 more may wait, of 3; try again later"):
            await pump.submit(Prompt((3,)), Prompt((4,)))
        await pump.submit(Prompt((3,)))
        await pump.run()
        for account in pump.accounts.values():
            account.check()


async def test_held_requests_count_as_waiting() -> None:
    """A pause must not open a door for more than the limit says."""
    async with pumping(max_waiting=2) as pump:
        await pump.submit(Prompt((1,)))
        await pump.scheduler.address.ask(HoldNew())
        await pump.submit(Prompt((2,)))
        with pytest.raises(EngineBusy, match="0 more may wait"):
            await pump.submit(Prompt((3,)))


async def test_a_submission_calls_the_pump() -> None:
    """It sleeps at the gate."""
    async with pumping() as pump:
        assert not pump.gate.is_open
        await pump.submit(Prompt((1,)))
        assert pump.gate.is_open


async def test_held_requests_stay_out_until_they_are_admitted() -> None:
    """A pause that waits would never end if new requests joined those it waits for."""
    async with pumping() as pump:
        (before,) = await pump.submit(Prompt((1, 2)))
        await pump.scheduler.address.ask(HoldNew())
        pump.holds_new = True
        (held,) = await pump.submit(Prompt((3, 4)))
        await pump.run()
        before.check()
        assert held.ending is None
        assert pump.stats.waiting == 1
        pump.gate.rest()
        await pump.admit_held()
        assert pump.gate.is_open
        await pump.run()
        held.check()


async def test_a_decoding_row_carries_no_token_and_no_change() -> None:
    """Its last token never left the device; a plan says only what differs."""
    async with pumping(limits(block_size=8)) as pump:
        await pump.submit(Prompt((1, 2, 3), 4))
        await pump.run()
    prompt, *decodes = pump.plans
    assert list(unpack_ints(prompt.tokens)) == [1, 2, 3]
    assert [plan.num_decode for plan in decodes] == [1, 1, 1]
    for plan in decodes:
        assert (plan.tokens, plan.blocks, plan.new_rows) == (b"", b"", [])


async def test_nothing_is_computed_beyond_the_last_token() -> None:
    """With two plans in flight the second must know that the first samples the last token."""
    async with pumping() as pump:
        await pump.submit(Prompt((1, 2), 3), Prompt((3, 4), 3))
        await pump.run()
    assert sum(sum(plan.samples) for plan in pump.plans) == 6


async def test_what_was_in_flight_when_a_request_stopped_is_dropped() -> None:
    """The stop id is seen one step late: the token after it belongs to nobody, the neighbour's stays."""
    stopping = Prompt((1, 2), 9, stop_ids=(continuation((1, 2), 2)[1],), wants_log_probs=True, num_top=2)
    async with pumping() as pump:
        accounts = await pump.submit(stopping, Prompt((3, 4), 9, wants_log_probs=True))
        await pump.run()
        for account in accounts:
            account.check()
        assert sum(sum(plan.samples) for plan in pump.plans) == 2 + 9 + DEPTH - 1
        await pump.check_all_free()


@pytest.mark.parametrize("num_turns", range(6))
@pytest.mark.parametrize("prompt", [Prompt((1, 2, 3), 4), Prompt((1, 2, 3), 0, scores=True)])
async def test_a_request_can_be_aborted_at_any_time(prompt: Prompt, num_turns: int) -> None:
    """Waiting, in flight, running, ended: its blocks are free at once, its neighbours notice nothing."""
    async with pumping(limits(max_tokens=4)) as pump:
        (other,) = await pump.submit(Prompt((5, 6, 7), 6))
        (account,) = await pump.submit(prompt)
        for _ in range(num_turns):
            await pump.turn()
        pump.closed += [RequestId(2), RequestId(77)]
        await pump.run()
        other.check()
        account.check("abort")
        await pump.check_all_free()


async def test_an_abort_is_reported_and_frees_blocks_without_a_plan() -> None:
    """An engine that pauses has to give back what its readers have left."""
    async with pumping() as pump:
        (account,) = await pump.submit(Prompt((1, 2, 3), 9))
        await pump.turn()
        pump.closed.append(RequestId(1))
        await pump.turn(may_plan=False)
        assert account.ending is not None
        assert account.ending.finish_reason == "abort"
        assert (await pump.count_blocks()).num_used == 0
        assert (pump.stats.running, pump.stats.used_blocks) == (0, 0)
        await pump.run()


async def test_a_drain_collects_what_is_in_flight_and_plans_nothing() -> None:
    """A pause comes to rest after the steps that are under way, and goes on where it was."""
    async with pumping() as pump:
        (account,) = await pump.submit(Prompt((1, 2, 3), 9))
        for _ in range(DEPTH):
            await pump.turn()
        num_plans = len(pump.plans)
        await pump.run(may_plan=False)
        assert len(pump.plans) == num_plans
        assert pump.num_in_flight == 0
        assert len(account.tokens) == num_plans
        await pump.run()
        account.check()


async def test_a_prefix_is_computed_once_though_both_came_together() -> None:
    """The second waits for the blocks that the first is computing, and takes them over."""
    shared = tuple(range(10, 18))
    async with pumping(limits(max_tokens=32, shares_prefixes=True)) as pump:
        accounts = await pump.submit(Prompt((*shared, 1), 3), Prompt((*shared, 2), 3))
        await pump.run()
        for account in accounts:
            account.check()
    assert [account.ending.num_cached_tokens for account in accounts if account.ending] == [0, 8]
    assert pump.stats.prefill_tokens == 9 + 1
    assert pump.stats.prefix_hit_rate == 8 / 18


@pytest.mark.parametrize("salts", [("", "mine"), ("mine", "yours"), ("mine", "mine")])
async def test_prefixes_are_shared_within_a_salt_only(salts: tuple[str, str]) -> None:
    """How fast an answer comes must not tell one tenant what another has asked."""
    tokens = tuple(range(9))
    async with pumping(limits(shares_prefixes=True)) as pump:
        await pump.submit(Prompt(tokens, 2, salt=salts[0]))
        await pump.run()
        (account,) = await pump.submit(Prompt(tokens, 2, salt=salts[1]))
        await pump.run()
        account.check()
        assert account.ending is not None
        assert account.ending.num_cached_tokens == (8 if salts[0] == salts[1] else 0)


async def test_new_weights_share_nothing_with_the_old_and_are_noted() -> None:
    """Keys and values of the old weights under a token of the new ones would be neither's."""
    tokens = tuple(range(9))
    async with pumping(limits(shares_prefixes=True)) as pump:
        await pump.submit(Prompt(tokens, 2))
        await pump.run()
        (running,) = await pump.submit(Prompt((1, 2, 3), 6))
        await pump.turn()
        await pump.run(may_plan=False)
        await pump.scheduler.address.ask(SetEpoch(4))
        assert (await pump.count_blocks()).num_cached == 0
        (later,) = await pump.submit(Prompt(tokens, 2))
        await pump.run()
        running.check()
        later.check()
    assert running.ending is not None
    assert later.ending is not None
    assert later.ending.num_cached_tokens == 0
    assert running.ending.policy_epoch == ((0, 4),)
    assert later.ending.policy_epoch == later.ending.kv_cache_epoch == ((0, 4),)


async def test_ending_all_tells_of_each_what_it_had() -> None:
    """Also of those whose readers have heard nothing yet."""
    async with pumping(limits(max_requests=1)) as pump:
        accounts = await pump.submit(Prompt((1,), 9), Prompt((2,), 9))
        for _ in range(4):
            await pump.turn()
        await pump.run(may_plan=False)
        pump.enter(await pump.scheduler.address.ask(FinishAll("abort")))
        assert (await pump.count_blocks()).num_used == 0, "at once: no step may come for long"
        assert [account.is_started for account in accounts] == [True, True]
        assert [len(account.tokens) > 0 for account in accounts] == [True, False]
        for account in accounts:
            account.check("abort")
        await pump.run()
        await pump.check_all_free()


async def test_contents_are_those_of_who_runs_and_of_prefixes() -> None:
    """What has ended just before a suspend need not be copied: its blocks are given back first."""
    async with pumping() as pump:
        await pump.submit(Prompt((1, 2), 9), Prompt((3, 4), 9))
        await pump.turn()
        await pump.run(may_plan=False)
        ask = pump.scheduler.address.ask
        running = unpack_ints(await ask(ListContents()))
        assert len(running) == (await pump.count_blocks()).num_used == 2
        pump.enter(await ask(FinishAll("abort")))
        assert await ask(ListContents()) == b""


@pytest.mark.parametrize("message", [PreemptAll(), FinishAll("abort")])
async def test_nothing_is_taken_away_under_a_step_in_flight(message: PreemptAll | FinishAll) -> None:
    """The device would write to blocks of others."""

    async def break_it() -> None:
        async with pumping() as pump:
            await pump.submit(Prompt((1,), 9))
            await pump.turn()
            assert pump.num_in_flight == 1
            await pump.scheduler.address.ask(message)

    with pytest.raises(AssertionError, match="1 steps are in flight"):
        await break_it()


async def test_a_result_out_of_turn_fails_loudly() -> None:
    """Tokens given to the wrong requests would be the worst of all faults."""

    async def break_it() -> None:
        async with pumping() as pump:
            await pump.submit(Prompt((1,), 9))
            await pump.turn()
            await pump.scheduler.address.ask(NextStep(StepResult(7, pack_ints([1])), []))

    with pytest.raises(AssertionError, match="result of step 7 came, step 1 was next"):
        await break_it()


async def test_without_its_allocator_it_fails_and_says_so() -> None:
    """Whoever waits for a plan hears why there is none."""
    pump_failure = "scheduler failed: ActorGone"

    async def break_it() -> None:
        async with pumping() as pump:
            await pump.submit(Prompt((1,), 9))
            pump.allocator.address.mark_gone(lambda: ActorGone("allocator has stopped"))
            with pytest.raises(ActorGone, match=pump_failure):
                await pump.turn()
            await anyio.sleep_forever()

    with pytest.raises(ActorGone, match="allocator has stopped"):
        await break_it()


async def test_a_stop_while_it_asks_the_allocator_ends_the_pumps_ask() -> None:
    """Every cancel finds it in the middle of a step."""
    silent = Allocator(BlockPool(8, 4))  # it is never run
    scheduler = Scheduler(Roster(limits(), num_blocks=8, max_waiting=8), silent.address, Gate())
    outcomes = Outcomes()
    async with anyio.create_task_group() as outside, anyio.create_task_group() as tasks:
        await tasks.start(scheduler.run)
        await scheduler.address.ask(Submit([Prompt((1,)).request(RequestId(1))]))
        await outcomes.ask(outside, scheduler.address, NextStep(None, []))
        await outcomes.ask(outside, scheduler.address, NextStep(None, []))
        await anyio.wait_all_tasks_blocked()
        assert silent.address.room == silent.capacity - 1
        tasks.cancel_scope.cancel()
    assert [str(error) for error in outcomes.errors] == ["scheduler has stopped"] * 2
