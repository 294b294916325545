"""`load_model`: which source, which reader, which device."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models import load_model
from megallm.models.catalog import KNOWN_MODELS, default_cache_dir, path_of
from megallm.models.load import find_file, first_step
from tests.models.engine_tokens import engine_tokens
from tests.models.plain_forward import plain_logits
from tests.models.tiny_gguf import write_tiny
from tests.models.tiny_hf import (
    PROMPT,
    VOCAB,
    YARN_ROPE,
    hf_continuation,
    hf_logits,
    hf_model,
    save,
    write_tokenizer,
)

# megatron's own modules say so to each other, at every step
pytestmark = pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")


def test_a_path_as_text_or_as_path_loads(tmp_path: Path) -> None:
    """Scripts pass what their argument parser gave them."""
    write_tiny(tmp_path / "tiny.gguf", "Q8_0")
    for source in (tmp_path / "tiny.gguf", str(tmp_path / "tiny.gguf")):
        model, tokenizer = load_model(source, device="cpu")
        assert next(model.parameters()).dtype is torch.float32
        assert tokenizer.eod == 2


def test_the_demo_model_is_what_its_name_says(demo_model: tuple[Any, Any]) -> None:
    """The fixture every engine test stands on."""
    model, tokenizer = demo_model
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert (model.config.num_layers, model.max_sequence_length) == (30, 8192)
    assert tokenizer.vocab_size == model.vocab_size == 49_152


def test_the_tokenizer_passes_for_megatron_s(demo_model: tuple[Any, Any]) -> None:
    """Code of megatron checks with isinstance in places."""
    from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

    assert isinstance(demo_model[1], MegatronTokenizerBase)


def test_a_known_name_is_taken_from_the_given_cache(tmp_path: Path) -> None:
    """Clusters share one folder of models."""
    shutil.copy(find_file("smollm2-135m"), tmp_path)
    assert find_file("smollm2-135m", tmp_path).parent == tmp_path != default_cache_dir()


def test_an_unknown_source_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    """A typing mistake in a name and a missing file look alike."""
    with pytest.raises(
        ModelFileError, match=r"'?smollm2-13b'? is neither a file nor a known model; known are smollm2"
    ):
        load_model("smollm2-13b")
    with pytest.raises(ModelFileError, match=r"absent\.gguf is neither a file"):
        load_model(tmp_path / "absent.gguf")
    assert "smollm2-135m" in KNOWN_MODELS


def test_a_folder_of_nothing_known_is_refused_with_what_is_supported(tmp_path: Path) -> None:
    """A folder one level too high is the usual mistake."""
    with pytest.raises(UnsupportedModelError, match=r"neither config\.json \(Hugging Face's\) nor latest"):
        load_model(tmp_path)


def test_a_hugging_face_folder_loads_with_its_tokenizer(tmp_path: Path) -> None:
    """What most users have."""
    model, tokenizer = load_model(save(hf_model("llama"), tmp_path), dtype="bfloat16", device="cpu")
    assert next(model.parameters()).dtype is torch.bfloat16
    assert tokenizer.tokenize("ab") == [tokenizer.vocab.index("a"), tokenizer.vocab.index("b")]


@pytest.mark.parametrize("model_class", ["gpt", "hybrid"])
def test_both_classes_of_megatron_give_the_same_logits(tmp_path: Path, model_class: Any) -> None:
    """Upstream deprecates the one and moves to the other."""
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "head_dim": 8}
    theirs = hf_model("mixtral", rope_parameters=YARN_ROPE, **settings)
    model, _ = load_model(save(theirs, tmp_path), dtype=torch.float32, device="cpu", model_class=model_class)
    assert type(model).__name__ == {"gpt": "GPTModel", "hybrid": "HybridModel"}[model_class]
    torch.testing.assert_close(plain_logits(model, PROMPT), hf_logits(theirs, PROMPT), atol=1e-4, rtol=0)


def test_a_hybrid_model_runs_in_the_engine(tmp_path: Path) -> None:
    """Layers without attention have no cache; their numbers must not be mixed up with those that have."""
    theirs = hf_model("smollm3", no_rope_layers=[1, 0, 1])
    model, tokenizer = load_model(
        save(theirs, tmp_path), dtype=torch.float32, device="cpu", model_class="hybrid"
    )
    assert engine_tokens(model, tokenizer, PROMPT, 8) == hf_continuation(theirs, PROMPT, 8)


def test_a_tokenizer_from_elsewhere_takes_the_checkpoint_s_place(tmp_path: Path) -> None:
    """Fine-tuned folders often come without one."""
    folder = save(hf_model("llama"), tmp_path / "model")
    (tmp_path / "tokenizer").mkdir()
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer" / "tokenizer.json")
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json, .*load_model\(tokenizer=\.\.\.\)"):
        load_model(folder, device="cpu")
    for source in (tmp_path / "tokenizer", tmp_path / "tokenizer" / "tokenizer.json"):
        assert load_model(folder, device="cpu", tokenizer=source)[1].vocab_size == VOCAB
    write_tiny(tmp_path / "tiny.gguf")
    assert load_model(folder, device="cpu", tokenizer=tmp_path / "tiny.gguf")[1].vocab_size == 264
    own = object()
    assert load_model(folder, device="cpu", tokenizer=own)[1] is own


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    """Its ids would index past the embedding, on a GPU as an assertion inside a kernel."""
    folder = save(hf_model("llama"), tmp_path / "model")
    write_tokenizer(tmp_path, VOCAB + 8)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json has 280 tokens, the vocabulary of .* has 272"):
        load_model(folder, device="cpu", tokenizer=tmp_path)


@pytest.mark.parametrize("size", ["tp", "pp", "ep"])
def test_other_sizes_than_those_that_are_set_up_are_refused(tmp_path: Path, size: str) -> None:
    """A whole model on each rank instead would run out of memory much later."""
    write_tiny(tmp_path / "tiny.gguf")
    load_model(tmp_path / "tiny.gguf", device="cpu")
    sizes: dict[str, Any] = {size: 2}  # Any: one of several arguments
    with pytest.raises(
        ValueError, match=f"^{size} is 2, and megatron's parallel state is set up with 1; leave"
    ):
        load_model(tmp_path / "tiny.gguf", device="cpu", **sizes)


def test_it_says_first_whether_it_fetches_or_opens(tmp_path: Path) -> None:
    """A download of a minute must not look like a file that is hard to read."""
    assert first_step("smollm2-135m", tmp_path) == "fetching smollm2-135m, once"
    path_of(KNOWN_MODELS["smollm2-135m"], tmp_path).touch()
    assert first_step("smollm2-135m", tmp_path) == "opening smollm2-135m"
    assert first_step(tmp_path) == f"opening {tmp_path}"


def test_an_unknown_model_class_is_refused_with_the_known_ones() -> None:
    """Before a download of a hundred megabytes starts."""
    with pytest.raises(ValueError, match="model_class is 'bert'; it must be one of gpt, hybrid"):
        load_model("smollm2-135m", model_class="bert")  # pyright: ignore[reportArgumentType] - the mistake


def test_devices_and_dtypes_that_cant_work_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    """Otherwise the first forward pass fails, far from the mistake."""
    write_tiny(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match=r"device is 'gpu7', which torch does not know; use cpu, cuda or"):
        load_model(tmp_path / "tiny.gguf", device="gpu7")
    with pytest.raises(UnsupportedModelError, match="device is meta"):
        load_model(tmp_path / "tiny.gguf", device="meta")
    for dtype in (torch.int8, "int8"):
        with pytest.raises(UnsupportedModelError, match=r"dtype is .*int8"):
            load_model(tmp_path / "tiny.gguf", device="cpu", dtype=dtype)


def test_a_process_without_a_gpu_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two on one would fail much later, in NCCL, or each take half of its memory."""
    write_tiny(tmp_path / "tiny.gguf")
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(UnsupportedModelError, match="LOCAL_RANK is 3, and torch finds 2 CUDA devices; start"):
        load_model(tmp_path / "tiny.gguf")
