"""`load_model`: from a name or a path to a model and its tokenizer.

Chooses the reader for a source; knows no format's insides. torch and megatron-core are imported
when `load_model` runs, not before.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.base_tokenizer import ModelTokenizer
from megallm.models.catalog import KNOWN_MODELS, fetch, path_of
from megallm.models.checkpoint import Checkpoint
from megallm.models.gguf_checkpoint import GgufCheckpoint
from megallm.models.gguf_file import GgufFile
from megallm.models.gguf_tokenizer import build_tokenizer as build_gguf_tokenizer
from megallm.models.hf_folder import HfFolder
from megallm.models.hf_tokenizer import build_tokenizer as build_hf_tokenizer
from megallm.models.launched import launched
from megallm.models.loading_bar import LoadingBar, loading_bar
from megallm.models.torch_dist import TorchDistFolder, is_torch_dist

if TYPE_CHECKING:
    import torch

    from megallm.models.gpt import ModelClass

MODEL_CLASSES: Final = ("gpt", "hybrid")
_GGUF: Final = ".gguf"


def load_model(
    source: str | Path,
    *,
    dtype: "torch.dtype | str | None" = None,
    device: "torch.device | str | None" = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    tokenizer: object = None,
    model_class: "ModelClass | None" = None,
    cache_dir: Path | None = None,
    progress: bool | None = None,
) -> tuple[Any, Any]:  # Any: megatron's models are untyped, and the tokenizer may be the caller's
    """Loads a model, ready to be given to `MegatronLLM`, and its tokenizer.

    `source` is a known name ("smollm2-135m", downloaded into `cache_dir` on first use), a Hugging Face
    folder with safetensors, a GGUF file, or a folder of megatron's distributed checkpoints
    (`torch_dist`). `dtype`, torch's or its name, is float32 on a CPU, bfloat16 on a GPU; `device` is the
    GPU where there is one, else the CPU. `tokenizer` is the folder or file to take the tokenizer from
    where it is not the checkpoint itself, or a tokenizer, which is given back as it is. `model_class` is
    "gpt" or "hybrid", None as it was saved, else "gpt". `progress` is a line with a bar on stderr, None on a
    terminal and global rank 0 alone. The model is in eval mode with frozen parameters.

    `tp`, `pp` and `ep` are megatron's tensor, pipeline and expert parallelism: every rank calls alike, and
    each gets its part. Where nothing set up torch.distributed and megatron's parallel state, they are set up
    with these sizes: for the processes of torchrun, each on the GPU of its local rank, data parallel for the
    rest; for this process alone where it was not started so. Experts are spread over tensor-parallel ranks
    before others.

    Raises: ModelFileError when the file can't be had or read, UnsupportedModelError when it holds
    something that can't be built, ValueError for sizes that fit neither model nor processes nor the parallel
    state that is there.
    """
    if model_class is not None and model_class not in MODEL_CLASSES:
        raise ValueError(f"model_class is {model_class!r}; it must be one of {', '.join(MODEL_CLASSES)}")
    with loading_bar(is_shown=False if progress is None and launched().rank else progress) as bar:
        # first, since what it refuses needs no imports of seconds
        bar.say(first_step(source, cache_dir))
        checkpoint = open_checkpoint(find_file(source, cache_dir))
        chosen = checkpoint.tokenizer() if tokenizer is None else tokenizer
        if isinstance(tokenizer, str | Path):
            chosen = open_tokenizer(tokenizer, cache_dir)
        _refuse_strange_tokenizer(checkpoint, chosen)
        model = _built(
            checkpoint,
            bar,
            dtype=dtype,
            device=device,
            ranks=(tp, pp, ep),
            model_class=model_class,
        )
    return model, chosen


def first_step(source: str | Path, cache_dir: Path | None = None) -> str:
    """Says what `find_file` is going to do."""
    known = KNOWN_MODELS.get(str(source))
    is_missing = known is not None and not path_of(known, cache_dir).exists()
    return f"fetching {source}, once" if is_missing else f"opening {source}"


def find_file(source: str | Path, cache_dir: Path | None = None) -> Path:
    """Gives the path of a source's file or folder, downloading a known model's first where it is missing.

    Raises: ModelFileError when there is no such name or file.
    """
    if isinstance(source, str) and source in KNOWN_MODELS:
        return fetch(KNOWN_MODELS[source], cache_dir)
    path = Path(source)
    if not path.exists():
        raise ModelFileError(
            f"{source!s} is neither a file nor a known model; known are {', '.join(KNOWN_MODELS)}; "
            "give one of them, or the path of a Hugging Face folder, a GGUF file or a torch_dist checkpoint"
        )
    return path


def open_checkpoint(path: Path) -> Checkpoint | TorchDistFolder:
    """Opens a checkpoint with the reader for its format and family.

    Raises: UnsupportedModelError when there is none, ModelFileError when the file is damaged.
    """
    if not path.is_dir():
        return GgufCheckpoint(GgufFile(path))
    if is_torch_dist(path):
        return TorchDistFolder(path)
    if not (path / "config.json").exists():
        raise UnsupportedModelError(
            f"{path} is a folder with neither config.json (Hugging Face's) nor "
            "latest_checkpointed_iteration.txt or metadata.json (megatron's torch_dist); give one of those, "
            "or the path of a GGUF file"
        )
    return HfFolder(path)


def open_tokenizer(source: str | Path, cache_dir: Path | None = None) -> ModelTokenizer:
    """Builds a tokenizer without its model: from a known name, a folder, or a tokenizer's or GGUF file.

    Raises: as `find_file`, and as the reader of the format.
    """
    path = find_file(source, cache_dir)
    if path.suffix == _GGUF:
        return build_gguf_tokenizer(GgufFile(path))
    return build_hf_tokenizer(path)


def _built(
    checkpoint: Checkpoint | TorchDistFolder,
    bar: LoadingBar,
    *,
    dtype: "torch.dtype | str | None",
    device: "torch.device | str | None",
    ranks: tuple[int | None, int | None, int | None],
    model_class: "ModelClass | None",
) -> Any:  # Any: megatron's models are untyped
    bar.say("importing torch and megatron-core")
    import torch

    from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron, sizes_to_use

    where = _device(device)
    kind = _dtype(dtype) or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    with quiet_megatron():
        from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

        from megallm.models.gpt import build_gpt

        sizes = sizes_to_use(*ranks)
        sizes.check_model(checkpoint.hyperparameters)
        ensure_process_groups(sizes, where)
        # so that isinstance holds, and the tokenizer needs no megatron
        MegatronTokenizerBase.register(ModelTokenizer)
        bar.say("building the model")
        if isinstance(checkpoint, TorchDistFolder):
            return checkpoint.build(dtype=kind, device=where, bar=bar, model_class=model_class)
        return build_gpt(checkpoint, dtype=kind, device=where, bar=bar, model_class=model_class or "gpt")


def _refuse_strange_tokenizer(checkpoint: Checkpoint | TorchDistFolder, tokenizer: object) -> None:
    rows = checkpoint.hyperparameters.vocab_size
    if isinstance(tokenizer, ModelTokenizer) and tokenizer.vocab_size > rows:
        raise ModelFileError(
            f"{tokenizer.path} has {tokenizer.vocab_size:,} tokens, the vocabulary of {checkpoint.path} has "
            f"{rows:,}; tokenizer and model don't belong together"
        )


def _dtype(asked: "torch.dtype | str | None") -> "torch.dtype | None":
    import torch

    if asked is None:
        return None
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    kind = known.get(asked) if isinstance(asked, str) else asked
    if kind not in known.values():
        raise UnsupportedModelError(f"dtype is {asked}, supported are float32, bfloat16 and float16")
    return kind


def _device(asked: "torch.device | str | None") -> "torch.device":
    """Gives the device; of a launcher's process that has no process groups yet, its own GPU by default."""
    import torch
    import torch.distributed as dist

    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(
            f"device is {asked!r}, which torch does not know; use cpu, cuda or cuda:1"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedModelError(f"device is {device}; megatron-core's modules run on cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModelError(f"device is {device} and torch finds no CUDA device; use device='cpu'")
    own = launched().local_rank
    if device == torch.device("cuda") and own is not None and not dist.is_initialized():
        if own >= torch.cuda.device_count():
            raise UnsupportedModelError(
                f"LOCAL_RANK is {own}, and torch finds {torch.cuda.device_count()} CUDA devices; start as "
                "many processes a machine, or name a device"
            )
        device = torch.device("cuda", own)
        torch.cuda.set_device(device)
    return device
