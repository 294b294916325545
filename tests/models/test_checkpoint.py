"""What a checkpoint must hold."""

from pathlib import Path

import msgspec
import pytest

from megallm.core_async.errors import ModelFileError
from megallm.models.checkpoint import tensor_specs
from tests.models.tiny_gguf import TINY


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 0), ("num_heads", 3), ("num_kv_heads", 0), ("head_dim", 15), ("ffn_size", -1)],
)
def test_impossible_numbers_are_refused_with_file_and_number(field: str, value: int) -> None:
    """A damaged header must end in one readable line, not in a reshape deep inside the model."""
    damaged = msgspec.structs.replace(TINY, **{field: value})
    with pytest.raises(ModelFileError, match=rf"model\.gguf: {field} is {value}"):
        damaged.check(Path("model.gguf"))


def test_a_tied_model_has_no_output_projection_and_an_untied_one_has() -> None:
    """The readers refuse files with more or fewer tensors than this list."""
    tied = [spec.name for spec in tensor_specs(TINY)]
    untied = [spec.name for spec in tensor_specs(msgspec.structs.replace(TINY, is_tied=False))]
    assert len(tied) == len(set(tied)) == 2 + 9 * TINY.num_layers
    assert set(untied) - set(tied) == {"lm_head.weight"}
