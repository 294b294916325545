"""megatron's options out of hyperparameters; what they do is seen in test_hf_families.py."""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import msgspec
import torch

from megallm.models.checkpoint import Experts, Hyperparameters
from megallm.models.megatron_config import hybrid_pattern, transformer_config
from megallm.models.megatron_setup import quiet_megatron
from megallm.models.rank_part import Sizes
from tests.models.tiny_gguf import TINY

WINDOWED = msgspec.structs.replace(TINY, window=5, windowed_layers=(1,), unturned_layers=(0,))


def options(size: Hyperparameters, *names: str, is_hybrid: bool = False) -> tuple[object, ...]:
    """Gives some of the options of a config."""
    with quiet_megatron():
        config = transformer_config(size, Sizes(), torch.bfloat16, is_on_cpu=True, is_hybrid=is_hybrid)
    return tuple(getattr(config, name) for name in names)


def test_layers_that_differ_are_marked_one_by_one() -> None:
    """Megatron counts layers from one, and a hybrid model has two for each of ours."""
    names = ("num_layers", "window_size", "window_attn_skip_freq", "no_rope_freq")
    assert options(WINDOWED, *names) == (2, (5, 0), [0, 1], [1, 0])
    assert options(WINDOWED, *names, is_hybrid=True) == (4, (5, 0), [0, 0, 1, 1], [1, 1, 0, 0])
    assert options(TINY, *names) == (2, None, None, None)


def test_a_hybrid_s_own_layers_are_marked_as_they_are() -> None:
    """A checkpoint of one says of each layer what it is, in whatever order."""
    size = msgspec.structs.replace(WINDOWED, num_layers=4, layer_kinds="**-*")
    names = ("num_layers", "window_attn_skip_freq", "no_rope_freq")
    assert options(size, *names, is_hybrid=True) == (4, [0, 1, 0, 0], [1, 0, 0, 0])
    assert (hybrid_pattern(size), hybrid_pattern(size, 2)) == ("**-*", "**|-*")


def test_no_option_needs_a_gpu_or_a_compiler() -> None:
    """The same model must build on any machine; what is fast is the engine's to choose."""
    fused = ("bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion", "apply_rope_fusion")
    assert options(TINY, *fused) == (False, False, False, False)
    assert options(TINY, "params_dtype", "bf16", "use_cpu_initialization") == (torch.bfloat16, True, True)


def test_experts_stand_in_the_layers_that_have_them() -> None:
    """Qwen3-MoE may begin with dense layers."""
    experts = Experts(num_experts=4, num_chosen=2, ffn_size=8, is_renormalised=False, dense_layers=(0,))
    size = msgspec.structs.replace(TINY, experts=experts)
    names = (
        "num_moe_experts",
        "moe_router_topk",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_router_pre_softmax",
    )
    assert options(size, *names) == (4, 2, 8, [0, 1], True)
    assert (hybrid_pattern(size), hybrid_pattern(TINY)) == ("*-*E", "*-*-")


def test_a_router_by_sigmoid_has_its_bias_and_factor_in_float32() -> None:
    """In bfloat16 experts change places; and a factor of one is none to megatron."""
    experts = Experts(
        num_experts=4,
        num_chosen=2,
        ffn_size=8,
        is_renormalised=True,
        scoring="sigmoid",
        share_factor=2.5,
        shared_ffn_size=16,
    )
    names = (
        "moe_router_score_function",
        "moe_router_enable_expert_bias",
        "moe_router_dtype",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_intermediate_size",
    )
    size = msgspec.structs.replace(TINY, experts=experts)
    assert options(size, *names) == ("sigmoid", True, "fp32", 2.5, 16)
    plain = msgspec.structs.replace(experts, scoring="softmax", share_factor=1.0, shared_ffn_size=0)
    size = msgspec.structs.replace(TINY, experts=plain)
    assert options(size, *names) == ("softmax", False, None, None, None)
