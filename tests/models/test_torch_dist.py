"""Megatron's distributed checkpoints: saved by megatron itself, and with one thing wrong."""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.checkpoint import Experts, Hyperparameters, RopeScaling
from megallm.models.load import load_model
from megallm.models.settings_file import Settings
from megallm.models.torch_dist import TorchDistFolder, hyperparameters_of, is_torch_dist
from tests.models.tiny_hf import change_json
from tests.models.tiny_torch_dist import ARGUMENTS, SIZE, save_run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:  # Any: megatron's model
    """Gives a run's folder with one iteration of a bfloat16 model, and the model."""
    run = tmp_path_factory.mktemp("run")
    return run, save_run(run)


@pytest.fixture
def copied(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """Gives a copy of the run that a test may damage."""
    return shutil.copytree(saved[0], tmp_path / "run")


def test_a_saved_model_comes_back_in_the_asked_dtype_with_its_tokenizer(saved: tuple[Path, Any]) -> None:
    """A run's own format, without a conversion: what was trained is what is served."""
    run, theirs = saved
    for source in (run, run / "iter_0000005"):
        model, tokenizer = load_model(source, dtype=torch.float32, device="cpu")
        assert tokenizer.vocab_size == SIZE.vocab_size
        found, wanted = dict(model.named_parameters()), dict(theirs.named_parameters())
        assert found.keys() == wanted.keys()
        for name, parameter in found.items():
            assert parameter.dtype is torch.float32
            assert not parameter.requires_grad
            assert torch.equal(parameter, wanted[name].float()), name


def test_the_arguments_say_what_the_model_is(saved: tuple[Path, Any]) -> None:
    """The tensors alone do not: neither heads nor the rotary base can be seen in a shape."""
    assert is_torch_dist(saved[0])
    assert TorchDistFolder(saved[0]).hyperparameters == SIZE


def read(**changes: Any) -> Hyperparameters:  # Any: as ARGUMENTS
    """Gives the hyperparameters of changed arguments."""
    return hyperparameters_of(Settings(Path("run"), ARGUMENTS | changes, "args."))


def test_arguments_of_every_kind_are_taken() -> None:
    """Each of them changes the output and none the shape of a tensor, or only some."""
    assert read(group_query_attention=False).num_kv_heads == SIZE.num_heads
    assert read(untie_embeddings_and_output_weights=False).is_tied
    assert read(rotary_percent=0.5).rotary_dim == SIZE.head_dim // 2
    assert read(use_rope_scaling=True, rope_scaling_factor=32).rope_scaling == RopeScaling(
        kind="llama3", factor=32.0, original_positions=8192
    )
    assert read(no_rope_freq=2).unturned_layers == (1,)
    assert read(no_rope_freq=[1, 0]).unturned_layers == (0,)
    assert read(window_size=(7, 0)).windowed_layers == (0, 1)
    assert read(window_size=(7, 0), window_attn_skip_freq=2).windowed_layers == (0,)
    assert read(window_size=(7, 0), window_attn_skip_freq=[0, 1]).windowed_layers == (1,)
    assert read(add_bias_linear=True).has_mlp_bias
    assert read(add_qkv_bias=True).has_qkv_bias
    experts = Experts(num_experts=4, num_chosen=2, ffn_size=24, is_renormalised=False, dense_layers=(0,))
    moe = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_router_pre_softmax": True}
    assert read(**moe, moe_layer_freq=[0, 1]).experts == experts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalization", "LayerNorm"),
        ("swiglu", False),
        ("position_embedding_type", "learned_absolute"),
        ("multi_latent_attention", True),
        ("hybrid_layer_pattern", "M-M-"),
        ("mtp_num_layers", 1),
        ("window_size", (4, 4)),
    ],
)
def test_a_model_of_other_parts_is_refused_by_its_argument(name: str, value: object) -> None:
    """Half of them would load and answer nonsense."""
    with pytest.raises(UnsupportedModelError, match=rf"run: args\.{name} is .*supported is"):
        read(**{name: value})


def test_a_folder_without_the_iteration_its_tracker_names_is_refused(copied: Path) -> None:
    """A copy that stopped half-way leaves one."""
    (copied / "latest_checkpointed_iteration.txt").write_text("6", encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"iter_0000006.metadata\.json is not there, and latest_"):
        load_model(copied)
    (copied / "latest_checkpointed_iteration.txt").write_text("six", encoding="utf-8")
    with pytest.raises(ModelFileError, match="says 'six', neither a number nor 'release'"):
        load_model(copied)


def test_a_missing_or_truncated_file_is_refused_with_the_folder(copied: Path) -> None:
    """Weights left as they were allocated are whatever the memory held."""
    shard = copied / "iter_0000005" / "__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFileError, match="iter_0000005"):
        load_model(copied, device="cpu")
    shard.unlink()
    with pytest.raises(ModelFileError, match="iter_0000005"):
        load_model(copied, device="cpu")


def test_another_format_is_refused_with_the_remedy(copied: Path) -> None:
    """The older zarr format has the same files beside it."""
    change_json(copied / "iter_0000005" / "metadata.json", lambda it: it.update(sharded_backend="zarr"))
    with pytest.raises(UnsupportedModelError, match=r"sharded_backend is 'zarr', supported is torch_dist"):
        load_model(copied)
