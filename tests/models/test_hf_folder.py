"""Hugging Face folders: in shards, with spare tensors, and with one thing wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.hf_folder import HfFolder
from tests.models.tiny_hf import change_config, change_json, hf_model, save

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Gives a sound folder of one file."""
    return save(hf_model("llama"), tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Gives a sound folder of several files."""
    return save(hf_model("llama"), tmp_path, max_shard_size="40KB")


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Changes tensors of a folder of one file; None takes one out."""
    path = folder / "model.safetensors"
    tensors: dict[str, Any] = load_file(path) | changes
    save_file({name: values for name, values in tensors.items() if values is not None}, path)


def test_shards_are_read_as_one_model(sharded: Path) -> None:
    """Every model of more than a few gigabytes comes in shards."""
    model = hf_model("llama")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    checkpoint = HfFolder(sharded)
    for name, values in model.state_dict().items():
        assert torch.equal(checkpoint.read(name), values), name


def test_a_layer_that_guesses_ahead_is_left_unread(tmp_path: Path) -> None:
    """GLM-4.5's folders have one more than the decoder; any other layer is still one too many."""
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1}
    folder = save(hf_model("glm4_moe", num_hidden_layers=2, head_dim=8, **sizes), tmp_path)
    change_tensors(folder, **{"model.layers.2.eh_proj.weight": torch.zeros(2)})
    assert HfFolder(folder).hyperparameters.num_layers == 2
    change_tensors(folder, **{"model.layers.3.eh_proj.weight": torch.zeros(2)})
    with pytest.raises(UnsupportedModelError, match=r"has tensor model\.layers\.3\.eh_proj"):
        HfFolder(folder)


def test_one_tensor_of_a_stack_is_read_alone(tmp_path: Path) -> None:
    """Phi-3's joint projection is a gigabyte at 14B; a third of it is asked for."""
    model = hf_model("phi3")
    checkpoint = HfFolder(save(model, tmp_path))
    joint = model.state_dict()["model.layers.1.self_attn.qkv_proj.weight"]
    query, key, value = joint.split([32, 16, 16])
    for name, rows in (("q", query), ("k", key), ("v", value)):
        assert torch.equal(checkpoint.read(f"model.layers.1.self_attn.{name}_proj.weight"), rows)


def test_a_rank_s_rows_and_columns_are_read_of_a_stack_and_of_a_tensor(tmp_path: Path) -> None:
    """Rows count from the start of the asked tensor, which in a stack begins further down."""
    model = hf_model("phi3")
    checkpoint = HfFolder(save(model, tmp_path))
    tensors = model.state_dict()
    up = tensors["model.layers.1.mlp.gate_up_proj.weight"][48:]
    down = tensors["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(checkpoint.read("model.layers.1.mlp.up_proj.weight", rows=range(24, 48)), up[24:])
    assert torch.equal(
        checkpoint.read("model.layers.1.mlp.down_proj.weight", columns=range(16, 32)), down[:, 16:32]
    )


def test_copies_of_what_the_model_has_anyway_are_passed_over(tmp_path: Path) -> None:
    """Old folders hold the rotary frequencies, and some a tied output projection."""
    folder = save(hf_model("llama", tie_word_embeddings=True), tmp_path)
    change_tensors(
        folder,
        **{
            "lm_head.weight": torch.zeros(272, 32),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        },
    )
    assert HfFolder(folder).hyperparameters.is_tied


def test_a_missing_shard_is_named(sharded: Path) -> None:
    """A download that broke off is the most common fault of all."""
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelFileError, match=rf"{shard.name} is not there, and {INDEX} has .* in it"):
        HfFolder(sharded)


def test_a_truncated_shard_is_named_with_the_tensor_that_is_cut(sharded: Path) -> None:
    """So that one file is fetched again instead of all."""
    shard = min(sharded.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=rf"{shard.name} is truncated: .* tensor .* ends at"):
        HfFolder(sharded)


def test_an_index_of_another_download_is_refused(sharded: Path) -> None:
    """Mixed downloads of two versions of a model load without a word otherwise."""
    first = min(sharded.glob("model-*.safetensors")).name
    change_json(sharded / INDEX, lambda index: index["weight_map"].update({NORM: first}))
    with pytest.raises(ModelFileError, match=rf"{first} has no tensor model\.norm\.weight, which {INDEX}"):
        HfFolder(sharded)
    change_json(sharded / INDEX, lambda index: index["weight_map"].update({NORM: "../elsewhere"}))
    with pytest.raises(ModelFileError, match=r"weight_map\.model\.norm\.weight is '\.\./elsewhere'"):
        HfFolder(sharded)


def test_an_absent_tensor_is_named(folder: Path) -> None:
    """Left as it was allocated it would be whatever the memory held."""
    change_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": None, NORM: None})
    with pytest.raises(
        ModelFileError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight, model\.norm"
    ):
        HfFolder(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    """A config of another size of the same model."""
    change_config(folder, intermediate_size=64)
    with pytest.raises(ModelFileError, match=r"mlp\.gate_proj\.weight has shape \(48, 32\), .* \(64, 32\)"):
        HfFolder(folder)


def test_a_tensor_that_nothing_asks_for_is_refused(folder: Path) -> None:
    """An adapter or a bias left out changes every answer."""
    change_tensors(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    with pytest.raises(
        UnsupportedModelError, match=r"has tensor model\.layers\.0\.self_attn\.q_proj\.bias, for"
    ):
        HfFolder(folder)


def test_a_tensor_of_whole_numbers_is_refused_before_any_is_read(folder: Path) -> None:
    """Quantised weights need their scales; as numbers they are noise."""
    change_tensors(folder, **{NORM: torch.ones(32, dtype=torch.int8)})
    with pytest.raises(
        UnsupportedModelError, match=r"model\.safetensors: tensor model\.norm\.weight is stored as I8"
    ):
        HfFolder(folder)


def test_weights_that_may_run_code_are_refused_with_the_remedy(folder: Path) -> None:
    """A pickle is a program."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ModelFileError, match=r"only pytorch_model\.bin, which may run code .* save_pretrained"
    ):
        HfFolder(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    """A clone without its large files."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"has neither model\.safetensors nor"):
        HfFolder(folder)
    (folder / "model.safetensors").write_text("version https://git-lfs", encoding="utf-8")
    with pytest.raises(ModelFileError, match="is no safetensors file, or truncated"):
        HfFolder(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"architectures": ["Gpt5ForCausalLM"]}'])
def test_a_config_that_says_nothing_known_is_refused_with_its_path(folder: Path, content: str) -> None:
    """The one file that everything else is read by."""
    (folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises((ModelFileError, UnsupportedModelError), match=r"config\.json"):
        HfFolder(folder)


def test_opening_reads_no_weights(folder: Path) -> None:
    """What a folder holds is known in a moment, however large it is."""
    path = folder / "model.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    zeroed = path.read_bytes()[: 8 + length] + bytes(len(path.read_bytes()) - 8 - length)
    path.write_bytes(zeroed)
    checkpoint = HfFolder(folder)
    assert NORM in header
    assert not checkpoint.read(NORM).any()
