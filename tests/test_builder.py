"""A constructor's arguments are all checked before anything starts."""

import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import distributed, nn

from megallm.core_async.builder import HONOURED, Parts, build
from megallm.core_async.errors import UnsupportedModelError
from megallm.models.megatron_setup import quiet_megatron
from tests.device.thread_group import groups_of
from tests.fakes import FakeTokenizer
from tests.ranks.split_moe import split_moe
from tests.small_llm import BLOCK_SIZE, new_model, settings, shared_model, untouched


def built(**changes: Any) -> Parts:  # Any: the constructor's arguments, wrong ones among them
    """Gives the parts for the small model."""
    arguments: dict[str, Any] = {
        "model": shared_model(),
        "tokenizer": FakeTokenizer(),
        "inference_config": settings(),
        "use_coordinator": True,
        "coordinator_host": None,
        "coordinator_port": None,
        "inference_wrapper_cls": None,
        "attention_backend": "auto",
        "batch_invariant": False,
        **changes,
    }
    return build(**arguments)


def test_the_parts_fit_the_model_and_the_settings() -> None:
    """The limits come from all of them: nobody has to know how many bytes a block takes."""
    config = built(inference_config=settings(num_blocks=77, max_requests=5)).engine.config
    assert (config.num_blocks, config.block_size, config.max_requests) == (77, BLOCK_SIZE, 5)
    assert (config.max_tokens, config.max_sequence_length, config.vocab_size) == (256, 128, 96)
    assert config.sampling_seed == shared_model().config.inference_sampling_seed


def test_nothing_starts_and_the_model_is_left_alone() -> None:
    """Construction may be followed by anything; a started thread would outlive a failed one."""
    with untouched(shared_model()):
        built()


def test_megatrons_defaults_are_good_enough() -> None:
    """Its 20 GB of cache are more than most machines have."""
    config = built(inference_config=None).engine.config
    assert config.block_size == InferenceConfig().block_size_tokens
    assert config.num_blocks >= 1


@pytest.mark.parametrize("field", ["coordinator_host", "coordinator_port"])
def test_a_coordinators_address_needs_a_coordinator(field: str) -> None:
    """As upstream: the two contradict each other."""
    with pytest.raises(ValueError, match="coordinator_host/port require use_coordinator=True"):
        built(use_coordinator=False, **{field: "localhost" if field.endswith("host") else 5000})


def test_a_coordinators_host_is_one_that_others_reach() -> None:
    """Refused before any rank waits for another."""
    with pytest.raises(ValueError, match=r"coordinator_host is 0\.0\.0\.0, which is every address"):
        built(coordinator_host="0.0.0.0")  # noqa: S104 - that is the point


@pytest.mark.parametrize("wrong", [None, "smollm2-135m", {}])
def test_a_model_that_is_no_module_is_refused_by_type(wrong: object) -> None:
    """The name of a model is an easy mistake."""
    with pytest.raises(TypeError, match=rf"model is a {type(wrong).__name__}; give a megatron-core model"):
        built(model=wrong)


def test_a_module_that_is_no_megatron_model_is_refused_by_name() -> None:
    """With what is supported."""
    with pytest.raises(UnsupportedModelError, match="Linear has no decoder; supported are GPTModel"):
        built(model=nn.Linear(2, 2).eval())


@pytest.mark.parametrize("kind", [list, nn.ModuleList])
def test_chunks_of_a_virtual_pipeline_are_refused_by_name(kind: type[Any]) -> None:
    """What megatron builds for it is a list, which is no module."""
    with pytest.raises(UnsupportedModelError, match="model is 2 chunks of a virtual pipeline"):
        built(model=kind([shared_model(), shared_model()]))


def test_a_part_of_a_pipeline_without_its_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would give it hidden states."""
    monkeypatch.setattr(shared_model(), "post_process", False)
    with pytest.raises(UnsupportedModelError, match="this rank is stage 1 of 1 of megatron's pipeline"):
        built()


def test_a_model_in_training_mode_is_refused() -> None:
    """Dropout would sample noise, silently."""
    model = new_model()
    model.train()
    with pytest.raises(ValueError, match=r"^model is in training mode \(its GPTModel\); call model"):
        built(model=model)
    model.eval()
    model.decoder.layers[2].mlp.train()
    with pytest.raises(ValueError, match=r"^model is in training mode \(its MLP\)"):
        built(model=model)


def test_direct_mode_can_not_keep_expert_ranks_in_step() -> None:
    """As upstream: every rank must make the same steps, and only a coordinator sees to that."""
    model = new_model()
    model.config.expert_model_parallel_size = 2
    with pytest.raises(ValueError, match="use_coordinator=False and expert_model_parallel_size > 1"):
        built(model=model, use_coordinator=False)


def test_an_unknown_layer_is_refused_by_name() -> None:
    """Construction is the last moment at which nothing has happened."""
    model = new_model()
    model.decoder.layers[1].self_attention = nn.Identity().eval()
    with pytest.raises(UnsupportedModelError, match=r"decoder\.layers\.1 has a Identity"):
        built(model=model)


def test_an_unknown_attention_backend_is_refused_with_the_known_ones() -> None:
    """A misspelt name must not fall back to a slow path unnoticed."""
    with pytest.raises(UnsupportedModelError, match="attention_backend is 'flush'"):
        built(attention_backend="flush")


def test_a_tokenizer_without_an_interface_is_refused() -> None:
    """It would otherwise show at the first prompt."""
    with pytest.raises(TypeError, match="tokenizer is a NoneType without tokenize/detokenize"):
        built(tokenizer=None)


def test_an_invalid_setting_is_refused() -> None:
    """The limits' own checks are reached from here."""
    with pytest.raises(ValueError, match="block_size_tokens is 0"):
        built(inference_config=settings(block_size_tokens=0))


