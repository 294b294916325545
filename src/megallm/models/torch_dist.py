"""A folder of megatron's distributed checkpoints (`torch_dist`) as a model.

Weights go through megatron's own dist_checkpointing, which reads what this process needs; what the model
is stands in the training arguments that are stored beside them, which training_arguments.py knows.
"""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.base_tokenizer import ModelTokenizer
from megallm.models.checkpoint import Hyperparameters
from megallm.models.hf_tokenizer import build_tokenizer
from megallm.models.loading_bar import LoadingBar
from megallm.models.settings_file import Settings
from megallm.models.training_arguments import hyperparameters_of

if TYPE_CHECKING:
    import torch

    from megallm.models.gpt import ModelClass

_TRACKER: Final = "latest_checkpointed_iteration.txt"
_METADATA: Final = "metadata.json"
_CLASS_NAMES: Final = {"gpt": "GPTModel", "hybrid": "HybridModel"}
_NORMS: Final = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)
"""Both names of the norms before attention and MLP."""


def is_torch_dist(folder: Path) -> bool:
    """Says whether a folder is one of megatron's, of a whole run or of one iteration."""
    return (folder / _TRACKER).exists() or (folder / _METADATA).exists()


class TorchDistFolder:
    """A checkpoint of a GPTModel or a HybridModel, its arguments read and checked.

    Raises: ModelFileError for an incomplete folder; UnsupportedModelError for another format or model.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = _iteration(folder)
        settings = Settings.read(self._folder / _METADATA)
        backend = settings.value("sharded_backend", str)
        if backend != "torch_dist":
            raise UnsupportedModelError(
                f"{settings.name_of('sharded_backend')} is {backend!r}, supported is torch_dist; save the "
                "checkpoint with --ckpt-format torch_dist"
            )
        self._common = _common_state(self._folder)
        if "args" not in self._common:
            raise ModelFileError(
                f"{self._folder} holds no training arguments (args), which say what the model is; build the "
                "megatron-core model yourself and pass it to MegatronLLM"
            )
        self._arguments = Settings(self._folder, vars(self._common["args"]), "args.")
        self._size = hyperparameters_of(self._arguments)

    @property
    def path(self) -> Path:
        """Gives the path of the iteration's folder."""
        return self._folder

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Gives the decoder's numbers."""
        return self._size

    def tokenizer(self) -> ModelTokenizer:
        """Builds the tokenizer that the run was trained with, where its files are still there.

        Raises: ModelFileError when they are not.
        """
        named = self._arguments.values.get("tokenizer_model")
        if not isinstance(named, str) or not Path(named).exists():
            raise ModelFileError(
                f"{self._arguments.name_of('tokenizer_model')} is {named!r}, which is no file here; name the "
                "folder or file of the tokenizer with load_model(tokenizer=...)"
            )
        return build_tokenizer(Path(named))

    def build(
        self,
        *,
        dtype: "torch.dtype",
        device: "torch.device",
        bar: LoadingBar,
        model_class: "ModelClass | None" = None,
    ) -> Any:  # Any: both classes are untyped
        """Builds the model, as `build_gpt` does, and loads its weights.

        Raises: ModelFileError when weights are missing or of other shapes; UnsupportedModelError for
        another class than was saved.
        """
        from megatron.core import dist_checkpointing

        from megallm.models.gpt import unfilled

        saved: ModelClass = "gpt" if self._size.layer_kinds is None else "hybrid"
        if model_class not in (None, saved):
            raise UnsupportedModelError(
                f"model_class is {model_class!r}, and {self._folder} holds a {_CLASS_NAMES[saved]}; leave it "
                f"out, or use {saved!r}"
            )
        model = unfilled(self._size, dtype=dtype, device=device, model_class=saved)
        bar.say("reading weights")
        metadata = self._common.get("content_metadata")
        wanted = {"model": model.sharded_state_dict(metadata=metadata)}
        try:
            _ask_by_stored_names(wanted["model"], dist_checkpointing.load_tensors_metadata(str(self._folder)))
            loaded: Any = dist_checkpointing.load(wanted, str(self._folder))
        except _load_errors() as error:
            raise ModelFileError(
                f"{self._folder} does not hold, whole, the model that its arguments call for: "
                f"{_first(error)}; fetch the folder again"
            ) from error
        model.load_state_dict(loaded["model"])
        return model


def _iteration(folder: Path) -> Path:
    """Gives the folder of one iteration: the one that a run's tracker names, or the folder itself."""
    tracker = folder / _TRACKER
    if not tracker.exists():
        return folder
    latest = tracker.read_text(encoding="utf-8").strip()
    if latest != "release" and not latest.isdecimal():
        raise ModelFileError(
            f"{tracker} says {latest[:40]!r}, neither a number nor 'release'; fetch it again"
        )
    found = folder / ("release" if latest == "release" else f"iter_{int(latest):07d}")
    if not (found / _METADATA).exists():
        raise ModelFileError(
            f"{found / _METADATA} is not there, and {_TRACKER} names that iteration; fetch the folder again"
        )
    return found


def _common_state(folder: Path) -> dict[str, Any]:  # Any: what a run stores
    """Gives what is stored beside the tensors; unpickled with megatron's short list of classes alone."""
    from megallm.models.megatron_setup import quiet_megatron

    with quiet_megatron():
        from megatron.core import dist_checkpointing

        try:
            return dist_checkpointing.load_common_state_dict(str(folder))
        except _load_errors() as error:
            raise ModelFileError(
                f"{folder}: what is stored beside the tensors can't be read: {_first(error)}; fetch the "
                "folder again"
            ) from error


def _ask_by_stored_names(wanted: dict[str, Any], stored: Container[str]) -> None:  # Any: sharded tensors
    """Asks for each norm where it is stored: by itself, or in the linear layer after it.

    Transformer Engine has them in one module, which megatron's local layers imitate for an MLP and, where a
    layer has experts, should not.
    """
    for tensor in wanted.values():
        key = getattr(tensor, "key", None)
        if not isinstance(key, str) or key in stored:
            continue
        for alone, joint in _NORMS:
            for ours, theirs in ((alone, joint), (joint, alone)):
                if key.replace(ours, theirs) in stored:
                    tensor.key = key.replace(ours, theirs)


def _load_errors() -> tuple[type[BaseException], ...]:
    """Gives what megatron and torch raise for files that are absent, damaged, or of another model."""
    import pickle

    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    ours = (CheckpointingException, CheckpointException, pickle.UnpicklingError)
    return (*ours, KeyError, ValueError, RuntimeError, OSError, EOFError)


def _first(error: BaseException) -> str:
    """Gives an error in one line: of one that lists each rank's, this rank's."""
    failures: dict[int, tuple[BaseException, object]] = getattr(error, "failures", {})
    cause = next((failure for failure, _ in failures.values()), error)
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
