"""Megatron's distributed checkpoints: saved by megatron itself, and with one thing wrong."""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.checkpoint import Experts
from megallm.models.load import load_model
from megallm.models.torch_dist import TorchDistFolder, is_torch_dist
from tests.models.engine_tokens import engine_tokens
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


MOE = Experts(num_experts=4, num_chosen=2, ffn_size=24, is_renormalised=True)
MOE_ARGUMENTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}


def of_engine(key: str) -> str:
    """Gives the name under which Transformer Engine's layers of a HybridModel hold a tensor."""
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", key)
    if layer is None:
        return key
    renamed = layer[2].replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    if "*--E*E"[int(layer[1])] == "-":
        renamed = renamed.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    return f"decoder.layers.{layer[1]}.{renamed}"


@pytest.mark.parametrize("stored_as", [str, of_engine], ids=["local layers", "Transformer Engine's names"])
def test_a_hybrid_model_comes_back_and_says_the_same(tmp_path: Path, stored_as: Callable[[str], str]) -> None:
    """What upstream trains from now on; its layers are of any kind in any order."""
    experts = msgspec.structs.replace(
        MOE, dense_layers=(0, 1, 2, 4), shared_ffn_size=48, scoring="sigmoid", share_factor=2.5
    )
    size = msgspec.structs.replace(SIZE, num_layers=6, layer_kinds="*--E*E", experts=experts)
    arguments = ARGUMENTS | MOE_ARGUMENTS | {"num_layers": 6, "hybrid_layer_pattern": "*--|E*E"}
    arguments |= {"moe_shared_expert_intermediate_size": 48, "moe_router_topk_scaling_factor": 2.5}
    arguments |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    theirs = save_run(tmp_path, size, arguments=arguments, stored_as=stored_as)
    assert TorchDistFolder(tmp_path).hyperparameters == size
    model, tokenizer = load_model(tmp_path, dtype=torch.bfloat16, device="cpu")
    assert type(model).__name__ == "HybridModel"
    wanted = theirs.state_dict()
    assert model.state_dict().keys() == wanted.keys()
    for name, values in model.state_dict().items():
        assert values is None or torch.equal(values, wanted[name]), name
    ids = engine_tokens(theirs, tokenizer, [5, 9, 200], 12)
    assert len(set(ids)) > 1
    assert engine_tokens(model, tokenizer, [5, 9, 200], 12) == ids


def test_experts_that_transformer_engine_stored_are_found(tmp_path: Path) -> None:
    """It holds the norm before experts by itself, where megatron's local layers say that it does not."""
    size = msgspec.structs.replace(SIZE, experts=MOE)
    theirs = save_run(
        tmp_path,
        size,
        arguments=ARGUMENTS | MOE_ARGUMENTS,
        stored_as=lambda key: key.replace(".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
    )
    model, _ = load_model(tmp_path, dtype=torch.bfloat16, device="cpu")
    wanted = dict(theirs.named_parameters())
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in model.named_parameters())


def test_another_class_than_was_saved_is_refused(saved: tuple[Path, Any]) -> None:
    """Its layers are counted otherwise, so the weights would go astray."""
    with pytest.raises(
        UnsupportedModelError, match=r"model_class is 'hybrid', and .* holds a GPTModel; leave"
    ):
        load_model(saved[0], device="cpu", model_class="hybrid")
