"""`megallm info`: figures from a checkpoint's header."""

import argparse
import io
import json
from pathlib import Path

import msgspec
import pytest

from megallm.commands import model_card
from megallm.core_async.errors import ModelFileError
from megallm.models.checkpoint import Experts, RopeScaling
from tests.models.tiny_gguf import TINY, tiny_weights, write_tiny


def shown(*argv: str, memory_bytes: int = 1 << 20) -> str:
    """Gives what the command prints on a machine of so much memory."""
    parser = argparse.ArgumentParser()
    model_card.add_arguments(parser)
    out = io.StringIO()
    assert model_card.run(parser.parse_args(argv), stdout=out, memory_bytes=memory_bytes) == 0
    return out.getvalue()


def test_figures_are_those_of_the_tensors(tmp_path: Path) -> None:
    """A user buys a machine by them."""
    write_tiny(tmp_path / "tiny.gguf")
    num_parameters = sum(values.size for values in tiny_weights().values())
    found = json.loads(shown(str(tmp_path / "tiny.gguf"), "--json", "--dtype", "float32", "--context", "100"))
    assert found["parameters"] == found["active_parameters"] == num_parameters
    assert found["weight_bytes"] == 4 * num_parameters
    per_token = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert found["kv_bytes_per_token"] == per_token
    fit = ((1 << 20) - 4 * num_parameters) // (per_token * 100)
    assert found["requests"] == {"tokens_each": 100, "fit": fit}
    assert fit > 0


def test_the_text_has_the_same_figures(tmp_path: Path) -> None:
    """What a person reads first."""
    write_tiny(tmp_path / "tiny.gguf")
    text = shown(str(tmp_path / "tiny.gguf"), "--memory-gb", "2")
    assert "architecture: decoder, grouped-query attention, rotary positions, tied embedding\n" in text
    assert "layers:       2 of 64, 4 heads of 16, 2 for keys and values\n" in text
    assert "KV cache:     256 bytes a token\n" in text
    assert "of 128 tokens in 2.0 GiB, weights included\n" in text
    assert " MiB in " in text, "a small model's weights are not 0.00 GiB"


def test_what_is_special_of_an_architecture_is_named() -> None:
    """Experts and windows are why one model is faster than another of its size."""
    size = msgspec.structs.replace(
        TINY,
        num_kv_heads=4,
        has_qk_norm=True,
        window=7,
        windowed_layers=(0,),
        rope_scaling=RopeScaling(kind="yarn"),
        experts=Experts(num_experts=8, num_chosen=2, ffn_size=8, is_renormalised=True),
        is_tied=False,
    )
    assert model_card.architecture_of(size) == (
        "decoder, multi-head attention, rotary positions (yarn), query and key norms, window of 8 tokens in "
        "1 layers, 2 of 8 experts, output projection of its own"
    )
    size = msgspec.structs.replace(TINY, num_layers=3, layer_kinds="**-", unturned_layers=(0, 1, 2))
    assert model_card.architecture_of(size) == (
        "hybrid decoder of layers **-, grouped-query attention, no positions, tied embedding"
    )


def test_a_source_that_is_not_there_is_an_error() -> None:
    """The command line makes one line of it."""
    with pytest.raises(ModelFileError, match="neither a file nor a known model"):
        shown("no-such-model")
