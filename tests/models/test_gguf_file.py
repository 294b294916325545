"""Reading the GGUF format."""
# gguf is partly untyped:
# pyright: reportUnknownMemberType=false

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.gguf_file import GgufFile
from tests.models.tiny_gguf import FORMATS, tiny_metadata, write_gguf, write_tiny


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Gives the path of a sound file."""
    write_tiny(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_every_type_of_metadata_comes_back_as_written(tmp_path: Path) -> None:
    """Converters choose integer widths freely, so each must be read."""
    writer = gguf.GGUFWriter(tmp_path / "typed.gguf", "llama")
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"u{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"i{bits}", -(2 ** (bits - 1)))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "漢字")
    writer.add_array("texts", ["a", "", "é"])
    writer.add_array("numbers", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile(tmp_path / "typed.gguf").metadata
    assert {key: found[key] for key in found if key[0] in "ui"} == {
        f"{sign}{bits}": 2**bits - 1 if sign == "u" else -(2 ** (bits - 1))
        for bits in (8, 16, 32, 64)
        for sign in "ui"
    }
    assert (found["f32"], found["f64"], found["yes"], found["text"]) == (0.5, 0.1, True, "漢字")
    assert (found["texts"], found["numbers"]) == (["a", "", "é"], [1, -2, 3])


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_tensors_are_dequantised_to_float32(tmp_path: Path, stored: str) -> None:
    """A wrong row length or offset shows as noise in every value."""
    values = np.linspace(-1, 1, 5 * 64, dtype=np.float32).reshape(5, 64)
    path = write_gguf(tmp_path / "one.gguf", tiny_metadata(), {"first": values[0], "second": values}, stored)
    file = GgufFile(path)
    assert file.tensors["second"].kind.name == stored
    error = {"F32": 0.0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 4e-3, "Q4_0": 0.15, "Q4_1": 0.1}[stored]
    np.testing.assert_allclose(file.read("second"), values, atol=error)
    np.testing.assert_array_equal(file.read("first"), values[0])


@pytest.mark.parametrize("stored", FORMATS)
def test_every_format_gives_what_the_gguf_package_makes_of_its_bytes(tmp_path: Path, stored: str) -> None:
    """Files that people fetch mix several; a row of the wrong length is noise in every one of them."""
    values = np.linspace(-1, 1, 3 * 512, dtype=np.float32).reshape(3, 512)
    path = write_gguf(tmp_path / "one.gguf", tiny_metadata(), {"before": values, "it": values * 2}, stored)
    file, judge = GgufFile(path), {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in ("before", "it"):
        assert (file.tensors[name].kind.name, file.tensors[name].shape) == (stored, (3, 512))
        wanted = gguf.quants.dequantize(judge[name].data, judge[name].tensor_type)
        assert wanted.std() > 0
        found = file.read(name)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted)


def test_a_tensor_is_the_reader_s_own_memory(path: Path) -> None:
    """The caller hands it to torch, which refuses memory that can't be written, and may change it."""
    file = GgufFile(path)
    tensor = file.read("output_norm.weight")
    before = tensor.copy()
    tensor += 1
    np.testing.assert_array_equal(file.read("output_norm.weight"), before)


def test_header_agrees_with_the_gguf_package(path: Path) -> None:
    """The header is read by our own code; the format's own package is the judge."""
    file, judge = GgufFile(path), gguf.GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in judge.tensors]
    for tensor in judge.tensors:
        entry = file.tensors[tensor.name]
        assert (entry.start, entry.num_bytes) == (int(tensor.data_offset), int(tensor.n_bytes))
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
    ours = {key: value for key, value in file.metadata.items() if value != []}
    assert ours == {key: judge.fields[key].contents() for key in ours}


def test_a_file_cut_anywhere_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    """A download that broke off must never load as a model with garbage at its end."""
    whole = path.read_bytes()
    for length in (0, 1, 3, 6, 12, 30, 100, 1_000, 4_000, len(whole) // 2, len(whole) - 33):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            GgufFile(cut)


def test_other_files_are_refused(path: Path, tmp_path: Path) -> None:
    """Giving the wrong file is the commonest mistake, so the message says what was found."""
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelFileError, match=r"starts with b'PK.* give a GGUF file"):
        GgufFile(other)
    newer = bytearray(path.read_bytes())
    newer[4] = 9
    other.write_bytes(newer)
    with pytest.raises(ModelFileError, match=r"version 9 .*supported are \(2, 3\)"):
        GgufFile(other)
    with pytest.raises(ModelFileError, match=r"absent\.gguf can't be read"):
        GgufFile(tmp_path / "absent.gguf")


