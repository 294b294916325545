"""What is put on rotary modules, by hand; that it equals transformers is in test_hf_families.py."""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import Any

import msgspec
import torch

from megallm.models.checkpoint import Hyperparameters, RopeScaling
from megallm.models.gpt import ModelClass, unfilled
from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron
from megallm.models.rotary import inverse_frequencies
from tests.device.models import cpu_is_current
from tests.models.tiny_gguf import TINY

DYNAMIC = RopeScaling(kind="dynamic", factor=2.0, original_positions=8)
YARN = RopeScaling(kind="yarn", factor=4.0, original_positions=8, attention_factor=1.5)
TWO_KINDS = msgspec.structs.replace(
    TINY, window=3, windowed_layers=(1,), windowed_rotary_base=50.0, rope_scaling=YARN
)


def built(size: Hyperparameters, model_class: ModelClass = "gpt") -> Any:  # Any: megatron's model is untyped
    """Gives a model without weights."""
    with quiet_megatron():
        ensure_process_groups()
        return unfilled(size, dtype=torch.float32, device=torch.device("cpu"), model_class=model_class)


def test_frequencies_that_go_by_length_are_those_of_the_length_asked_for() -> None:
    """A trainer asks for a batch's, the engine for its longest text's, and neither changes the other's."""
    size = msgspec.structs.replace(TINY, rope_scaling=DYNAMIC)
    rotary = built(size).rotary_pos_emb
    for length in (8, 20, 8):
        wanted = torch.outer(torch.arange(float(length)), inverse_frequencies(size, length))
        assert rotary.get_freqs_non_repeated(length).equal(wanted)
    assert not rotary.get_freqs_non_repeated(8).equal(rotary.get_freqs_non_repeated(20)[:8])
    assert rotary.get_freqs_non_repeated(12, 8).equal(rotary.get_freqs_non_repeated(20)[8:])


def test_layers_without_a_window_have_their_own_module_and_factor_in_either_class() -> None:
    """A hybrid model has two of its layers for each of ours, numbered on."""
    for model_class in ("gpt", "hybrid"):
        model = built(TWO_KINDS, model_class)
        full, windowed = (
            layer.self_attention
            for layer in model.decoder.layers
            if hasattr(layer.self_attention, "core_attention")
        )
        assert full.rotary_pos_emb.inv_freq.equal(inverse_frequencies(TWO_KINDS))
        assert not hasattr(windowed, "rotary_pos_emb")
        plain = msgspec.structs.replace(TINY, rotary_base=50.0)
        torch.testing.assert_close(model.rotary_pos_emb.inv_freq, inverse_frequencies(plain))
        factors = [attention._yarn_concentration_factor for attention in (full, windowed)]  # noqa: SLF001 - megatron keeps it nowhere else
        assert factors == [1.5, 1.0]


def test_pairs_side_by_side_have_their_angles_side_by_side_in_either_class() -> None:
    """HybridModel of megatron turns such pairs by the angles of others."""
    size = msgspec.structs.replace(TINY, is_rope_interleaved=True)
    with cpu_is_current():
        gpt, hybrid = (built(size, each).rotary_pos_emb.get_emb(4)[:, 0, 0] for each in ("gpt", "hybrid"))
    assert gpt.equal(hybrid)
    assert gpt[:, 0].equal(gpt[:, 1])


def test_a_plain_model_s_module_is_left_as_it_was() -> None:
    """Nothing that a fast path would have to step aside for."""
    model = built(TINY)
    assert "get_freqs_non_repeated" not in vars(model.rotary_pos_emb)
    assert not any(
        module._forward_pre_hooks  # noqa: SLF001 - torch shows them no other way
        for module in model.modules()
    )
