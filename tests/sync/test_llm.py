"""The sync facade: prompts in, a list out, from any thread and inside any loop."""

import asyncio
import copy
import dataclasses
import threading
import time
from typing import Any

import pytest
import torch
import trio
from megatron.core.inference.inference_request import Status
from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams

from megallm.core_async.errors import InvalidRequestError
from megallm.core_async.sampling_params import SamplingParams
from tests.fakes import FakeTokenizer
from tests.small_llm import brake, expected, greedy, settings, sync_llm, tokens_of

PROMPTS = ["A", "Hello", "x" * 40, "The quick brown fox", "0123456789"]


# ---- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_batch_of_texts_gives_a_list_in_order(loop: str) -> None:
    """The answers are those of whole forward passes through the unmodified model."""
    with sync_llm(loop=loop) as llm:
        results = llm.generate(PROMPTS, greedy(12))
        assert tokens_of(results) == [expected(prompt, 12) for prompt in PROMPTS]
        assert [result.prompt for result in results] == PROMPTS
        assert [result.generated_text for result in results] == [
            FakeTokenizer().detokenize(expected(prompt, 12)) for prompt in PROMPTS
        ]


def test_every_form_of_prompts_gives_a_list() -> None:
    """Always: code that takes `[0]` must not break when a prompt comes on its own."""
    ids = FakeTokenizer().tokenize("Hello")
    with sync_llm() as llm:
        for prompts in ("Hello", ids, ["Hello"], [ids]):
            results = llm.generate(prompts, greedy(5))
            assert isinstance(results, list)
            assert tokens_of(results) == [expected("Hello", 5)]
        assert tokens_of(llm.generate([ids, [3]], greedy(5))) == [expected(ids, 5), expected([3], 5)]
        assert llm.generate([]) == []
        assert llm.generate([], greedy()) == []


def test_a_call_without_parameters_samples_by_the_defaults() -> None:
    """megatron's: temperature 1, the whole context or its own budget."""
    with sync_llm() as llm:
        (result,) = llm.generate("Hello")
        assert result.status is Status.COMPLETED
        assert result.sampling_params == SamplingParams()
        assert len(result.generated_tokens) >= 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (("a",), "prompts is a tuple"),
        ([1, "a"], r"prompts\[1\] is a str"),
        (["a", 1], r"prompts\[1\] is a int"),
        ([["a"]], r"prompts\[0\]\[0\] is a str"),
        (None, "prompts is a NoneType"),
        (torch.tensor([1, 2]), "prompts is a Tensor"),
    ],
)
def test_other_prompts_are_a_type_error_before_anything_runs(prompts: Any, message: str) -> None:
    """What came, and where."""
    with sync_llm() as llm:
        with pytest.raises(TypeError, match=message):
            llm.generate(prompts, greedy())
        assert llm.engine.stats().step == 0


def test_a_bad_prompt_is_a_failed_result_and_its_neighbours_run() -> None:
    """One item a prompt, each with its own status; upstream drops them, and gives them to the next call."""
    with sync_llm() as llm:
        results = llm.generate([[1], [], [2] * 129, [96], [3]], greedy(4))
        assert [result.failed() for result in results] == [False, True, True, True, False]
        assert tokens_of(results) == [expected([1], 4), [], [], [], expected([3], 4)]
        payload: Any = results[2].events[0].payload
        assert isinstance(payload, InvalidRequestError)
        assert "129 tokens, max_sequence_length is 128" in str(payload)
        (lone,) = llm.generate("", greedy(4))
        assert lone.failed()


def test_a_budget_beyond_the_context_is_clamped() -> None:
    """It ends by length, at the last token that the context holds."""
    with sync_llm() as llm:
        results = llm.generate([[5] * 120, [5] * 128, [7] * 127], greedy(1_000_000))
        assert [result.generated_length for result in results] == [8, 0, 1]
        assert {result.finish_reason for result in results} == {"length"}
        assert results[0].generated_tokens == expected([5] * 120, 8)
        assert llm.generate("A", greedy(None))[0].generated_length == 127


# ---- parameters --------------------------------------------------------------------------------


