"""`load_model`: which source, which reader, which device."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models import load_model
from megallm.models.catalog import KNOWN_MODELS, default_cache_dir
from megallm.models.load import find_file
from tests.models.tiny_gguf import write_tiny


def test_a_path_as_text_or_as_path_loads(tmp_path: Path) -> None:
    """Scripts pass what their argument parser gave them."""
    write_tiny(tmp_path / "tiny.gguf", "Q8_0")
    for source in (tmp_path / "tiny.gguf", str(tmp_path / "tiny.gguf")):
        model, tokenizer = load_model(source, device="cpu")
        assert next(model.parameters()).dtype is torch.float32
        assert tokenizer.eod == 2


def test_the_demo_model_is_what_its_name_says(demo_model: tuple[Any, Any]) -> None:
    """The fixture every engine test stands on."""
    model, tokenizer = demo_model
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert (model.config.num_layers, model.max_sequence_length) == (30, 8192)
    assert tokenizer.vocab_size == model.vocab_size == 49_152


def test_the_tokenizer_passes_for_megatron_s(demo_model: tuple[Any, Any]) -> None:
    """Code of megatron checks with isinstance in places."""
    from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

    assert isinstance(demo_model[1], MegatronTokenizerBase)


def test_a_known_name_is_taken_from_the_given_cache(tmp_path: Path) -> None:
    """Clusters share one folder of models."""
    shutil.copy(find_file("smollm2-135m"), tmp_path)
    assert find_file("smollm2-135m", tmp_path).parent == tmp_path != default_cache_dir()


def test_an_unknown_source_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    """A typing mistake in a name and a missing file look alike."""
    with pytest.raises(
        ModelFileError, match=r"'?smollm2-13b'? is neither a file nor a known model; known are smollm2"
    ):
        load_model("smollm2-13b")
    with pytest.raises(ModelFileError, match=r"absent\.gguf is neither a file"):
        load_model(tmp_path / "absent.gguf")
    assert "smollm2-135m" in KNOWN_MODELS


def test_a_folder_is_refused_with_what_is_supported(tmp_path: Path) -> None:
    """Hugging Face folders are what most users have."""
    with pytest.raises(UnsupportedModelError, match="is a folder; supported are GGUF files"):
        load_model(tmp_path)


def test_devices_and_dtypes_that_cant_work_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    """Otherwise the first forward pass fails, far from the mistake."""
    write_tiny(tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedModelError, match="device is meta"):
        load_model(tmp_path / "tiny.gguf", device="meta")
    with pytest.raises(UnsupportedModelError, match=r"dtype is torch\.int8"):
        load_model(tmp_path / "tiny.gguf", device="cpu", dtype=torch.int8)
