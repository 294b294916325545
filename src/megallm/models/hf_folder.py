"""A Hugging Face folder as a checkpoint: config.json, safetensors in one file or in shards, a tokenizer.

Knows the folder's files and how tensors are found in them; what a family's config and names are is in
hf_families.py. Opening it reads headers alone.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.base_tokenizer import ModelTokenizer
from megallm.models.checkpoint import Hyperparameters, TensorSpec, tensor_specs
from megallm.models.hf_config import hyperparameters
from megallm.models.hf_families import Family, family_of
from megallm.models.hf_tokenizer import build_tokenizer
from megallm.models.safetensors_file import SafetensorsFile
from megallm.models.settings_file import Settings

if TYPE_CHECKING:
    import torch

CONFIG: Final = "config.json"
_WHOLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_NAMES_SHOWN: Final = 3


class _Place(Struct, frozen=True):
    """Rows of a stored tensor."""

    stored: str
    first: int
    num_rows: int


class HfFolder:
    """A folder, checked to hold exactly the tensors its config calls for, in files that are whole.

    Raises: UnsupportedModelError for another architecture, or for parts its family has not; ModelFileError
    for a damaged or incomplete folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        settings = Settings.read(folder / CONFIG)
        family = family_of(settings)
        self._size = hyperparameters(settings, family)
        self._places, self._shapes = _placed(self._size, family)
        self._files = _files(folder)
        self._check_tensors()

    @property
    def path(self) -> Path:
        """Gives the folder's path."""
        return self._folder

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Gives the decoder's numbers."""
        return self._size

    def read(self, name: str) -> "torch.Tensor":
        """Gives one tensor of `tensor_specs` in the dtype it is stored in; nothing else is read."""
        place = self._places[name]
        return self._files[place.stored].read(place.stored, place.first, place.num_rows)

    def tokenizer(self) -> ModelTokenizer:
        """Builds the tokenizer from the folder's files.

        Raises: ModelFileError when there is none, or when its vocabulary is larger than the model's.
        """
        return build_tokenizer(self._folder, model_vocab_size=self._size.vocab_size)

    def _check_tensors(self) -> None:
        missing = sorted(self._shapes.keys() - self._files.keys())
        if missing:
            raise ModelFileError(
                f"{self._folder} has no tensor {_some(missing)}, which its {CONFIG} calls for; the folder is "
                "incomplete, fetch it again"
            )
        unknown = sorted(
            name for name in self._files.keys() - self._shapes.keys() if not self._is_spare(name)
        )
        if unknown:
            raise UnsupportedModelError(
                f"{self._folder} has tensor {_some(unknown)}, for which its {CONFIG} names no use; a model "
                "of other parts would be loaded wrong"
            )
        for name, shape in self._shapes.items():
            file = self._files[name]
            found = file.tensors[name].shape
            if found != shape:
                raise ModelFileError(
                    f"{file.path}: tensor {name} has shape {found}, {CONFIG} calls for {shape}; the folder "
                    "is damaged, fetch it again"
                )

    def _is_spare(self, name: str) -> bool:
        """Says whether a tensor is a copy of what the model has anyway."""
        is_tied_copy = name == "lm_head.weight" and self._size.is_tied
        return is_tied_copy or name.endswith(".rotary_emb.inv_freq")


def _some(names: list[str]) -> str:
    """Gives the first names of a list, and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _placed(size: Hyperparameters, family: Family) -> tuple[dict[str, _Place], dict[str, tuple[int, ...]]]:
    """Gives where each of our tensors lies, and the shapes of the tensors that the folder has to hold."""
    places: dict[str, _Place] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    whole_of = {part: whole for whole, parts in family.stacked.items() for part in parts}
    for spec in tensor_specs(size):
        stored = _stored_name(spec, family, whole_of)
        first = shapes[stored][0] if stored in shapes else 0  # parts come in the order they are stacked in
        places[spec.name] = _Place(stored, first, spec.shape[0])
        shapes[stored] = (first + spec.shape[0], *spec.shape[1:])
    return places, shapes


def _stored_name(spec: TensorSpec, family: Family, whole_of: dict[str, str]) -> str:
    head, layers, tail = spec.name.partition(".layers.")
    layer, _, name = tail.partition(".")
    stored = f"{head}{layers}{layer}.{whole_of[name]}" if name in whole_of else spec.name
    for ours, theirs in family.renamed:
        stored = stored.replace(ours, theirs)
    return stored


def _files(folder: Path) -> dict[str, SafetensorsFile]:
    """Gives the opened file of every tensor, by the tensor's name in it."""
    if (folder / _INDEX).exists():
        return _sharded(folder)
    if not (folder / _WHOLE).exists():
        others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern))
        found = f", only {others[0]}, which may run code when it is loaded" if others else ""
        raise ModelFileError(
            f"{folder} has neither {_WHOLE} nor {_INDEX}{found}; save the model with save_pretrained of "
            "transformers, or fetch the folder again"
        )
    file = SafetensorsFile(folder / _WHOLE)
    return dict.fromkeys(file.tensors, file)


def _sharded(folder: Path) -> dict[str, SafetensorsFile]:
    index = Settings.read(folder / _INDEX)
    shard_of: dict[str, Any] = index.value("weight_map", dict)  # Any: JSON
    opened: dict[str, SafetensorsFile] = {}
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelFileError(
                f"{index.name_of('weight_map.' + name)} is {shard!r}, no name of a file beside it"
            )
        if shard not in opened:
            if not (folder / shard).exists():
                raise ModelFileError(
                    f"{folder / shard} is not there, and {_INDEX} has {name} in it; fetch that file again"
                )
            opened[shard] = SafetensorsFile(folder / shard)
        if name not in opened[shard].tensors:
            raise ModelFileError(
                f"{folder / shard} has no tensor {name}, which {_INDEX} has in it; fetch it again"
            )
    return {name: opened[shard] for name, shard in shard_of.items()}
