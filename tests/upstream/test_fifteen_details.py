"""What a script written for megatron-core relies on without knowing: one test a detail, or one for each half.

The details that concern HTTP alone have their tests beside the server's.
"""

import dataclasses
import types
from typing import Any

import anyio
import pytest
import torch
from anyio import to_thread
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.inference_request import DynamicInferenceEventType
from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams

from megallm.core_async.config import EngineConfig, ModelLimits
from megallm.core_async.errors import LifecycleError
from megallm.core_async.plan.sampling import resolve
from megallm.core_async.result import Result
from megallm.core_async.sampling_params import SamplingParams
from tests.fakes import FakeTokenizer
from tests.small_llm import expected, greedy, native_llm, settings, sync_llm, tokens_of

PROMPT = "Hello"
IDS = FakeTokenizer().tokenize(PROMPT)
EOD = expected(PROMPT, 8)[5]
"""A token that comes in the output, which the tokenizers here say ends a text."""


class WithEod(FakeTokenizer):
    """Ends a text with a token that the model generates."""

    eod = EOD


class WithBos(FakeTokenizer):
    """Has a bos, and puts two of them before a text."""

    bos = 5

    def tokenize(self, text: str) -> list[int]:
        """Gives the ids behind both."""
        return [5, 5, *super().tokenize(text)]


def never_ending(**fields: Any) -> Any:  # Any: fields of many types
    """Gives megatron-core's own parameters, without ours."""
    chosen: dict[str, Any] = {"termination_id": -1, "num_tokens_to_generate": 4, "top_k": 1}
    return MegatronSamplingParams(**{**chosen, **fields})


# ---- 1: shapes ---------------------------------------------------------------------------------


def test_the_sync_call_gives_a_list_always() -> None:
    """For one prompt, for a batch of one, and for none."""
    with sync_llm() as llm:
        assert [len(llm.generate(prompts, greedy(2))) for prompts in (PROMPT, IDS, [PROMPT], [IDS])] == [
            1
        ] * 4
        assert llm.generate([]) == []


@pytest.mark.anyio
async def test_the_async_call_gives_one_object_for_one_prompt() -> None:
    """And a list for a list, also of one, also of none."""
    async with native_llm() as llm:
        assert isinstance(await llm.generate(PROMPT, greedy(2)), Result)
        assert isinstance(await llm.generate(IDS, greedy(2)), Result)
        assert isinstance(await llm.generate([PROMPT], greedy(2)), list)
        assert await llm.generate([]) == []


# ---- 2: fields in both modes -------------------------------------------------------------------


@pytest.mark.parametrize("use_coordinator", [True, False])
@pytest.mark.parametrize("prompt", [PROMPT, IDS], ids=["text", "ids"])
def test_both_modes_fill_in_what_each_of_upstreams_leaves_out(
    use_coordinator: bool,  # noqa: FBT001 - pytest passes it by name
    prompt: str | list[int],
) -> None:
    """Its coordinator leaves out tokens, and a text that came as ids; direct mode lengths and latency."""
    with sync_llm(use_coordinator=use_coordinator) as llm:
        (result,) = llm.generate(prompt, greedy(3))
    assert result.prompt_tokens is not None
    assert result.prompt_tokens.equal(torch.tensor(IDS))
    assert (result.prompt, result.prompt_length) == (PROMPT, len(IDS))
    assert result.latency is not None
    assert result.ttft is not None
    assert 0 < result.ttft <= result.latency


# ---- 3: the end of an output -------------------------------------------------------------------


def test_tokens_keep_the_end_and_the_text_does_not() -> None:
    """Why it ended is recorded: a count would call an end at the budget's last token its end."""
    tokens = expected(PROMPT, 8)
    until = tokens[: tokens.index(EOD) + 1]
    with sync_llm(tokenizer=WithEod()) as llm:
        for budget in (8, len(until)):
            (result,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, num_tokens_to_generate=budget))
            assert result.generated_tokens == until
            assert result.generated_text == FakeTokenizer().detokenize(until[:-1])
            assert result.finish_reason == "stop"


