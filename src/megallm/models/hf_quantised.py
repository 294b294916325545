"""Quantised weights of a Hugging Face folder: one format is undone at load, the others are refused by name.

That format is the one of DeepSeek's and Qwen's FP8 folders: e4m3, a float32 scale for each block of rows
and columns, "weight_scale_inv". Knows what folders say of quantisation; knows no family.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.safetensors_file import SafetensorsFile
from megallm.models.settings_file import Settings

if TYPE_CHECKING:
    import torch

SCALED: Final = "F8_E4M3"
"""What weights with scales are stored as."""
_SCALES: Final = "_scale_inv"
_SCALE_KINDS: Final = ("F32", "BF16", "F16")
_CONFIG_KEYS: Final = ("quantization_config", "compression_config")
_CONFIG_FILES: Final = {"quantize_config.json": "gptq or awq", "hf_quant_config.json": "modelopt"}
"""Files that older tools, and NVIDIA's, say it in."""
_PACKED: Final = {
    ".qweight": "gptq or awq",
    ".weight_packed": "compressed-tensors",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    "_proj_blocks": "mxfp4",
}
"""How names of tensors end that only a quantised folder has."""
_UNDONE_BY: Final = {
    "bitsandbytes": "model.dequantize()",
    "compressed-tensors": "CompressedTensorsConfig(dequantize=True)",
    "fp8": "FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "Mxfp4Config(dequantize=True)",
}
"""What undoes a method in transformers."""


class Blocks(Struct, frozen=True):
    """The rows and columns of a weight that share a scale."""

    rows: int
    columns: int

    def shape_for(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Gives the shape of the scales of a matrix."""
        return math.ceil(shape[0] / self.rows), math.ceil(shape[1] / self.columns)


def scale_name(weight: str) -> str:
    """Gives the name of the tensor that has a weight's scales."""
    return weight + _SCALES


def blocks_of(settings: Settings) -> Blocks | None:
    """Gives the blocks of a folder whose weights are scaled, None where they are not quantised.

    Raises: UnsupportedModelError naming any other method, and what to do.
    """
    for name, method in _CONFIG_FILES.items():
        if (settings.path.parent / name).exists():
            raise _refusal(str(settings.path.parent / name), method)
    key = next((key for key in _CONFIG_KEYS if settings.has(key)), None)
    if key is None:
        return None
    said = settings.inside(key)
    is_bitsandbytes = said.values.get("load_in_8bit") or said.values.get("load_in_4bit")
    method = str(said.values.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "of no name"))
    if method != "fp8":
        raise _refusal(settings.name_of(key), method)
    match said.values.get("fmt", "e4m3"), said.values.get("weight_block_size"):
        case "e4m3", [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Blocks(rows, columns)
        case _:
            detail = "; only e4m3 with a weight_block_size of two numbers is read"
            raise _refusal(settings.name_of(key), method, detail)


def refuse_packed(folder: Path, names: list[str]) -> None:
    """Refuses a folder that holds packed weights and does not say so.

    Raises: UnsupportedModelError naming the first such tensor, and the method.
    """
    for name in names:
        method = next((method for end, method in _PACKED.items() if name.endswith(end)), None)
        if method is not None:
            raise _refusal(f"{folder}: tensor {name}", method)


def check_scales(
    file: SafetensorsFile, weight: str, scales: SafetensorsFile | None, blocks: Blocks | None
) -> None:
    """Refuses a weight whose scales are missing or don't fit. `scales` is the file that has them.

    Raises: UnsupportedModelError when nothing says what its blocks are; ModelFileError.
    """
    shape, name = file.tensors[weight].shape, scale_name(weight)
    if blocks is None:
        raise UnsupportedModelError(
            f"{file.path}: tensor {weight} is stored as {SCALED}, and config.json has no fp8 "
            "quantization_config that says what scales it; use the model's unquantised folder"
        )
    if len(shape) != 2:  # noqa: PLR2004 - a matrix
        raise UnsupportedModelError(
            f"{file.path}: tensor {weight} is stored as {SCALED} of shape {shape}, supported are matrices; "
            "use the model's unquantised folder"
        )
    if scales is None:
        raise ModelFileError(
            f"{file.path} has {weight} as {SCALED}, and there is no tensor {name}; fetch the folder again"
        )
    found, wanted = scales.tensors[name], blocks.shape_for(shape)
    if found.shape != wanted or found.kind not in _SCALE_KINDS:
        raise ModelFileError(
            f"{scales.path}: tensor {name} is {found.kind} of shape {found.shape}, blocks of {blocks.rows} x "
            f"{blocks.columns} call for {wanted} in {' or '.join(_SCALE_KINDS)}; fetch the folder again"
        )


def dequantised(
    weight: "torch.Tensor",
    scales: "torch.Tensor",
    blocks: Blocks,
    *,
    first_row: int = 0,
    first_column: int = 0,
) -> "torch.Tensor":
    """Gives a part of a weight, in float32; `scales` are the whole weight's, the part begins as is said.

    Exact but for one rounding to float32 of each product.
    """
    import torch

    values = weight.to(torch.float32)
    columns = torch.arange(first_column, first_column + weight.shape[1]) // blocks.columns
    factors = scales.to(torch.float32)[:, columns]
    for row in range(first_row // blocks.rows, len(factors)):
        start = row * blocks.rows - first_row
        values[max(start, 0) : max(start + blocks.rows, 0)] *= factors[row]
    return values


def _refusal(what: str, method: str, detail: str = "") -> UnsupportedModelError:
    undone = _UNDONE_BY.get(method)
    own = f", or undo it with transformers' {undone} and save_pretrained" if undone is not None else ""
    return UnsupportedModelError(
        f"{what} says that the weights are quantised ({method}){detail}; use the model's unquantised folder "
        f"or a GGUF file of it{own}"
    )
