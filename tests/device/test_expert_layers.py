"""Which ranks hold experts, and how tokens are gathered; over two ranks see ranks/test_expert_parallel.py."""

import pytest
import torch

from megallm.core_async.device.expert_layers import ExpertLayers, gathering
from megallm.core_async.device.forwards import router_gate
from tests.device.conftest import built


@pytest.mark.parametrize("kind", ["mixture of experts", "grouped heads", "hybrid"])
def test_whole_experts_are_shared_with_nobody(kind: str) -> None:
    """A step without rows then returns at once, and megatron's own methods stay."""
    experts = ExpertLayers(built(kind))
    assert experts.ranks == ()
    assert not experts.is_spread
    assert list(experts.exchanges(torch.device("cpu"))) == []


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@torch.inference_mode()
def test_padding_changes_no_token(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    """Tokens that choose no expert add nothing, and are gone at the end: also where they are all there is."""
    experts = built("mixture of experts").decoder.layers[0].mlp
    hidden = torch.randn(num_tokens, 1, 64, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(experts.router, "gating", router_gate(experts.router))  # megatron's needs tokens
    expected, _ = experts(hidden)
    dispatch, combine = gathering(experts.token_dispatcher, is_even=False)
    monkeypatch.setattr(experts.token_dispatcher, "token_dispatch", dispatch)
    monkeypatch.setattr(experts.token_dispatcher, "token_combine", combine)
    output, _ = experts(hidden)
    assert output.shape == hidden.shape
    torch.testing.assert_close(output, expected)