def test_a_stop_word_leaves_tokens_and_text_unless_it_is_to_be_kept() -> None:
    """Found in the text, so that it may lie across tokens, and begin or end inside one."""
    tokens = expected(PROMPT, 8)
    word = FakeTokenizer().detokenize(tokens[3:5])
    place = FakeTokenizer().detokenize(tokens).index(word)  # one token, one letter
    with sync_llm() as llm:
        (cut,) = llm.generate(PROMPT, greedy(8, stop_words=[word]))
        (kept,) = llm.generate(PROMPT, greedy(8, stop_words=[word], detokenize_stop_sequence=True))
    assert (cut.generated_tokens, kept.generated_tokens) == (tokens[:place], tokens[: place + 2])
    assert kept.generated_text == f"{cut.generated_text}{word}"
    assert {cut.finish_reason, kept.finish_reason} == {"stop"}


# ---- 4: failures are data ----------------------------------------------------------------------


@pytest.mark.parametrize("use_coordinator", [True, False])
def test_a_prompt_that_can_not_run_is_a_failed_object_in_its_place(use_coordinator: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """Upstream's direct mode gives none for it, and puts it before the next call's results."""
    with sync_llm(use_coordinator=use_coordinator) as llm:
        (alone,) = llm.generate("x" * 200, greedy(2))
        good, failed, other = llm.generate(["A", "x" * 200, "B"], greedy(2))
        assert len(llm.generate(["A"], greedy(2))) == 1
    assert [each.failed() for each in (alone, good, failed, other)] == [True, False, True, False]
    assert tokens_of([good, other]) == [expected("A", 2), expected("B", 2)]
    (event,) = [
        event for event in failed.events if event.type is DynamicInferenceEventType.ERROR_NONTRANSIENT
    ]
    assert "prompt has 200 tokens, max_sequence_length is 128" in str(event.payload)


# ---- 5: pausing --------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_resume_lands_in_paused_and_what_came_meanwhile_runs_at_unpause() -> None:
    """The order of calls that scripts make; a request that comes in between waits for its end."""
    async with native_llm() as llm:
        results: list[Any] = []

        async def generate(prompt: str) -> None:
            results.append(await llm.generate(prompt, greedy(4)))

        async with anyio.create_task_group() as tasks:
            await llm.pause()
            tasks.start_soon(generate, "A")
            await llm.suspend()
            tasks.start_soon(generate, "B")
            await anyio.wait_all_tasks_blocked()
            await llm.resume()
            assert llm.engine.phase == "paused"
            await anyio.wait_all_tasks_blocked()
            assert (results, llm.context.step_count) == ([], 0)
            await llm.unpause()
        assert sorted(tokens_of(results)) == sorted([expected("A", 4), expected("B", 4)])


# ---- 6 and 7: sampling's off switches and budgets ----------------------------------------------


def test_zero_is_off_for_top_k_and_top_p_and_greedy_for_the_temperature() -> None:
    """Both limits at once and a temperature of 0 end upstream's engine."""
    whole = SamplingParams(temperature=1.0, seed=5, num_tokens_to_generate=20, termination_id=-1)
    with sync_llm() as llm:
        (by_default,) = llm.generate(PROMPT, whole)
        (off,) = llm.generate(PROMPT, dataclasses.replace(whole, top_k=0, top_p=0.0))
        (wide,) = llm.generate(PROMPT, dataclasses.replace(whole, top_k=96, top_p=1.0))
        (best,) = llm.generate(PROMPT, dataclasses.replace(whole, top_k=1, top_p=0.5))
        (cold,) = llm.generate(PROMPT, dataclasses.replace(whole, temperature=0.0))
    assert by_default.generated_tokens == off.generated_tokens == wide.generated_tokens
    assert best.generated_tokens == cold.generated_tokens == expected(PROMPT, 20)
    assert off.generated_tokens != expected(PROMPT, 20)


def test_a_budget_is_clamped_and_only_a_prompt_is_too_long() -> None:
    """None fills the context, and a prompt of the whole context has no room and no fault."""
    with sync_llm() as llm:
        long, full, whole = llm.generate([IDS, IDS, [1] * 128], [greedy(1000), greedy(None), greedy(4)])
    assert [result.generated_length for result in (long, full, whole)] == [123, 123, 0]
    assert not any(result.failed() for result in (long, full, whole))
    assert [result.finish_reason for result in (long, full, whole)] == ["length"] * 3


# ---- 8: log-probs of prompts -------------------------------------------------------------------


def test_prompt_log_probs_need_no_switch() -> None:
    """`materialize_only_last_token_logits` is True by default, with which upstream refuses them."""
    assert settings().materialize_only_last_token_logits
    with sync_llm() as llm:
        (result,) = llm.generate(PROMPT, never_ending(return_log_probs=True, skip_prompt_log_probs=False))
    log_probs: Any = result.prompt_log_probs
    assert len(log_probs) == len(IDS) - 1


# ---- 9 and 10: special tokens ------------------------------------------------------------------


def test_every_leading_bos_of_a_text_is_taken_off_and_one_put_where_it_is_asked_for() -> None:
    """Ids are taken as they are."""
    with sync_llm(tokenizer=WithBos()) as llm:
        results = llm.generate([PROMPT, PROMPT], [never_ending(), never_ending(add_BOS=True)])
        results += llm.generate([[5, 5, *IDS]], never_ending(add_BOS=True))
    for result, ids in zip(results, [IDS, [5, *IDS], [5, 5, *IDS]], strict=True):
        assert result.prompt_tokens is not None
        assert result.prompt_tokens.equal(torch.tensor(ids))


@pytest.mark.parametrize(
    ("params", "stops"),
    [
        ({}, True),
        ({"termination_id": -1}, False),
        ({"ignore_eos": True}, False),
        ({"termination_id": EOD}, True),
    ],
    ids=str,
)
def test_the_end_is_the_given_id_else_the_tokenizers_else_never(
    params: dict[str, Any],
    stops: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    """-1 and `ignore_eos` are never."""
    with sync_llm(tokenizer=WithEod()) as llm:
        (result,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, num_tokens_to_generate=8, **params))
    assert (result.finish_reason == "stop") is stops


def test_a_tokenizer_without_an_end_never_ends_a_text() -> None:
    """Megatron's null tokenizers raise where others have their eod."""

    class WithoutEod(FakeTokenizer):
        @property
        def eod(self) -> int:
            raise NotImplementedError

    with sync_llm(tokenizer=WithoutEod()) as llm:
        (result,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, num_tokens_to_generate=8))
    assert tokens_of([result]) == [expected(PROMPT, 8)]


