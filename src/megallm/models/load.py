"""`load_model`: from a name or a path to a model and its tokenizer.

Chooses the reader for a source; knows no format's insides. torch and megatron-core are imported
when `load_model` runs, not before.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.catalog import KNOWN_MODELS, fetch
from megallm.models.checkpoint import Checkpoint
from megallm.models.gguf_file import GgufFile
from megallm.models.gguf_llama import GgufLlama
from megallm.models.tokenizer import ByteLevelTokenizer

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel


def load_model(
    source: str | Path,
    *,
    dtype: "torch.dtype | None" = None,
    device: "torch.device | str | None" = None,
    cache_dir: Path | None = None,
) -> "tuple[GPTModel, ByteLevelTokenizer]":
    """Loads a model, ready to be given to `MegatronLLM`, and its tokenizer.

    `source` is a known name ("smollm2-135m", downloaded into `cache_dir` on first use) or the path
    of a GGUF file. `device` is the GPU where there is one, else the CPU; `dtype` is float32 on a
    CPU, bfloat16 on a GPU. The model is in eval mode with frozen parameters. Where nothing set up
    torch.distributed and megatron's parallel state, they are set up for this process alone.

    Raises: ModelFileError when the file can't be had or read, UnsupportedModelError when it holds
    something that can't be built.
    """
    # first, since what it refuses needs no imports of seconds
    checkpoint = open_checkpoint(find_file(source, cache_dir))
    tokenizer = checkpoint.tokenizer()

    import torch

    from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron

    where = _device(device)
    kind = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    if kind not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedModelError(f"dtype is {kind}, supported are float32, bfloat16 and float16")
    with quiet_megatron():
        from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

        from megallm.models.gpt import build_gpt

        ensure_process_groups()
        model = build_gpt(checkpoint, dtype=kind, device=where)
    MegatronTokenizerBase.register(
        ByteLevelTokenizer
    )  # isinstance holds, and the tokenizer needs no megatron
    return model, tokenizer


def find_file(source: str | Path, cache_dir: Path | None = None) -> Path:
    """Gives the path of a source's file, downloading a known model's first where it is missing.

    Raises: ModelFileError when there is no such name or file.
    """
    if isinstance(source, str) and source in KNOWN_MODELS:
        return fetch(KNOWN_MODELS[source], cache_dir)
    path = Path(source)
    if not path.exists():
        raise ModelFileError(
            f"{source!s} is neither a file nor a known model; known are {', '.join(KNOWN_MODELS)}; "
            "give one of them or the path of a GGUF file"
        )
    return path


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint with the reader for its format and family.

    Raises: UnsupportedModelError when there is none, ModelFileError when the file is damaged.
    """
    if path.is_dir():
        raise UnsupportedModelError(f"{path} is a folder; supported are GGUF files, so give the path of one")
    return GgufLlama(GgufFile(path))


def _device(asked: "torch.device | str | None") -> "torch.device":
    import torch

    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedModelError(f"device is {device}; megatron-core's modules run on cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModelError(f"device is {device} and torch finds no CUDA device; use device='cpu'")
    return device
