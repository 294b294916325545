"""GGUF files of the known families."""

from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import torch

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.checkpoint import RopeScaling, tensor_specs
from megallm.models.gguf_checkpoint import GgufCheckpoint
from megallm.models.gguf_file import GgufFile
from megallm.models.load import load_model
from tests.models.plain_forward import plain_logits
from tests.models.tiny_gguf import (
    FORMATS,
    TINY,
    file_tensors,
    tiny_metadata,
    tiny_weights,
    write_gguf,
    write_hf_as_gguf,
    write_tiny,
)
from tests.models.tiny_hf import PROMPT, hf_logits, hf_model

# megatron's own modules say so to each other, at every step
pytestmark = pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")


def test_a_sound_file_gives_its_numbers_and_every_tensor_in_hugging_face_s_order(tmp_path: Path) -> None:
    """llama.cpp interleaves the rows of queries and keys; left so, attention is noise."""
    weights = write_tiny(tmp_path / "tiny.gguf")
    checkpoint = GgufCheckpoint(GgufFile(tmp_path / "tiny.gguf"))
    assert msgspec.structs.replace(checkpoint.hyperparameters, norm_epsilon=1e-5) == TINY
    assert checkpoint.hyperparameters.norm_epsilon == pytest.approx(1e-5)
    for spec in tensor_specs(TINY):
        np.testing.assert_array_equal(checkpoint.read(spec.name), weights[spec.name], err_msg=spec.name)


def test_an_output_projection_of_its_own_is_found(tmp_path: Path) -> None:
    """Llama 8B has one; taking the embedding for it would load without a word."""
    size = msgspec.structs.replace(TINY, is_tied=False)
    weights = write_tiny(tmp_path / "untied.gguf", size=size)
    checkpoint = GgufCheckpoint(GgufFile(tmp_path / "untied.gguf"))
    assert not checkpoint.hyperparameters.is_tied
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), weights["lm_head.weight"])


def test_another_family_is_refused_with_its_name_and_what_is_supported(tmp_path: Path) -> None:
    """Gemma differs in ways that would load and then talk nonsense."""
    path = write_gguf(tmp_path / "q.gguf", tiny_metadata() | {"general.architecture": "gemma"}, {})
    with pytest.raises(
        UnsupportedModelError, match=r"architecture 'gemma', supported are \['llama', 'qwen2', "
    ):
        GgufCheckpoint(GgufFile(path))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """An uninitialised parameter gives plausible garbage; it must not come to that."""
    tensors = file_tensors(tiny_weights())
    del tensors["blk.1.ffn_up.weight"]
    path = write_gguf(tmp_path / "short.gguf", tiny_metadata(), tensors)
    with pytest.raises(ModelFileError, match=r"short\.gguf has no tensor blk\.1\.ffn_up\.weight"):
        GgufCheckpoint(GgufFile(path))
    del tensors["token_embd.weight"]
    path = write_gguf(tmp_path / "shorter.gguf", tiny_metadata(), tensors)
    with pytest.raises(ModelFileError, match=r"shorter\.gguf has no tensor token_embd\.weight"):
        GgufCheckpoint(GgufFile(path))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    """So that a metadata fault can be told from a tensor fault."""
    tensors = file_tensors(tiny_weights())
    tensors["blk.0.attn_k.weight"] = tensors["blk.0.attn_q.weight"]
    path = write_gguf(tmp_path / "wide.gguf", tiny_metadata(), tensors)
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_k\.weight has shape \(64, 64\), .* \(32, 64\)"):
        GgufCheckpoint(GgufFile(path))


@pytest.mark.parametrize("extra", ["blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight"])
def test_a_tensor_that_would_be_ignored_is_refused(tmp_path: Path, extra: str) -> None:
    """A bias or a frequency table left out changes every logit."""
    tensors = file_tensors(tiny_weights()) | {extra: np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "more.gguf", tiny_metadata(), tensors)
    with pytest.raises(UnsupportedModelError, match=f"1 tensors that a plain llama has not, {extra}"):
        GgufCheckpoint(GgufFile(path))


def test_llama_3_s_frequency_divisors_are_taken(tmp_path: Path) -> None:
    """Every Llama 3 file has them; without them long texts lose their thread."""
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    tensors = file_tensors(tiny_weights()) | {"rope_freqs.weight": divisors}
    path = write_gguf(tmp_path / "llama3.gguf", tiny_metadata(), tensors)
    scaling = GgufCheckpoint(GgufFile(path)).hyperparameters.rope_scaling
    assert scaling == RopeScaling(kind="factors", divisors=tuple(map(float, divisors)))
    tensors["rope_freqs.weight"] = divisors[:5]
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight has shape \(5,\), 8 positive numbers"):
        GgufCheckpoint(GgufFile(write_gguf(tmp_path / "damaged.gguf", tiny_metadata(), tensors)))