# ---- 14: ranks and states ----------------------------------------------------------------------


@pytest.mark.anyio
async def test_no_order_of_calls_waits_for_ever() -> None:
    """Upstream's suspend from running, unpause from suspended and first resume from running all do."""
    async with native_llm() as llm:
        with anyio.fail_after(10):
            await llm.resume()
            await llm.unpause()
            await llm.suspend()
            with pytest.raises(LifecycleError, match="resume"):
                await llm.unpause()
            await llm.suspend()
            await llm.pause()
            assert llm.engine.phase == "suspended"
            await llm.resume()
            await llm.resume()
            assert llm.engine.phase == "paused"
            await llm.unpause()


@pytest.mark.anyio
async def test_a_single_process_is_all_ranks() -> None:
    """Construction and every call are of all ranks together; here that is one, and no thread is left."""
    async with native_llm() as llm:
        assert llm.is_primary_rank
    with sync_llm() as sync:
        assert await to_thread.run_sync(lambda: sync.is_primary_rank)


# ---- 15: versions ------------------------------------------------------------------------------


def test_parameters_of_an_older_or_a_newer_version_are_read_field_by_field() -> None:
    """Only what every version has is taken for granted."""
    old: Any = types.SimpleNamespace(
        temperature=1.0, top_k=0, top_p=0.0, num_tokens_to_generate=3, termination_id=None
    )
    new: Any = types.SimpleNamespace(**vars(old), streaming_interval=4, do_kv_handoff=False, from_2030="x")
    assert resolve(old, end_ids=[7], vocab_size=96) == resolve(new, end_ids=[7], vocab_size=96)
    plain: Any = MegatronSamplingParams(num_tokens_to_generate=3)
    assert resolve(old, end_ids=[7], vocab_size=96) == resolve(plain, end_ids=[7], vocab_size=96)


def test_a_config_of_a_newer_version_is_taken() -> None:
    """Its defaults are not remarked on; what 0.19 lacks is not missed."""

    @dataclasses.dataclass
    class NewerConfig(InferenceConfig):
        video_preprocessing_config: object = None
        media_cache_routing_weight: float = 0.5

    limits = ModelLimits(cache_bytes_per_token=64, vocab_size=96, device_type="cpu")
    assert EngineConfig.derive(NewerConfig(), limits) == EngineConfig.derive(InferenceConfig(), limits)
    names = [field.name for field in dataclasses.fields(InferenceConfig)]
    newer = NewerConfig(**{name: getattr(settings(), name) for name in names})
    with sync_llm(config=newer) as llm:
        assert tokens_of(llm.generate(PROMPT, greedy(2))) == [expected(PROMPT, 2)]
