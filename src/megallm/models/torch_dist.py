"""A folder of megatron's distributed checkpoints (`torch_dist`) as a model.

Weights go through megatron's own dist_checkpointing, which reads what this process needs; what the model
is stands in the training arguments that are stored beside them. Knows those arguments' names.
"""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.base_tokenizer import ModelTokenizer
from megallm.models.checkpoint import Experts, Hyperparameters, RopeScaling
from megallm.models.hf_tokenizer import build_tokenizer
from megallm.models.loading_bar import LoadingBar
from megallm.models.settings_file import Settings

if TYPE_CHECKING:
    import torch

    from megallm.models.gpt import ModelClass

_TRACKER: Final = "latest_checkpointed_iteration.txt"
_METADATA: Final = "metadata.json"
_NEEDED: Final = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "multi_latent_attention": False,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "rotary_interleaved": False,
    "layernorm_zero_centered_gamma": False,
    "apply_layernorm_1p": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "mtp_num_layers": None,
    "attention_output_gate": False,
    "softmax_type": "vanilla",
    "rotary_seq_len_interpolation_factor": None,
}
"""Training arguments that such a decoder has one value of."""


def is_torch_dist(folder: Path) -> bool:
    """Says whether a folder is one of megatron's, of a whole run or of one iteration."""
    return (folder / _TRACKER).exists() or (folder / _METADATA).exists()


class TorchDistFolder:
    """A checkpoint of a GPTModel, its arguments read and checked.

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
        model_class: "ModelClass" = "gpt",
    ) -> Any:  # Any: GPTModel is untyped
        """Builds the model, as `build_gpt` does, and loads its weights.

        Raises: ModelFileError when weights are missing or of other shapes.
        """
        from megatron.core import dist_checkpointing

        from megallm.models.gpt import unfilled

        if model_class != "gpt":
            raise UnsupportedModelError(
                f"model_class is {model_class!r}: {self._folder} holds a GPTModel; use model_class='gpt'"
            )
        model = unfilled(self._size, dtype=dtype, device=device)
        bar.say("reading weights")
        metadata = self._common.get("content_metadata")
        wanted = {"model": model.sharded_state_dict(metadata=metadata)}
        try:
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


def hyperparameters_of(arguments: Settings) -> Hyperparameters:
    """Gives the numbers that training arguments call for.

    Raises: UnsupportedModelError naming an argument that such a decoder has not.
    """
    for name, needed in _NEEDED.items():
        found = arguments.values.get(name, needed)
        if found != needed:
            raise UnsupportedModelError(
                f"{arguments.name_of(name)} is {found!r}, supported is {needed!r}; build the megatron-core "
                "model yourself and pass it to MegatronLLM"
            )
    num_heads = arguments.value("num_attention_heads", int)
    hidden_size = arguments.value("hidden_size", int)
    num_layers = arguments.value("num_layers", int)
    head_dim = arguments.value_or("kv_channels", hidden_size // max(num_heads, 1))
    is_grouped = arguments.value_or("group_query_attention", False)
    percent = arguments.value_or("rotary_percent", 1.0)
    has_bias = arguments.value_or("add_bias_linear", False)
    size = Hyperparameters(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=arguments.value("num_query_groups", int) if is_grouped else num_heads,
        head_dim=head_dim,
        ffn_size=arguments.value("ffn_hidden_size", int),
        vocab_size=arguments.value("padded_vocab_size", int),
        max_positions=arguments.value("max_position_embeddings", int),
        rotary_base=arguments.value_or("rotary_base", 10_000.0),
        norm_epsilon=arguments.value_or("norm_epsilon", 1e-5),
        is_tied=not arguments.value_or("untie_embeddings_and_output_weights", False),
        rotary_dim=None if percent == 1.0 else int(head_dim * percent),
        rope_scaling=_scaling(arguments),
        unturned_layers=_marked(arguments, "no_rope_freq", num_layers),
        has_qkv_bias=has_bias or arguments.value_or("add_qkv_bias", False),
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
        has_qk_norm=arguments.value_or("qk_layernorm", False),
        experts=_experts(arguments, num_layers),
        **_window(arguments, num_layers),
    )
    size.check(arguments.path)
    return size


def _scaling(arguments: Settings) -> RopeScaling | None:
    """Gives megatron's --use-rope-scaling, whose other numbers are fixed."""
    if not arguments.value_or("use_rope_scaling", False):
        return None
    factor = arguments.value_or("rope_scaling_factor", 8.0)
    return RopeScaling(kind="llama3", factor=factor, original_positions=8192)


def _window(arguments: Settings, num_layers: int) -> dict[str, Any]:  # Any: fields of Hyperparameters
    if not arguments.has("window_size"):
        return {}
    before, after = arguments.values["window_size"]
    if after > 0 or before < 0:
        raise UnsupportedModelError(
            f"{arguments.name_of('window_size')} is {(before, after)}, supported is one that looks back alone"
        )
    if arguments.has("window_attn_skip_freq"):
        found = arguments.values["window_attn_skip_freq"]
        # a number n leaves each n-th layer without a window; a list marks the layers that have one
        layers = [layer for layer in range(num_layers) if _is_windowed(found, layer)]
    else:
        layers = list(range(num_layers))
    return {"window": before, "windowed_layers": tuple(layers)}


def _is_windowed(skip: Any, layer: int) -> bool:  # Any: a number, or a list of marks
    return bool(skip[layer]) if isinstance(skip, list) else (layer + 1) % skip != 0


def _marked(arguments: Settings, name: str, num_layers: int) -> tuple[int, ...]:
    """Gives the layers that an argument marks: a list of ones and zeros, or each n-th."""
    found = arguments.values.get(name)
    if not found:
        return ()
    marks = (
        found if isinstance(found, list) else [int((layer + 1) % found == 0) for layer in range(num_layers)]
    )
    return tuple(layer for layer, mark in enumerate(marks) if mark)


def _experts(arguments: Settings, num_layers: int) -> Experts | None:
    if not arguments.has("num_experts"):
        return None
    pattern = arguments.values.get("moe_layer_freq", 1)
    if not isinstance(pattern, int | list):
        raise UnsupportedModelError(
            f"{arguments.name_of('moe_layer_freq')} is {pattern!r}, supported is a number or a list"
        )
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(num_layers)]
    return Experts(
        num_experts=arguments.value("num_experts", int),
        num_chosen=arguments.value_or("moe_router_topk", 2),
        ffn_size=arguments.value_or("moe_ffn_hidden_size", arguments.value("ffn_hidden_size", int)),
        is_renormalised=not arguments.value_or("moe_router_pre_softmax", False),
        dense_layers=tuple(layer for layer, mark in enumerate(pattern) if not int(mark)),
    )
