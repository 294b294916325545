"""The runner against one plain forward pass of the same model, for every kind of layer."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from megallm.core_async.device.queued_step import NOT_FINITE, QueuedStep
from megallm.core_async.device.runner import TorchRunner
from megallm.core_async.errors import UnsupportedModelError
from megallm.core_async.messages import Sampling, pack_ints, unpack_ints
from tests.device.conftest import StartRunner
from tests.device.models import Megatron, plain_continuation, plain_logits
from tests.device.plans import engine_config

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6], list(range(20, 43))]


@contextmanager
def recorded_logits(model: Megatron) -> Generator[list[Tensor]]:
    """Records what the output layer gives, `[samples, vocab]` a step."""
    recorded: list[Tensor] = []

    def record(module: object, args: object, out: tuple[Tensor, None]) -> None:
        recorded.append(out[0][:, 0].clone())

    handle = model.output_layer.register_forward_hook(record)
    try:
        yield recorded
    finally:
        handle.remove()


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_packed_chunked_and_mixed_steps_continue_like_a_plain_forward_pass(
    any_model: Megatron, start: StartRunner, backend: str
) -> None:
    """The engine's whole promise: batching, chunks and the cache never change a greedy answer."""
    planner = start(any_model, engine_config(attention_backend=backend))
    first, second, third, fourth = [planner.add(prompt) for prompt in PROMPTS]
    planner.step((first, 1), (second, 3))
    planner.step((first, 1), (second, 4), (fourth, 9))
    planner.step((third, 4), (second, 1), (fourth, 7), (first, 1))
    planner.step((fourth, 7), (first, 1), (third, 1), (second, 1))
    planner.decode(first, second, third, fourth, num_steps=6)
    for sequence, prompt in zip((first, second, third, fourth), PROMPTS, strict=True):
        assert sequence.output == plain_continuation(any_model, prompt, len(sequence.output))
        assert len(sequence.output) >= 7


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_logits_of_a_mixed_step_equal_the_plain_ones(
    any_model: Megatron, start: StartRunner, backend: str
) -> None:
    """Equal ids could hide a small error in positions or masks that long texts would show."""
    planner = start(any_model, engine_config(attention_backend=backend))
    first, second, third = [planner.add(prompt) for prompt in PROMPTS[1:]]
    planner.step((first, 7), (third, 10))
    with recorded_logits(any_model) as recorded:
        planner.step((first, 1), (third, 13), (second, 4))
    expected = [plain_logits(any_model, sequence.tokens[:-1])[-1] for sequence in (first, third, second)]
    torch.testing.assert_close(recorded[0], torch.stack(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_never_reads_a_slot_that_was_not_written(
    any_model: Megatron, start: StartRunner, backend: str
) -> None:
    """A masked NaN still poisons a sum of products, so garbage in free memory must not be touched."""
    planner = start(any_model, engine_config(attention_backend=backend))
    with torch.inference_mode():
        for layer in planner.runner.cache.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
    short, long = planner.add(PROMPTS[0]), planner.add(PROMPTS[3])
    planner.step((long, 10))
    planner.step((long, 13), (short, 1))
    planner.decode(short, long, num_steps=5)
    assert short.output == plain_continuation(any_model, PROMPTS[0], 6)
    assert long.output == plain_continuation(any_model, PROMPTS[3], 6)


def test_rows_and_blocks_pass_from_one_request_to_the_next(model: Megatron, start: StartRunner) -> None:
    """What an earlier request left in a row's table, sampling or cache must not reach the next."""
    planner = start(model, engine_config(num_blocks=16, max_requests=1))
    for prompt in PROMPTS * 2:
        sequence = planner.add(prompt)
        planner.decode(sequence, num_steps=5)
        assert sequence.output == plain_continuation(model, prompt, 5)
        planner.remove(sequence)


def test_preempted_request_goes_on_where_it_was(model: Megatron, start: StartRunner) -> None:
    """Preemption recomputes prompt and output together, whose tokens then come from the plan."""
    planner = start(model)
    sequence, other = planner.add(PROMPTS[1]), planner.add(PROMPTS[2])
    planner.decode(sequence, other, num_steps=4)
    planner.preempt(sequence)
    planner.decode(other, num_steps=2)
    planner.decode(sequence, other, num_steps=5)
    assert sequence.output == plain_continuation(model, PROMPTS[1], 9)
    assert other.output == plain_continuation(model, PROMPTS[2], 11)


def test_next_step_may_be_launched_before_the_result_is_read(model: Megatron, start: StartRunner) -> None:
    """Two plans are in flight: a decode row's id must come from the device, not from the host."""
    planner = start(model)
    sequence = planner.add(PROMPTS[1])
    pending = []
    for _ in range(5):
        plan, _ = planner.plan([(sequence, sequence.num_pending)])
        pending.append(planner.runner.launch(plan))
        sequence.tokens.append(-1)
        sequence.is_on_device = True
    sampled = [unpack_ints(step.result().tokens)[0] for step in pending]
    assert sampled == plain_continuation(model, PROMPTS[1], 5)


def test_step_that_samples_nothing_projects_nothing(model: Megatron, start: StartRunner) -> None:
    """A chunk in the middle of a prompt must not pay for the vocabulary."""
    planner = start(model)
    sequence = planner.add(PROMPTS[3])
    with recorded_logits(model) as recorded:
        result = planner.step((sequence, 8))
    assert result.tokens == b""
    assert [len(logits) for logits in recorded] == [0]


def test_only_sampled_tokens_are_projected(model: Megatron, start: StartRunner) -> None:
    """The output layer is the largest of all; a long prompt needs it once."""
    planner = start(model)
    sequence, chunk = planner.add(PROMPTS[3]), planner.add(PROMPTS[3])
    with recorded_logits(model) as recorded:
        planner.step((sequence, len(PROMPTS[3])), (chunk, 6))
    assert [len(logits) for logits in recorded] == [1]


def test_update_of_weights_in_place_is_seen(model: Megatron, start: StartRunner) -> None:
    """A trainer changes the parameters between steps; a copy of the weights would go stale."""
    planner = start(model)
    before = planner.add(PROMPTS[1])
    planner.decode(before, num_steps=4)
    weights = [model.decoder.layers[1].mlp.linear_fc1.weight, model.output_layer.weight]
    kept = [weight.data.clone() for weight in weights]
    try:
        for weight in weights:
            weight.data.copy_(weight.data.flip(0))
        after = planner.add(PROMPTS[1])
        planner.decode(after, num_steps=4)
        assert after.output == plain_continuation(model, PROMPTS[1], 4)
        assert after.output != before.output
    finally:
        for weight, was in zip(weights, kept, strict=True):
            weight.data.copy_(was)


def test_log_probs_are_those_of_the_raw_logits(model: Megatron, start: StartRunner) -> None:
    """Whatever the temperature cuts, the log-probability is the model's own, and only where asked."""
    planner = start(model)
    asking = planner.add(PROMPTS[1], Sampling(temperature=0.7, top_k=5, seed=3, wants_log_probs=True))
    silent = planner.add(PROMPTS[2])
    planner.step((silent, 4))
    assert silent.log_probs == []
    planner.decode(asking, num_steps=4)
    expected = plain_logits(model, asking.tokens)[-5:-1].log_softmax(-1)
    chosen = expected[torch.arange(4), asking.output]
    torch.testing.assert_close(torch.tensor(asking.log_probs), chosen, rtol=0, atol=1e-5)


def test_log_probs_may_be_those_that_tokens_were_drawn_from(model: Megatron, start: StartRunner) -> None:
    """With processed log-probs a top-k of one is certain, whatever the model thinks."""
    planner = start(model, replace(engine_config(), processes_log_probs=True))
    certain = Sampling(temperature=0.7, top_k=1, wants_log_probs=True, num_top=2)
    sequence = planner.add(PROMPTS[1], certain)
    planner.decode(sequence, num_steps=2)
    assert sequence.log_probs == [0.0, 0.0]
    assert [place[0] for place in sequence.top] == [(token, 0.0) for token in sequence.output]


@pytest.mark.parametrize("chunks", [(23,), (4, 1, 10, 8)])
def test_prompt_is_scored_by_the_raw_logits_in_any_chunks(
    model: Megatron, start: StartRunner, monkeypatch: pytest.MonkeyPatch, chunks: tuple[int, ...]
) -> None:
    """The scores of a chunk's last token come from its own logits, its target from the next chunk."""
    monkeypatch.setattr("megallm.core_async.device.model.SCORED_AT_ONCE", 3)
    planner = start(model)
    two, three = (Sampling(temperature=0.0, wants_log_probs=True, num_top=num_top) for num_top in (2, 3))
    scored = planner.add(PROMPTS[3], two, scores_prompt=True)
    other = planner.add(PROMPTS[1], three, scores_prompt=True)
    plain = planner.add(PROMPTS[2])
    planner.step((plain, 4), (other, 7))
    for count in chunks:
        planner.step((scored, count), (plain, 1), (other, 1))
    for sequence in (scored, other):
        expected = plain_logits(model, sequence.tokens[: sequence.prompt_length]).log_softmax(-1)
        following = torch.tensor(sequence.tokens[1 : sequence.prompt_length])
        chosen = expected[:-1].gather(1, following[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sequence.scores), chosen, rtol=0, atol=1e-5)
        likeliest = expected[:-1].topk(2).indices.tolist()
        assert [[token for token, _ in place[:2]] for place in sequence.score_top] == likeliest
    assert scored.output == plain_continuation(model, PROMPTS[3], 1)
    assert plain.output == plain_continuation(model, PROMPTS[2], 1 + len(chunks))


def test_penalties_count_what_is_still_in_flight(model: Megatron, start: StartRunner) -> None:
    """Two plans are in flight: the count of the newest token must not wait for the host."""
    planner = start(model)
    sequence = planner.add(PROMPTS[1], Sampling(temperature=0.0, presence_penalty=1e6))
    pending: list[QueuedStep] = []
    for _ in range(8):
        plan, _ = planner.plan([(sequence, sequence.num_pending)])
        pending.append(planner.runner.launch(plan))
        sequence.tokens.append(-1)
        sequence.is_on_device = True
    sampled = [unpack_ints(step.result().tokens)[0] for step in pending]
    assert len(set(sampled)) == 8
    assert sampled[0] == plain_continuation(model, PROMPTS[1], 1)[0]


def test_penalties_survive_preemption(model: Megatron, start: StartRunner) -> None:
    """The row is set up again, with the tokens that it had generated."""
    planner = start(model)
    sequence = planner.add(PROMPTS[1], Sampling(temperature=0.0, presence_penalty=1e6))
    planner.decode(sequence, num_steps=5)
    planner.preempt(sequence)
    planner.decode(sequence, num_steps=5)
    assert len(set(sequence.output)) == 10


def test_masked_ids_come_only_from_their_position_on(model: Megatron, start: StartRunner) -> None:
    """min_tokens: the stop id may be the model's favourite all along."""
    planner = start(model)
    favourite = plain_continuation(model, PROMPTS[1], 1)[0]
    sequence = planner.add(PROMPTS[1], Sampling(temperature=0.0, logit_bias=((favourite, 1e6),)))
    sequence.masked_ids, sequence.masked_until = (favourite,), len(PROMPTS[1]) + 2
    planner.decode(sequence, num_steps=4)
    assert [token == favourite for token in sequence.output] == [False, False, True, True]


def test_kept_cache_goes_on_after_release_and_restore(model: Megatron, start: StartRunner) -> None:
    """Suspending with offload must not cost a request anything but time."""
    planner = start(model)
    sequence = planner.add(PROMPTS[1])
    planner.decode(sequence, num_steps=3)
    planner.runner.release_cache(pack_ints(sequence.blocks))
    planner.runner.restore_cache()
    planner.decode(sequence, num_steps=3)
    assert sequence.output == plain_continuation(model, PROMPTS[1], 6)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_broken_logits_fail_their_row_alone(model: Megatron, start: StartRunner, backend: str) -> None:
    """However its token is chosen; who runs beside it, and who gets its blocks, full of NaN, is unharmed."""
    planner = start(model, engine_config(attention_backend=backend))
    embedding = model.embedding.word_embeddings.weight
    kept = embedding.data.clone()
    samplings = [Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.5), Sampling(top_k=3)]
    try:
        embedding.data[93] = torch.nan  # which no other output holds
        good = planner.add(PROMPTS[1])
        for sampling in samplings:
            broken = planner.add([93, 1, 2, 3, 4, 5, 6, 7, 8], sampling)
            result = planner.step((good, good.num_pending), (broken, 9))
            assert [reason for _, reason in result.failed] == [NOT_FINITE]
            assert broken.output[0] in range(96)
            planner.remove(broken)
            assert planner.step((good, 1)).failed == []
        heir = planner.add(PROMPTS[3])
        planner.decode(heir, good, num_steps=4)
    finally:
        embedding.data.copy_(kept)
    assert good.output == plain_continuation(model, PROMPTS[1], len(good.output))
    assert heir.output == plain_continuation(model, PROMPTS[3], 4)


def test_ids_past_the_vocabulary_are_never_sampled(model: Megatron, start: StartRunner) -> None:
    """Padding rows of the output layer have logits like any other, and no text."""
    planner = start(model, engine_config(vocab_size=7))
    sequences = [
        planner.add(prompt, Sampling(temperature=5.0, seed=seed)) for seed, prompt in enumerate(PROMPTS)
    ]
    planner.decode(*sequences, num_steps=10)
    assert all(0 <= token < 7 for sequence in sequences for token in sequence.output)


def test_step_without_rows_gives_an_empty_result(model: Megatron, start: StartRunner) -> None:
    """A draining engine may still have block-table news for the rank."""
    planner = start(model)
    result = planner.step()
    assert (result.step, result.tokens) == (1, b"")


def test_times_of_a_step_are_reported(model: Megatron, start: StartRunner) -> None:
    """The engine's statistics live on them."""
    planner = start(model)
    result = planner.step((planner.add(PROMPTS[1]), 7))
    assert min(result.prepare_s, result.forward_s, result.sample_s) > 0


def test_closing_twice_and_before_starting_is_harmless(model: Megatron) -> None:
    """Shutdown runs from wherever construction failed."""
    runner = TorchRunner(model, engine_config())
    runner.close()
    runner.start()
    runner.close()
    runner.close()
    assert "forward" not in vars(model.decoder.layers[0].self_attention.core_attention)


def test_unknown_attention_backend_is_refused_before_anything_starts(model: Megatron) -> None:
    """The caller's thread gets the error, not the rank's."""
    with pytest.raises(UnsupportedModelError, match="attention_backend is 'flahs'"):
        TorchRunner(model, engine_config(attention_backend="flahs"))