def test_a_header_with_absurd_counts_ends_at_once(path: Path, tmp_path: Path) -> None:
    """A damaged count must not become an allocation of its size."""
    absurd = bytearray(path.read_bytes())
    absurd[16:24] = (2**62).to_bytes(8, "little")
    damaged = tmp_path / "absurd.gguf"
    damaged.write_bytes(absurd)
    with pytest.raises(ModelFileError, match=r"absurd\.gguf"):
        GgufFile(damaged)


def test_a_missing_or_mistyped_value_names_file_and_key(path: Path) -> None:
    """The message is all a user has to tell a bad conversion from a bad reader."""
    file = GgufFile(path)
    with pytest.raises(ModelFileError, match=r"tiny\.gguf has no metadata llama\.nothing"):
        file.value("llama.nothing", int)
    with pytest.raises(ModelFileError, match=r"llama\.block_count is int 2, str is needed"):
        file.value("llama.block_count", str)
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.tokens is no array of int"):
        file.list_of("tokenizer.ggml.tokens", int)
    assert file.value_or("llama.nothing", 7) == 7


def test_a_format_that_cant_be_dequantised_is_named(tmp_path: Path) -> None:
    """Integer tensors exist in GGUF and are no weights."""
    writer = gguf.GGUFWriter(tmp_path / "int.gguf", "llama")
    writer.add_tensor("ids", np.arange(8, dtype=np.int32).reshape(2, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "int.gguf")
    for refused in (file.check_readable, file.read):
        with pytest.raises(
            UnsupportedModelError,
            match=r"int\.gguf: tensor ids is stored as I32, .* use a file .* F32, .*Q4_K",
        ):
            refused("ids")


def test_a_format_newer_than_the_gguf_package_is_named_with_the_remedy(tmp_path: Path) -> None:
    """llama.cpp adds a format every few months, and the package follows."""
    path = write_gguf(tmp_path / "new.gguf", {"general.architecture": "llama"}, {"w": np.ones(8, np.float32)})
    at = path.read_bytes().index(b"w" + (1).to_bytes(4, "little") + (8).to_bytes(8, "little")) + 13
    path.write_bytes(path.read_bytes()[:at] + (99).to_bytes(4, "little") + path.read_bytes()[at + 4 :])
    with pytest.raises(
        UnsupportedModelError, match=r"new\.gguf: tensor w is stored in format 99, .* install a newer gguf"
    ):
        GgufFile(path)


def test_k_quants_are_read_by_the_formulas_of_their_blocks(tmp_path: Path) -> None:
    """Most files that people fetch are of these; no library at hand writes them, so the blocks are random."""
    rng = np.random.default_rng(5)
    blocks = {
        "Q4_K": rng.integers(0, 256, (3, 144), np.uint8),
        "Q6_K": rng.integers(0, 256, (3, 210), np.uint8),
    }
    blocks["Q4_K"][:, :4] = np.array([0.5, 0.25], np.float16).view(np.uint8)
    blocks["Q6_K"][:, -2:] = np.array([0.5], np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    for name, stored in blocks.items():
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "k.gguf")
    for name, formula in (("Q4_K", q4_k), ("Q6_K", q6_k)):
        assert file.tensors[name].shape == (3, 256)
        wanted = np.stack([formula(block.astype(np.int64)) for block in blocks[name]])
        np.testing.assert_allclose(file.read(name), wanted, rtol=1e-6)


def q4_k(block: NDArray[np.int64]) -> NDArray[np.float64]:
    """Gives the 256 weights of a block: eight groups of 32, each with a scale and a minimum of six bits."""
    packed, nibbles = block[4:16], block[16:].reshape(4, 32)
    values: list[NDArray[np.float64]] = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        four_bits = nibbles[group // 2] >> 4 * (group % 2) & 15
        values.append(0.5 * scale * four_bits - 0.25 * minimum)
    return np.concatenate(values)


def q6_k(block: NDArray[np.int64]) -> NDArray[np.float64]:
    """Gives the 256 weights of a block: four low bits and two high ones each, a signed scale for 16."""
    low, high = block[:128].reshape(2, 2, 32), block[128:192].reshape(2, 32)
    scales = block[192:208].astype(np.int8).reshape(2, 4, 2).repeat(16, axis=2)
    values: list[NDArray[np.float64]] = []
    for half in range(2):
        for quarter in range(4):
            bits = low[half, quarter % 2] >> 4 * (quarter // 2) & 15 | (high[half] >> 2 * quarter & 3) << 4
            values.append(0.5 * scales[half, quarter] * (bits - 32))
    return np.concatenate(values)