def test_parameters_may_differ_for_each_prompt() -> None:
    """One list, as long as the prompts."""
    with sync_llm() as llm:
        results = llm.generate(["A", "A", "A"], [greedy(3), greedy(7), greedy(1)])
        assert tokens_of(results) == [expected("A", 3), expected("A", 7), expected("A", 1)]
        with pytest.raises(ValueError, match="2 sampling_params came for 3 prompts"):
            llm.generate(["A", "A", "A"], [greedy(3), greedy(7)])


def test_the_callers_parameters_are_never_changed() -> None:
    """One object serves many calls."""
    with sync_llm() as llm:
        for params in (greedy(3, stop_words=["zz"]), MegatronSamplingParams(top_k=1)):
            before = copy.deepcopy(params)
            results = llm.generate(["A", "B"], params)
            assert params == before
            assert results[0].sampling_params == before


def test_megatrons_own_parameters_are_taken() -> None:
    """Swapping the import is all that a script needs."""
    params = MegatronSamplingParams(top_k=1, num_tokens_to_generate=6, termination_id=-1)
    with sync_llm() as llm:
        assert tokens_of(llm.generate(["A"], params)) == [expected("A", 6)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": 1.5}, "top_p is 1.5; it must be from 0 to 1"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be at least 0"),
        ({"top_k": -3}, "top_k is -3; it must be at least 0"),
        (
            {"num_tokens_total": 5},
            "num_tokens_to_generate is 8 and num_tokens_total is 5; give one of the two",
        ),
    ],
)
def test_an_invalid_value_is_refused_before_anything_runs(fields: dict[str, Any], message: str) -> None:
    """Field, value and range; and no step of the engine was spent on the prompts before it."""
    with sync_llm() as llm:
        with pytest.raises(ValueError, match=message):
            llm.generate(["A", "B"], [greedy(), greedy(**fields)])
        assert llm.engine.stats().step == 0


def test_multimodal_input_is_checked_before_anything_runs() -> None:
    """A text generated as if the image were not there would be a lie."""
    with sync_llm() as llm:
        with pytest.raises(ValueError, match="the model has no vision part"):
            llm.generate("A", greedy(), {"image": b""})
        with pytest.raises(NotImplementedError, match="audio"):
            llm.generate(["A"], greedy(), [{"audio": b""}])
        assert llm.engine.stats().step == 0
        assert tokens_of(llm.generate(["A"], greedy(2), [None])) == [expected("A", 2)]


def test_a_seeded_prompt_gives_the_same_text_whatever_runs_beside_it() -> None:
    """The generator belongs to the request, not to the batch."""
    params = SamplingParams(temperature=1.0, seed=11, num_tokens_to_generate=12, termination_id=-1)
    with sync_llm() as llm:
        (alone,) = llm.generate("Hello", params)
        others = [greedy(5), SamplingParams(num_tokens_to_generate=20), params, greedy(20)]
        together = llm.generate(["A", "B", "Hello", "C"], others)
        assert together[2].generated_tokens == alone.generated_tokens
        assert alone.generated_tokens != expected("Hello", 12), "it does sample"


def test_a_termination_id_ends_the_output_and_stays_in_the_tokens() -> None:
    """As upstream: in the tokens, not in the text."""
    tokens = expected("Hello", 12)
    stop = tokens[4]
    until = tokens[: tokens.index(stop) + 1]
    with sync_llm() as llm:
        (result,) = llm.generate("Hello", greedy(12, termination_id=stop))
        assert result.generated_tokens == until
        assert result.generated_text == FakeTokenizer().detokenize(until[:-1])
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)


