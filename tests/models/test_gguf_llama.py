"""GGUF files of the Llama family."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.checkpoint import tensor_specs
from megallm.models.gguf_file import GgufFile
from megallm.models.gguf_llama import GgufLlama
from tests.models.tiny_gguf import TINY, file_tensors, tiny_metadata, tiny_weights, write_gguf, write_tiny


def test_a_sound_file_gives_its_numbers_and_every_tensor_in_hugging_face_s_order(tmp_path: Path) -> None:
    """llama.cpp interleaves the rows of queries and keys; left so, attention is noise."""
    weights = write_tiny(tmp_path / "tiny.gguf")
    checkpoint = GgufLlama(GgufFile(tmp_path / "tiny.gguf"))
    assert msgspec.structs.replace(checkpoint.hyperparameters, norm_epsilon=1e-5) == TINY
    assert checkpoint.hyperparameters.norm_epsilon == pytest.approx(1e-5)
    for spec in tensor_specs(TINY):
        np.testing.assert_array_equal(checkpoint.read(spec.name), weights[spec.name], err_msg=spec.name)


def test_an_output_projection_of_its_own_is_found(tmp_path: Path) -> None:
    """Llama 8B has one; taking the embedding for it would load without a word."""
    size = msgspec.structs.replace(TINY, is_tied=False)
    weights = write_tiny(tmp_path / "untied.gguf", size=size)
    checkpoint = GgufLlama(GgufFile(tmp_path / "untied.gguf"))
    assert not checkpoint.hyperparameters.is_tied
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), weights["lm_head.weight"])


def test_another_family_is_refused_with_its_name_and_what_is_supported(tmp_path: Path) -> None:
    """Qwen3 differs in ways that would load and then talk nonsense."""
    path = write_gguf(tmp_path / "q.gguf", tiny_metadata() | {"general.architecture": "qwen3"}, {})
    with pytest.raises(UnsupportedModelError, match=r"architecture 'qwen3', supported are \['llama'\]"):
        GgufLlama(GgufFile(path))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """An uninitialised parameter gives plausible garbage; it must not come to that."""
    tensors = file_tensors(tiny_weights())
    del tensors["blk.1.ffn_up.weight"]
    path = write_gguf(tmp_path / "short.gguf", tiny_metadata(), tensors)
    with pytest.raises(ModelFileError, match=r"short\.gguf has no tensor blk\.1\.ffn_up\.weight"):
        GgufLlama(GgufFile(path))
    del tensors["token_embd.weight"]
    path = write_gguf(tmp_path / "shorter.gguf", tiny_metadata(), tensors)
    with pytest.raises(ModelFileError, match=r"shorter\.gguf has no tensor token_embd\.weight"):
        GgufLlama(GgufFile(path))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    """So that a metadata fault can be told from a tensor fault."""
    tensors = file_tensors(tiny_weights())
    tensors["blk.0.attn_k.weight"] = tensors["blk.0.attn_q.weight"]
    path = write_gguf(tmp_path / "wide.gguf", tiny_metadata(), tensors)
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_k\.weight has shape \(64, 64\), .* \(32, 64\)"):
        GgufLlama(GgufFile(path))


@pytest.mark.parametrize("extra", ["blk.0.attn_q.bias", "rope_freqs.weight"])
def test_a_tensor_that_would_be_ignored_is_refused(tmp_path: Path, extra: str) -> None:
    """A bias or a frequency table left out changes every logit."""
    tensors = file_tensors(tiny_weights()) | {extra: np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "more.gguf", tiny_metadata(), tensors)
    with pytest.raises(UnsupportedModelError, match=f"1 tensors that a plain Llama has not, {extra}"):
        GgufLlama(GgufFile(path))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.rope.scaling.type", "yarn", r"scales rotary positions \(yarn\)"),
        ("llama.rope.scale_linear", 4.0, r"stretches rotary positions by 4\.0"),
        ("llama.rope.dimension_count", 8, r"rotates 8 of 16 dimensions"),
    ],
)
def test_other_rotary_positions_are_refused(tmp_path: Path, key: str, value: str | float, said: str) -> None:
    """They work for short prompts, so nobody would notice that long ones are wrong."""
    path = write_gguf(tmp_path / "rope.gguf", tiny_metadata() | {key: value}, file_tensors(tiny_weights()))
    with pytest.raises(UnsupportedModelError, match=said):
        GgufLlama(GgufFile(path))


def test_numbers_that_no_model_has_are_refused(tmp_path: Path) -> None:
    """A head count of zero must not end in a ZeroDivisionError."""
    for key, value in (("llama.attention.head_count", 0), ("llama.attention.head_count_kv", 3)):
        path = write_gguf(tmp_path / "odd.gguf", tiny_metadata() | {key: value}, file_tensors(tiny_weights()))
        with pytest.raises(ModelFileError, match=r"odd\.gguf"):
            GgufLlama(GgufFile(path))
