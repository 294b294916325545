"""What both facades have in common: properties by megatron's names, and the rules of the mode."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from megallm import MegaLLMError
from megallm.core_async.builder import build
from megallm.core_async.facade import LLMBase, loaded
from megallm.core_async.ranks.calls import Calls
from tests.fakes import FakeTokenizer
from tests.small_llm import greedy, make_llm, settings, shared_model, sync_llm


def base(*, use_coordinator: bool = True) -> LLMBase:
    """Gives the parts of a facade over the small model, not started."""
    parts = build(
        model=shared_model(),
        tokenizer=FakeTokenizer(),
        inference_config=settings(num_blocks=50),
        use_coordinator=use_coordinator,
        coordinator_host=None,
        coordinator_port=None,
        inference_wrapper_cls=None,
        attention_backend="auto",
        batch_invariant=False,
    )
    return LLMBase(parts, use_coordinator=use_coordinator)


def test_the_context_tells_limits_and_counts_by_megatrons_names() -> None:
    """Scripts written for upstream read them to size their batches."""
    with sync_llm(config=settings(num_blocks=50)) as llm:
        context = llm.context
        assert (context.max_tokens, context.max_requests, context.max_sequence_length) == (256, 16, 128)
        assert context.block_size_tokens == 4
        assert context.config is llm.engine.config
        assert (context.step_count, context.lifetime_prefill_token_count) == (0, 0)
        llm.generate([[1, 2, 3], [4, 5]], greedy(4))
        assert context.step_count == 4
        assert context.lifetime_prefill_token_count == 5
        assert context.total_request_count == 0


def test_the_controller_has_the_users_own_tokenizer() -> None:
    """Upstream's examples take it from there."""
    tokenizer = FakeTokenizer()
    with sync_llm(tokenizer=tokenizer) as llm:
        assert llm.controller.tokenizer is tokenizer


def test_a_single_process_is_the_primary_rank_in_both_modes() -> None:
    """Only one of several ranks takes requests in coordinator mode."""
    assert distributed.is_initialized()
    assert base().is_primary_rank
    assert base(use_coordinator=False).is_primary_rank


@pytest.mark.parametrize("use_coordinator", [True, False])
def test_a_worker_rank_generates_in_direct_mode_alone(
    monkeypatch: pytest.MonkeyPatch,
    use_coordinator: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    """Asked before anything else, as upstream: not even an empty list is an answer there."""
    with sync_llm(use_coordinator=use_coordinator) as llm, monkeypatch.context() as patch:
        patch.setattr(distributed, "get_rank", lambda: 1)
        patch.setattr(Calls, "follows", True)
        assert llm.is_primary_rank is not use_coordinator
        wrong: list[Any] = [[], "A", ("not", "a", "prompt")]
        for prompts in wrong:
            if use_coordinator:
                with pytest.raises(
                    RuntimeError, match="primary rank in coordinator mode; this is global rank 1"
                ):
                    llm.generate(prompts, greedy(1))
        if not use_coordinator:
            assert llm.generate("A", greedy(1))[0].succeeded()
        patch.undo()


def test_the_engine_has_figures_before_it_starts() -> None:
    """A monitor that starts first must not crash."""
    stats = base().engine.stats()
    assert (stats.free_blocks, stats.used_blocks, stats.step) == (50, 0, 0)


def test_a_failed_construction_leaves_nothing_behind() -> None:
    """The user corrects the argument and tries again, with the same model."""
    with pytest.raises(ValueError, match="max_tokens is 0"):
        make_llm(config=settings(max_tokens=0))
    with sync_llm() as llm:
        assert torch.is_tensor(llm.generate("A", greedy(1))[0].prompt_tokens)


def test_a_model_is_given_as_a_module_or_as_what_load_model_takes(tmp_path: Path) -> None:
    """One line from a name to answers; a module brings its tokenizer along, since none is in it."""
    model, tokenizer = shared_model(), FakeTokenizer()
    assert loaded(model, tokenizer) == (model, tokenizer)
    with pytest.raises(TypeError, match="tokenizer is None and model is a module; give the tokenizer"):
        loaded(model, None)
    with pytest.raises(MegaLLMError, match="nowhere"):
        loaded(str(tmp_path / "nowhere"), None)