def test_megatrons_gpt_wrapper_is_taken_and_others_refused() -> None:
    """Its work is the hook's; another one's inputs would be ignored."""

    class GPTInferenceWrapper:
        pass

    class MyWrapper:
        pass

    built(inference_wrapper_cls=GPTInferenceWrapper)
    with pytest.raises(NotImplementedError, match="inference_wrapper_cls is MyWrapper"):
        built(inference_wrapper_cls=MyWrapper)


def test_a_setting_without_effect_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Dropped silently, a user would look for its effect for hours."""
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(InferenceConfig)}
    name = next(
        name for name, default in defaults.items() if name not in HONOURED and isinstance(default, bool)
    )
    changed = {name: not defaults[name]}
    with caplog.at_level(logging.WARNING):
        built(inference_config=settings(**changed))
    assert caplog.text.count(name) == 1
    assert "without effect" in caplog.text


def test_settings_left_alone_are_not_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    """A warning in every start teaches users to skip it."""
    with caplog.at_level(logging.WARNING):
        built()
    assert caplog.text == ""


def test_each_replica_samples_by_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the same prompt, sent to several replicas, would give an RL loop the same text each time."""
    base = shared_model().config.inference_sampling_seed
    with monkeypatch.context() as patch:
        patch.setattr(parallel_state, "get_data_parallel_rank", lambda: 3)
        assert built().engine.config.sampling_seed == base + 3
        alike = settings(offset_sampling_seed_by_dp_rank=False)
        assert built(inference_config=alike).engine.config.sampling_seed == base
        patch.setattr(shared_model().config, "deterministic_mode", True)
        assert built().engine.config.sampling_seed == base
    groups = ProcessGroupCollection.use_mpu_process_groups()
    assert built(inference_config=settings(pg_collection=groups)).engine.config.sampling_seed == base


def test_experts_that_the_given_groups_do_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that do not know of each other would wait in a step for ever."""
    shared_model()  # which sets the groups up
    with quiet_megatron():
        model = split_moe()
    for layer in model.decoder.layers:
        monkeypatch.setattr(layer.mlp.token_dispatcher, "tp_ep_group", "the experts'")
        monkeypatch.setattr(layer.mlp.token_dispatcher, "ep_size", 2)

    def ranks_of(group: object) -> list[int]:
        return [0, 1] if group == "the experts'" else [0]

    def size_of(group: object = None) -> int:
        return len(ranks_of(group))

    monkeypatch.setattr(distributed, "get_process_group_ranks", ranks_of)
    monkeypatch.setattr(distributed, "get_world_size", size_of)
    with pytest.raises(UnsupportedModelError, match=r"the experts are spread over ranks \[0, 1\], of which"):
        built(model=model)


def test_reports_are_made_where_they_are_asked_for() -> None:
    """And what can't report is refused before anything starts."""
    assert built().engine.times.on_result is None
    assert built(inference_config=settings(logging_step_interval=10)).engine.times.on_result is not None
    with pytest.raises(TypeError, match="metrics_writer is a str"):
        built(inference_config=settings(logging_step_interval=10, metrics_writer="wandb"))


@pytest.mark.parametrize(
    ("arguments", "fields", "said"),
    [
        (lambda: {"model": None}, {}, "TypeError: model is a NoneType; give a megatron-core model"),
        (lambda: {"model": new_model().train()}, {}, "ValueError: model is in training mode (its GPTModel)"),
        (lambda: {"inference_wrapper_cls": int}, {}, "NotImplementedError: inference_wrapper_cls is int;"),
        (lambda: {"tokenizer": None}, {}, "TypeError: tokenizer is a NoneType without tokenize/detokenize"),
        (dict, {"block_size_tokens": 0}, "ValueError: InferenceConfig.block_size_tokens is 0"),
        (dict, {"metrics_writer": "wandb"}, "TypeError: InferenceConfig.metrics_writer is a str"),
    ],
    ids=["no model", "training", "wrapper", "tokenizer", "limits", "writer"],
)
def test_what_one_rank_refuses_is_raised_on_all(
    arguments: Callable[[], dict[str, Any]],  # Any: the constructor's
    fields: dict[str, Any],  # Any: InferenceConfig's
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others would wait for it until torch's own time is up."""
    groups = groups_of(2, monkeypatch)
    wrong = arguments()

    def outcome(place: int) -> str:
        collection: Any = SimpleNamespace(mp=groups[place])  # Any: stands in for megatron's
        own = fields if place else {}
        config = settings(pg_collection=collection, logging_step_interval=1, **own)
        try:
            built(inference_config=config, **(wrong if place else {}))
        except Exception as error:  # noqa: BLE001 - which one it is, is the test's matter
            return f"{type(error).__name__}: {error}"
        return "built"

    with ThreadPoolExecutor(2) as threads:
        others, own = threads.map(outcome, range(2))
    assert own.startswith(said)
    assert others == f"RankLostError: rank 6 did not start: {own.partition(': ')[2]}"


def test_what_is_honoured_is_a_field_of_some_megatron() -> None:
    """A misspelt name would make the warning lie."""
    fields = {field.name for field in dataclasses.fields(InferenceConfig)} | {"verbose"}
    assert fields >= HONOURED


@pytest.mark.gpu
def test_a_model_on_a_gpu_counts_the_gpus_memory() -> None:
    """The cache takes at most half of what is free there, not of the machine's."""
    model = new_model().to("cuda")
    config = built(model=model, inference_config=InferenceConfig(buffer_size_gb=10_000)).engine.config
    free, _ = torch.cuda.mem_get_info()
    assert config.num_blocks * config.block_size * 768 <= free
