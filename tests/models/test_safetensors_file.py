"""The safetensors format: against the library's own writer, and damaged."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megallm.core_async.errors import ModelFileError
from megallm.models.safetensors_file import SafetensorsFile


def test_tensors_of_every_readable_format_come_back_whole_or_by_rows(tmp_path: Path) -> None:
    """Models are stored in any of them, and stacks are read by part."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        values = torch.arange(24, dtype=torch.float32).view(6, 2, 2).to(dtype)
        save_file({"first": torch.ones(3), "values": values}, tmp_path / "a.safetensors", {"format": "pt"})
        file = SafetensorsFile(tmp_path / "a.safetensors")
        assert file.tensors.keys() == {"first", "values"}
        assert torch.equal(file.read("values"), values)
        assert torch.equal(file.read("values", rows=range(2, 5)), values[2:5])


def test_columns_are_cut_from_rows_that_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """A rank's columns of a large matrix must not cost the memory of all of them."""
    values = torch.arange(24_000_000, dtype=torch.float32).view(3, 8_000_000)  # a row is 32 MB, a read 16
    save_file({"values": values}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert torch.equal(file.read("values", columns=range(5, 4000)), values[:, 5:4000])
    assert torch.equal(
        file.read("values", rows=range(1, 3), columns=range(7_999_990, 8_000_000)), values[1:, -10:]
    )
    assert file.read("values", rows=range(3, 3)).shape == (0, 8_000_000)


def write(path: Path, header: object, content: bytes = b"") -> Path:
    """Writes a file with any header."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content)
    return path


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"{]", "header can't be read"),
        ({"a": {"dtype": "F32"}}, "header can't be read"),
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            "tensor a is F32 of shape .* fit together",
        ),
        ({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}, "tensor a is F3 of"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "tensor a is F32 of"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "is truncated: .* tensor a ends at"),
    ],
)
def test_a_damaged_header_is_refused_with_file_and_tensor(tmp_path: Path, header: object, said: str) -> None:
    """An offset taken on trust reads another tensor's bytes."""
    with pytest.raises(ModelFileError, match=rf"a\.safetensors.*{said}"):
        SafetensorsFile(write(tmp_path / "a.safetensors", header, b"1234"))


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 16, b"<html>sorry</html>"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """A web page saved under the file's name claims a header of exabytes."""
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"a\.safetensors is no safetensors file, or truncated"):
        SafetensorsFile(tmp_path / "a.safetensors")


def test_a_file_that_shrinks_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    """Somebody fetches it again meanwhile; half a tensor would be zeros or noise."""
    save_file({"values": torch.ones(100)}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-8])
    with pytest.raises(ModelFileError, match=r"a\.safetensors ended while it was read"):
        file.read("values")


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    """With its path, which an error of the system has too, and the remedy, which it has not."""
    with pytest.raises(ModelFileError, match=r"absent\.safetensors can't be read: .*; fetch it again"):
        SafetensorsFile(tmp_path / "absent.safetensors")
