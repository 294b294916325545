"""Models that two ranks load in parts, started as torchrun does: the same logits as of the whole.

One pair of processes makes all the checks of its program, `loaded_parts.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megallm import load_model
from tests.models.plain_forward import plain_logits
from tests.models.tiny_gguf import write_tiny
from tests.models.tiny_hf import PROMPT, hf_continuation, hf_logits, hf_model, save
from tests.models.tiny_torch_dist import save_run
from tests.ranks.processes import Ranks

MODELS: dict[str, Any] = {  # Any: settings of transformers
    # 271 tokens: two ranks have 256 rows each
    "llama": {"num_hidden_layers": 2, "vocab_size": 271, "attention_bias": True, "mlp_bias": True},
    "tied": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "single": {"num_key_value_heads": 1},
}
FAMILIES = {"llama": "llama", "tied": "qwen3", "mixtral": "mixtral", "single": "llama"}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:  # Any: transformers' models
    """Gives whole models by name."""
    return {name: hf_model(FAMILIES[name], **settings) for name, settings in MODELS.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gives a run that one rank has saved."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    folder.mkdir()
    save_run(folder)
    return folder


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gives a file whose blocks are quantised."""
    path = tmp_path_factory.mktemp("file") / "tiny.gguf"
    write_tiny(path, "Q8_0")
    return path


@pytest.fixture(scope="module")
def reports(
    rank_processes: Ranks,
    models: dict[str, Any],
    run: Path,
    gguf: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """Gives what each rank saw, by rank."""
    folders = [save(model, tmp_path_factory.mktemp("folder") / name) for name, model in models.items()]
    arguments = [str(path) for path in (*folders, run, gguf)]
    with rank_processes.running("tests.ranks.loaded_parts", 2, *arguments) as processes:
        return [process.report() for process in processes]


def test_the_parts_of_a_folder_give_the_whole_s_logits(
    reports: list[dict[str, Any]], models: dict[str, Any]
) -> None:
    """Split by heads, layers, experts and the rows of an expert; each the way it is laid out for megatron."""
    for name in ("llama tp", "llama hybrid pp", "tied pp", "mixtral tp", "mixtral ep", "mixtral pp"):
        family = name.partition(" ")[0]
        expected = hf_logits(models[family], PROMPT)
        found = torch.tensor(reports[1][name])[:, : expected.shape[1]]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, msg=name)


def test_greedy_ids_through_the_engine_are_those_of_the_whole(
    reports: list[dict[str, Any]], models: dict[str, Any]
) -> None:
    """With a vocabulary that is padded: no id beyond it may be sampled, or be as likely as a token."""
    for name in ("llama", "tied", "mixtral"):  # split by tensors, by stages, by experts
        assert reports[0][f"{name} ids"] == hf_continuation(models[name], PROMPT, 8), name
    assert reports[0]["rows"] == [256, 271]
    padding: Tensor = torch.tensor(reports[0]["llama tp"])[:, 271:]
    assert padding.shape == (len(PROMPT), 512 - 271)
    assert not padding.any()


def test_files_of_other_kinds_load_over_several_ranks(
    reports: list[dict[str, Any]], run: Path, gguf: Path
) -> None:
    """Runs are saved on other numbers of ranks than they are served on: here on one."""
    for source, name in ((run, "run tp"), (run, "run pp"), (gguf, "gguf tp")):
        whole, _ = load_model(source, device="cpu", dtype="float32")
        expected = plain_logits(whole, PROMPT)
        torch.testing.assert_close(torch.tensor(reports[1][name]), expected, atol=1e-4, rtol=0, msg=name)


def test_process_groups_are_set_up_with_the_asked_sizes(reports: list[dict[str, Any]]) -> None:
    """What does not fit is refused before that, on every rank alike; what is set up is not changed."""
    for report in reports:
        assert report["untouched"]
        assert report["backend"] == "gloo"
        assert report["world"].startswith(
            "ValueError: tp=4, pp=1 and ep=1 need a multiple of 4 processes, and"
        )
        assert report["heads"] == (
            "ValueError: tp is 2 and does not divide the model's 1 KV groups; it can be 1"
        )
        assert report["differs"] == (
            "ValueError: pp is 2, and megatron's parallel state is set up with 1; leave pp out, or set the "
            "parallel state up with 2"
        )
