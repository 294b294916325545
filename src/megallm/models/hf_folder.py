"""A Hugging Face folder as a checkpoint: config.json, safetensors in one file or in shards, a tokenizer.

Knows the folder's files and how tensors are found in them; what a family's config and names are is in
hf_families.py. Opening it reads headers alone.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from msgspec.structs import replace

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.base_tokenizer import ModelTokenizer
from megallm.models.checkpoint import Hyperparameters, TensorSpec, tensor_specs
from megallm.models.hf_config import hyperparameters
from megallm.models.hf_families import Family, family_of
from megallm.models.hf_joint_experts import JointPlace, joint_place
from megallm.models.hf_quantised import (
    SCALED,
    blocks_of,
    check_scales,
    dequantised,
    refuse_packed,
    scale_name,
)
from megallm.models.hf_tokenizer import build_tokenizer
from megallm.models.safetensors_file import SafetensorsFile
from megallm.models.settings_file import Settings

if TYPE_CHECKING:
    import torch

CONFIG: Final = "config.json"
_WHOLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_OUTPUT: Final = "lm_head.weight"
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
        self._family = family
        self._blocks = blocks_of(settings)
        self._size = hyperparameters(settings, family)
        self._files = _files(folder)
        if family.part is not None:  # such configs say it in two places, and not always the same
            is_tied = family.prefix + _OUTPUT not in self._files
            self._size = replace(self._size, is_tied=is_tied)
        self._places, self._shapes = _placed(self._size, family)
        self._check_tensors()

    @property
    def path(self) -> Path:
        """Gives the folder's path."""
        return self._folder

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Gives the decoder's numbers."""
        return self._size

    def read(self, name: str, *, rows: range | None = None, columns: range | None = None) -> "torch.Tensor":
        """Gives one tensor of `tensor_specs`, or a part, in the dtype it is stored in; see Checkpoint.

        One that is stored with scales comes in float32.
        """
        place = self._places[name]
        if isinstance(place, JointPlace):
            values = self._files[place.stored].read(place.stored, rows=place.rows)
            return place.cut(values, rows=rows, columns=columns)
        within = range(place.num_rows) if rows is None else rows
        stored = range(place.first + within.start, place.first + within.stop)
        values = self._files[place.stored].read(place.stored, rows=stored, columns=columns)
        if self._blocks is None or not self._is_scaled(place.stored):
            return values
        scales = self._files[scale_name(place.stored)].read(scale_name(place.stored))
        first_column = 0 if columns is None else columns.start
        return dequantised(values, scales, self._blocks, first_row=stored.start, first_column=first_column)

    def tokenizer(self) -> ModelTokenizer:
        """Builds the tokenizer from the folder's files.

        Raises: ModelFileError when there is none, or when its vocabulary is larger than the model's.
        """
        return build_tokenizer(self._folder, model_vocab_size=self._size.vocab_size)

    def _check_tensors(self) -> None:
        missing = sorted(self._shapes.keys() - self._files.keys())
        if missing:
            refuse_packed(self._folder, sorted(self._files))
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
            if self._is_scaled(name):
                check_scales(file, name, self._files.get(scale_name(name)), self._blocks)
            else:
                file.check_readable(name)

    def _is_scaled(self, name: str) -> bool:
        return name in self._files and self._files[name].tensors[name].kind == SCALED

    def _is_spare(self, name: str) -> bool:
        """Says whether a tensor copies what the model has anyway, scales another, or is not its decoder's."""
        scaled = name.removesuffix(scale_name(""))
        if scaled != name and self._is_scaled(scaled):
            return True
        unread = tuple(start.format(num_layers=self._size.num_layers) for start in self._family.unread)
        is_tied_copy = self._size.is_tied and name == _OUTPUT
        return is_tied_copy or name.endswith(".rotary_emb.inv_freq") or name.startswith(unread)


def _some(names: list[str]) -> str:
    """Gives the first names of a list, and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _placed(
    size: Hyperparameters, family: Family
) -> tuple[dict[str, _Place | JointPlace], dict[str, tuple[int, ...]]]:
    """Gives where each of our tensors lies, and the shapes of the tensors that the folder has to hold."""
    places: dict[str, _Place | JointPlace] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    whole_of = {part: whole for whole, parts in family.stacked.items() for part in parts}
    num_joint = size.experts.num_experts if size.experts is not None and family.has_joint_experts else 0
    for spec in tensor_specs(size):
        joint = joint_place(spec, num_joint) if num_joint else None
        if joint is not None:
            places[spec.name], shapes[joint[0].stored] = joint
            continue
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
    return family.prefix + stored


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
