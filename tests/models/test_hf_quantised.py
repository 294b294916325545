"""Quantised folders: the FP8 ones load as what they stand for, the others are refused by name."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.hf_folder import HfFolder
from megallm.models.load import load_model
from tests.models.tiny_hf import change_config, hf_model, save

BLOCK = [20, 12]
"""Rows and columns, of which no matrix here is a multiple."""
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": BLOCK,
}
QUERY = "model.layers.0.self_attn.q_proj.weight"


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gives a matrix in e4m3, the scales of its blocks, and what the two stand for, in float32."""
    rows, columns = weight.shape
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    exact = torch.empty(rows, columns)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = (
                slice(row * BLOCK[0], (row + 1) * BLOCK[0]),
                slice(column * BLOCK[1], (column + 1) * BLOCK[1]),
            )
            scales[row, column] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scales[row, column]).to(torch.float8_e4m3fn)
            exact[at] = stored[at].float() * scales[row, column]
    return stored, scales, exact


def save_fp8(family: str, folder: Path, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """Writes a family's model with each layer's matrices in FP8.

    Gives the folder, and beside the names of its tensors what they stand for.
    """
    save(hf_model(family, **changes), folder)
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    exact = dict(tensors)
    for name in exact:
        if name.endswith("_proj.weight"):
            tensors[name], tensors[name + "_scale_inv"], exact[name] = quantised(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, quantization_config=FP8)
    return folder, exact


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Changes tensors of a folder of one file; None takes one out."""
    path = folder / "model.safetensors"
    changed: dict[str, Tensor | None] = {**load_file(path), **tensors}
    save_file({name: values for name, values in changed.items() if values is not None}, path)


EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(("family", "changes"), [("qwen3", {}), ("qwen3_moe", EXPERTS)])
def test_an_fp8_folder_is_the_model_it_stands_for(
    tmp_path: Path, family: str, changes: dict[str, int]
) -> None:
    """Many large models are published in it alone; one scale at the wrong block and they talk nonsense."""
    folder, exact = save_fp8(family, tmp_path / "fp8", **changes)
    plain = shutil.copytree(folder, tmp_path / "plain")
    save_file(exact, plain / "model.safetensors")
    change_config(plain, quantization_config=None)
    for dtype in (torch.float32, torch.bfloat16):
        model, _ = load_model(folder, dtype=dtype, device="cpu")
        wanted, _ = load_model(plain, dtype=dtype, device="cpu")
        theirs = dict(wanted.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, theirs[name]), name


def test_weights_come_back_exactly_and_in_parts(tmp_path: Path) -> None:
    """A rank reads its rows or its columns alone, which begin in the middle of a block."""
    folder, exact = save_fp8("llama", tmp_path)
    checkpoint = HfFolder(folder)
    for name, values in exact.items():
        assert torch.equal(checkpoint.read(name), values), name
    wanted = exact[QUERY]
    assert torch.equal(checkpoint.read(QUERY, rows=range(8, 29)), wanted[8:29])
    assert torch.equal(checkpoint.read(QUERY, columns=range(16, 32)), wanted[:, 16:])
    assert torch.equal(checkpoint.read(QUERY, rows=range(20, 24), columns=range(4)), wanted[20:24, :4])


def test_parts_of_a_stacked_weight_have_their_own_scales(tmp_path: Path) -> None:
    """Phi-3's joint projection begins its keys in the middle of a block."""
    folder, exact = save_fp8("phi3", tmp_path)
    checkpoint = HfFolder(folder)
    parts = exact["model.layers.1.self_attn.qkv_proj.weight"].split([32, 16, 16])
    for name, rows in zip(("q", "k", "v"), parts, strict=True):
        assert torch.equal(checkpoint.read(f"model.layers.1.self_attn.{name}_proj.weight"), rows)


@pytest.mark.parametrize(
    ("said", "method", "remedy"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", r"model\.dequantize\(\)"),
        ({"load_in_8bit": True}, "bitsandbytes", r"model\.dequantize\(\)"),
        ({"quant_method": "gptq", "bits": 4}, "gptq", "GGUF file of it"),
        ({"quant_method": "awq", "bits": 4}, "awq", "GGUF file of it"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors", "CompressedTensorsConfig"),
        ({"quant_method": "mxfp4"}, "mxfp4", r"Mxfp4Config\(dequantize=True\)"),
        ({"quant_method": "torchao"}, "torchao", "unquantised folder"),
        ({}, "of no name", "unquantised folder"),
        (FP8 | {"weight_block_size": None}, "fp8", "only e4m3 with a weight_block_size of two .*FineGrained"),
        (FP8 | {"weight_block_size": [128, 0]}, "fp8", "only e4m3 with a weight_block_size of two numbers"),
        (FP8 | {"fmt": "e5m2"}, "fp8", "only e4m3"),
    ],
)
def test_a_method_is_refused_by_name_with_the_remedy_before_weights_are_looked_at(
    tmp_path: Path, said: dict[str, object], method: str, remedy: str
) -> None:
    """The folder may be half a terabyte, on a slow disk."""
    save(hf_model("llama"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for key in ("quantization_config", "compression_config"):
        change_config(tmp_path, **{"quantization_config": None, key: said})
        with pytest.raises(
            UnsupportedModelError, match=rf"config\.json: {key} says .*\({method}\).*{remedy}"
        ):
            load_model(tmp_path)


@pytest.mark.parametrize(
    ("file", "method"), [("quantize_config.json", "gptq or awq"), ("hf_quant_config.json", "modelopt")]
)
def test_a_method_that_stands_in_a_file_of_its_own_is_refused(tmp_path: Path, file: str, method: str) -> None:
    """Older tools and NVIDIA's leave config.json as it was."""
    save(hf_model("llama"), tmp_path)
    (tmp_path / file).write_text("{}", encoding="utf-8")
    with pytest.raises(
        UnsupportedModelError, match=rf"{file} says that the weights are quantised \({method}\)"
    ):
        HfFolder(tmp_path)


@pytest.mark.parametrize(
    ("name", "method"),
    [("q_proj.qweight", "gptq or awq"), ("q_proj.weight_packed", "compressed-tensors")],
)
def test_packed_weights_that_nothing_announces_are_refused_by_method(
    tmp_path: Path, name: str, method: str
) -> None:
    """As an incomplete folder it would be fetched again, in vain."""
    save(hf_model("llama"), tmp_path)
    change(tmp_path, **{QUERY: None, f"model.layers.0.self_attn.{name}": torch.zeros(4, 4)})
    with pytest.raises(UnsupportedModelError, match=rf"tensor .*{name} says .* quantised \({method}\)"):
        HfFolder(tmp_path)


def test_scales_that_are_missing_or_of_another_shape_are_refused_before_a_weight_is_read(
    tmp_path: Path,
) -> None:
    """Without its scale a weight is wrong by a factor of hundreds."""
    save_fp8("llama", tmp_path)
    change(tmp_path, **{QUERY + "_scale_inv": torch.ones(2, 2)})
    with pytest.raises(
        ModelFileError, match=r"q_proj\.weight_scale_inv is F32 of shape \(2, 2\), .* \(2, 3\)"
    ):
        HfFolder(tmp_path)
    change(tmp_path, **{QUERY + "_scale_inv": None})
    with pytest.raises(
        ModelFileError, match=r"as F8_E4M3, and there is no tensor .*q_proj\.weight_scale_inv"
    ):
        HfFolder(tmp_path)
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(UnsupportedModelError, match=r"as F8_E4M3, and config\.json has no fp8 quantization_"):
        HfFolder(tmp_path)