def test_a_stop_word_is_found_in_the_text() -> None:
    """Across tokens, and cut from text and tokens."""
    tokens = expected("Hello", 20)
    word = FakeTokenizer().detokenize(tokens[6:9])
    with sync_llm() as llm:
        (result,) = llm.generate("Hello", greedy(60, stop_words=[word]))
        text = FakeTokenizer().detokenize(expected("Hello", 60))
        assert result.generated_text == text[: text.index(word)]
        assert (result.finish_reason, result.stop_reason) == ("stop", word)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 2**70},
        {"top_p": 1e-300},
        {"temperature": 1e-300},
        {"temperature": 1e300},
        {"min_p": 1.0, "top_p": 1e-9, "top_k": 1},
        {"repetition_penalty": 0.001, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 1000.0, "logit_bias": dict.fromkeys(range(96), -100.0)},
        {"min_tokens": 4, "stop_token_ids": list(range(95))},
        {"seed": 2**63 - 1},
    ],
)
def test_no_accepted_value_kills_the_engine(fields: dict[str, Any]) -> None:
    """It would take every other caller's requests with it."""
    with sync_llm() as llm:
        params = SamplingParams(num_tokens_to_generate=4, termination_id=-1)
        (result,) = llm.generate("Hello", dataclasses.replace(params, **fields))
        assert len(result.generated_tokens) == 4
        assert tokens_of(llm.generate("A", greedy(2))) == [expected("A", 2)]


# ---- results -----------------------------------------------------------------------------------


def test_a_result_has_every_field() -> None:
    """In this mode as in any other."""
    with sync_llm() as llm:
        (result,) = llm.generate("Hello", greedy(6))
        assert (result.prompt, result.prompt_length) == ("Hello", 5)
        tokens = result.prompt_tokens
        assert tokens is not None
        assert tokens.equal(torch.tensor(FakeTokenizer().tokenize("Hello")))
        assert (result.generated_length, result.status) == (6, Status.COMPLETED)
        assert result.ttft is not None
        assert result.latency is not None
        assert 0 < result.ttft < result.latency < 20
        assert len(result.tpot or []) == 1
        assert str(result).startswith("id ")


@pytest.mark.parametrize("use_coordinator", [True, False])
def test_both_modes_generate(use_coordinator: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """Direct mode is the same engine, without lifecycle calls."""
    with sync_llm(use_coordinator=use_coordinator) as llm:
        assert tokens_of(llm.generate(PROMPTS, greedy(4))) == [expected(prompt, 4) for prompt in PROMPTS]
        assert llm.is_primary_rank


# ---- threads and loops -------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_several_threads_each_get_their_own_answers_and_batch_together(loop: str) -> None:
    """Upstream asks callers to take turns."""
    answers: dict[int, list[list[int]]] = {}

    def call(index: int) -> None:
        for turn in range(3):
            prompts = [[index, turn, place] for place in range(3)]
            answers[10 * index + turn] = tokens_of(llm.generate(prompts, greedy(6)))

    with sync_llm(loop=loop) as llm, brake() as braked:
        braked.hold()
        threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        assert braked.is_holding.wait(5)
        braked.release()
        for thread in threads:
            thread.join()
        assert answers == {
            10 * index + turn: [expected([index, turn, place], 6) for place in range(3)]
            for index in range(8)
            for turn in range(3)
        }
        assert llm.engine.stats().step < 8 * 3 * 6, "fewer steps than one after the other"


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize("outer", ["asyncio", "trio"])
def test_it_works_inside_a_running_loop(loop: str, outer: str) -> None:
    """Notebooks have one; it stalls meanwhile, and nothing else happens to it."""

    async def main() -> list[list[int]]:
        with sync_llm(loop=loop) as llm:
            return tokens_of(llm.generate(["A", "B"], greedy(5)))

    got = asyncio.run(main()) if outer == "asyncio" else trio.run(main)
    assert got == [expected("A", 5), expected("B", 5)]


def test_a_small_pool_preempts_and_changes_no_answer() -> None:
    """Real attention over real blocks, taken away and computed again."""
    with sync_llm(config=settings(num_blocks=40)) as llm:
        prompts = [[index] * 20 for index in range(8)]
        assert tokens_of(llm.generate(prompts, greedy(30))) == [expected(prompt, 30) for prompt in prompts]
        assert llm.engine.stats().preemptions > 0


def test_an_idle_engine_takes_no_time_of_the_processor() -> None:
    """Over half a second: the measurement is the waiting."""
    with sync_llm() as llm:
        llm.generate("A", greedy(2))
        before, steps = time.process_time(), llm.engine.stats().step
        threading.Event().wait(0.5)
        assert time.process_time() - before < 0.02
        assert llm.engine.stats().step == steps
