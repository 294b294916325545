"""Small random megatron models on the CPU, and the plain forward pass they are compared with.

The reference runs the same unmodified module over one whole sequence, with megatron's own rotary
positions and an attention of four lines: no cache, no packing, no chunks.
"""

import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

type Megatron = Any  # megatron's modules are untyped
type Options = dict[str, Any]  # keyword arguments of megatron's constructors

VOCAB = 96


class LooseDotProductAttention(DotProductAttention):
    """megatron's own, which does not take the head sizes that MLA passes."""

    def __init__(
        self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any
    ) -> None:  # Any: handed on
        super().__init__(*args, **kwargs)


@contextmanager
def cpu_is_current() -> Generator[None]:
    """Lets megatron ask for the current CUDA device on a machine without one, and warn of its own calls."""
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Warning: tp_group is None", DeprecationWarning)
        yield


def config_of(*, kind: type[TransformerConfig] = TransformerConfig, **changes: Any) -> TransformerConfig:
    """Gives the small config, changed."""
    settings: Options = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 128,
        "normalization": "RMSNorm",
        "activation_func": nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
    }
    return kind(**{**settings, **changes})


def gpt(
    *,
    spec: Options | None = None,
    model: Options | None = None,
    **changes: Any,
) -> Megatron:
    """Gives a GPTModel in eval mode with seeded weights large enough that tokens differ."""
    layer_spec = get_gpt_layer_local_spec(normalization="RMSNorm", **(spec or {}))
    settings: Options = {"position_embedding_type": "rope", "rotary_base": 10_000, **(model or {})}
    with cpu_is_current():
        built = GPTModel(
            config_of(**changes),
            layer_spec,
            vocab_size=VOCAB,
            max_sequence_length=256,
            parallel_output=False,
            **settings,
        )
    return seeded(built)


def yarn() -> Megatron:
    """Gives a model whose rotary frequencies are stretched, and whose turned vectors grow."""
    with mock.patch.multiple(
        TransformerConfig,
        create=True,
        yarn_rotary_scaling_factor=4.0,
        yarn_original_max_position_embeddings=16,
        yarn_beta_fast=32.0,
        yarn_beta_slow=1.0,
        yarn_mscale=1.0,
        yarn_mscale_all_dim=0.0,
        yarn_correction_range_round_to_int=True,
    ):
        return gpt(model={"position_embedding_type": "yarn"})


def two_rotary_tables() -> Megatron:
    """Gives a model whose second layer turns by a module of its own, whatever the model hands it."""
    built = gpt(window_size=(5, 0), window_attn_skip_freq=2)
    attention = built.decoder.layers[1].self_attention
    with cpu_is_current():
        attention.rotary_pos_emb = RotaryEmbedding(16, 1.0, rotary_base=100, use_cpu_initialization=True)

    def turned_by_own(
        module: Megatron, args: tuple[Tensor], options: Options
    ) -> tuple[tuple[Tensor], Options]:
        return args, {**options, "rotary_pos_emb": module.rotary_pos_emb(len(args[0]))}

    attention.register_forward_pre_hook(turned_by_own, with_kwargs=True)
    return built.eval()


def moe() -> Megatron:
    """Gives a mixture of four experts, two a token."""
    return gpt(
        spec={"num_experts": 4, "moe_grouped_gemm": False},
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=False,
    )


def mla(**changes: Any) -> Megatron:
    """Gives multi-latent attention with query and key heads wider than value heads."""
    config = config_of(
        kind=MLATransformerConfig,
        **{
            "multi_latent_attention": True,
            "num_query_groups": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_head_dim": 16,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 12,
            "rope_type": "rope",
            "rotary_base": 10_000,
            **changes,
        },
    )
    layer_spec = untyped(get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True))
    layer_spec.submodules.self_attention.submodules.core_attention = LooseDotProductAttention
    with cpu_is_current():
        built = GPTModel(config, layer_spec, vocab_size=VOCAB, max_sequence_length=256, parallel_output=False)
    return seeded(built)


def hybrid(pattern: str = "*-*-") -> Megatron:
    """Gives a HybridModel: `*` an attention layer, `-` an MLP layer."""
    local = untyped(get_gpt_layer_local_spec(normalization="RMSNorm").submodules)
    attention = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=local.input_layernorm,
            self_attention=local.self_attention,
            self_attn_bda=local.self_attn_bda,
        ),
    )
    dense = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=local.pre_mlp_layernorm, mlp=local.mlp, mlp_bda=local.mlp_bda
        ),
    )
    stack = ModuleSpec(
        module=HybridStack, submodules=HybridStackSubmodules(attention_layer=attention, mlp_layer=dense)
    )
    with mock.patch.object(hybrid_block, "TENorm", WrappedTorchNorm):
        built = HybridModel(
            config_of(num_layers=len(pattern)),
            stack,
            vocab_size=VOCAB,
            max_sequence_length=256,
            hybrid_layer_pattern=pattern,
            position_embedding_type="rope",
            parallel_output=False,
        )
    return seeded(built)


def untyped(thing: Megatron) -> Megatron:
    """Gives what it is given, of which megatron says no more than that it is an object."""
    return thing


def seeded(model: Megatron) -> Megatron:
    """Fills the parameters from one seed and freezes them."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15, generator=generator)
        else:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    return model.eval().requires_grad_(False)


@contextmanager
def plain_attention(model: Megatron) -> Generator[None]:
    """Puts an attention over whole sequences, of four lines, in place of every core attention."""
    with ExitStack() as patched:
        for layer in model.decoder.layers:
            attention = layer.self_attention
            if hasattr(attention, "core_attention"):
                patched.enter_context(
                    mock.patch.object(
                        attention.core_attention, "forward", _whole_sequence(attention, model.config)
                    )
                )
        yield


def _whole_sequence(attention: Megatron, config: Megatron) -> object:
    scale: float = getattr(attention, "softmax_scale", None) or config.kv_channels**-0.5
    skips_window = (
        config.window_attn_skip_freq is not None
        and attention.layer_number % config.window_attn_skip_freq == 0
    )
    window: tuple[int, int] | None = None if skips_window else config.window_size

    def forward(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:
        heads = query.shape[2]
        key, value = (part[:, 0].repeat_interleave(heads // part.shape[2], dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[:, 0], key) * scale
        distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
        hidden = (distance < 0) if window is None else (distance < 0) | (distance > window[0])
        scores = scores.masked_fill(hidden, -torch.inf)
        offset = attention.core_attention.softmax_offset
        if offset is not None:
            scores = torch.cat((scores, offset.view(-1, 1, 1).expand(-1, len(query), 1)), dim=-1)
        weights = scores.softmax(-1)[..., : len(query)]
        return torch.einsum("hqk,khd->qhd", weights, value).reshape(len(query), 1, -1)

    return forward


@torch.inference_mode()
def plain_logits(model: Megatron, tokens: list[int]) -> Tensor:
    """Gives `[tokens, vocab]`: the whole sequence in one unmodified forward pass."""
    ids = torch.tensor([tokens])
    with plain_attention(model), cpu_is_current():
        return model(ids, torch.arange(len(tokens))[None], None)[0]


def plain_continuation(model: Megatron, prompt: list[int], num_tokens: int) -> list[int]:
    """Gives the greedy continuation, each token from a full forward pass."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(plain_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
