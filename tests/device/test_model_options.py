"""Which models are taken at all."""

import pytest
import torch
from torch import nn

from megallm.core_async.device.model import ModelHook
from megallm.core_async.device.model_options import device_of
from megallm.core_async.errors import UnsupportedModelError
from tests.device.conftest import built
from tests.device.models import Megatron


def test_wrapped_model_is_found(model: Megatron) -> None:
    """Float16Module and DistributedDataParallel keep the model in `.module`."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    assert ModelHook(Wrapper()).shape == ModelHook(model).shape


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("context_parallel_size", 2, "context_parallel_size=1"),
        ("mtp_num_layers", 1, "mtp_num_layers=None"),
        ("virtual_pipeline_model_parallel_size", 2, "virtual_pipeline_model_parallel_size=None"),
        ("window_size", (4, 2), "2 tokens ahead"),
    ],
)
def test_option_is_refused_with_the_remedy(
    model: Megatron, monkeypatch: pytest.MonkeyPatch, option: str, value: object, told: str
) -> None:
    """Each would run and give wrong text, or fail deep inside the model."""
    monkeypatch.setattr(model.config, option, value)
    with pytest.raises(UnsupportedModelError, match=told):
        ModelHook(model)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("tp_comm_overlap", True, "tp_comm_overlap=False"),
        ("transformer_impl", "inference_optimized", "transformer_impl='transformer_engine' or 'local'"),
    ],
)
def test_what_splits_tokens_by_itself_is_refused_beside_sequence_parallel(
    model: Megatron, monkeypatch: pytest.MonkeyPatch, option: str, value: object, told: str
) -> None:
    """A step turns sequence parallelism off, where it is the layers' own."""
    monkeypatch.setattr(model.config, "sequence_parallel", True)
    monkeypatch.setattr(model.config, option, value)
    ModelHook(model)  # it means nothing to one rank
    monkeypatch.setattr(model.config, "tensor_model_parallel_size", 2)
    with pytest.raises(UnsupportedModelError, match=told):
        ModelHook(model)


def test_a_model_without_parameters_is_where_others_would_be() -> None:
    """A stage of a pipeline may have no layer, and hands on what it gets."""
    assert device_of(nn.Identity()).type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device_of(nn.Linear(2, 2, device="meta")).type == "meta"


def test_cached_latents_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron would demand its own inference context in the middle of the forward pass."""
    model = built("latent attention")
    monkeypatch.setattr(model.config, "cache_mla_latents", True)
    with pytest.raises(UnsupportedModelError, match="cache_mla_latents=False"):
        ModelHook(model)


def test_what_is_no_language_model_is_refused() -> None:
    """Something else was passed as the model."""
    with pytest.raises(UnsupportedModelError, match="Linear has no decoder"):
        ModelHook(nn.Linear(2, 2))


def test_multimodal_positions_are_refused(model: Megatron, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need three positions a token."""
    monkeypatch.setattr(model, "position_embedding_type", "mrope")
    with pytest.raises(UnsupportedModelError, match="multimodal rotary positions"):
        ModelHook(model)