@pytest.mark.parametrize(
    ("architecture", "theirs"), [("qwen2", {}), ("qwen3", {"head_dim": 16}), ("llama", {})]
)
def test_each_family_s_file_gives_transformers_logits(
    tmp_path: Path, architecture: str, theirs: dict[str, int]
) -> None:
    """The families differ in biases, norms and the order of rows; each would load as another one."""
    model = hf_model(architecture, hidden_size=64, **theirs)
    path = write_hf_as_gguf(model, tmp_path / "model.gguf")
    loaded, _ = load_model(path, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(plain_logits(loaded, PROMPT), hf_logits(model, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_format_reads_back_near_what_was_stored(tmp_path: Path, stored: str) -> None:
    """A block format read with a wrong scale gives plausible weights and a mad model."""
    weights = write_tiny(tmp_path / "tiny.gguf", stored)
    checkpoint = GgufCheckpoint(GgufFile(tmp_path / "tiny.gguf"))
    steps = {"F32": 0.0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 1e-2, "Q5_0": 0.05, "Q5_1": 0.05}
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        error = np.abs(checkpoint.read(name).numpy() - weights[name]).max()
        assert error <= steps.get(stored, 0.08) * np.abs(weights[name]).max()


@pytest.mark.parametrize("stored", ["F32", "F16", "Q8_0", "Q4_1"])
def test_rows_and_columns_are_those_of_the_whole_tensor(tmp_path: Path, stored: str) -> None:
    """A rank's part: rows of whole heads, put in order; columns that begin and end inside a block."""
    write_tiny(tmp_path / "tiny.gguf", stored)
    checkpoint = GgufCheckpoint(GgufFile(tmp_path / "tiny.gguf"))
    for name, rows, columns in (
        ("self_attn.q_proj.weight", range(32, 64), None),
        ("self_attn.k_proj.weight", range(16), None),
        ("mlp.down_proj.weight", None, range(40, 88)),
        ("mlp.down_proj.weight", range(3, 5), range(33)),
        ("input_layernorm.weight", range(5, 9), None),
    ):
        whole = checkpoint.read("model.layers.1." + name)
        part = whole if rows is None else whole[rows.start : rows.stop]
        part = part if columns is None else part[:, columns.start : columns.stop]
        found = checkpoint.read("model.layers.1." + name, rows=rows, columns=columns)
        assert found.is_contiguous()
        assert torch.equal(found, part), name


def test_a_model_of_mixed_formats_holds_what_the_gguf_package_makes_of_them(tmp_path: Path) -> None:
    """Files of every size on offer mix formats from one layer to the next; each weight must arrive."""
    size = msgspec.structs.replace(TINY, num_layers=6, hidden_size=256, head_dim=64, ffn_size=256)
    formats = iter([*FORMATS, "Q4_K", "Q6_K"] * 2)
    tensors = file_tensors(tiny_weights(size), size)
    path = write_gguf(tmp_path / "mixed.gguf", tiny_metadata(size), tensors, lambda _: next(formats))
    model, _ = load_model(path, dtype=torch.float32, device="cpu")
    judge = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert {judge[name].tensor_type.name for name in judge} == set(FORMATS)

    def wanted(*names: str) -> torch.Tensor:
        parts = [gguf.quants.dequantize(judge[name].data, judge[name].tensor_type) for name in names]
        return torch.from_numpy(np.concatenate(parts))

    assert torch.equal(model.embedding.word_embeddings.weight, wanted("token_embd.weight"))
    for number, layer in enumerate(model.decoder.layers):
        block = f"blk.{number}."
        value_rows = layer.self_attention.linear_qkv.weight.view(2, 4, 64, 256)[:, 3].reshape(128, 256)
        assert torch.equal(value_rows, wanted(block + "attn_v.weight"))
        assert torch.equal(layer.self_attention.linear_proj.weight, wanted(block + "attn_output.weight"))
        gate_and_up = wanted(block + "ffn_gate.weight", block + "ffn_up.weight")
        assert torch.equal(layer.mlp.linear_fc1.weight, gate_and_up)
        assert torch.equal(layer.mlp.linear_fc2.weight, wanted(block + "ffn_down.weight"))


def test_a_tensor_that_cant_be_dequantised_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    """Met while the last layer is filled, it would cost the minutes of all the others."""
    size = msgspec.structs.replace(TINY, hidden_size=256, head_dim=64, ffn_size=256)
    tensors = file_tensors(tiny_weights(size), size)
    path = write_gguf(
        tmp_path / "q8k.gguf",
        tiny_metadata(size),
        tensors,
        lambda name: "Q8_K" if name == "blk.1.ffn_up.weight" else "Q4_K",
    )
    with pytest.raises(
        UnsupportedModelError,
        match=r"q8k\.gguf: tensor blk\.1\.ffn_up\.weight is stored as Q8_K, which can't",
    ):
        GgufCheckpoint(GgufFile(path))


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
        GgufCheckpoint(GgufFile(path))


def test_numbers_that_no_model_has_are_refused(tmp_path: Path) -> None:
    """A head count of zero must not end in a ZeroDivisionError."""
    for key, value in (("llama.attention.head_count", 0), ("llama.attention.head_count_kv", 3)):
        path = write_gguf(tmp_path / "odd.gguf", tiny_metadata() | {key: value}, file_tensors(tiny_weights()))
        with pytest.raises(ModelFileError, match=r"odd\.gguf"):
            GgufCheckpoint(GgufFile(path))
