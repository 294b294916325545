"""Which of two backends a step runs on."""

import pytest
import torch

from megallm.core_async.device import attention_choice
from megallm.core_async.device.attention import LayerShape
from megallm.core_async.device.attention_choice import ChosenAttention
from megallm.core_async.device.attention_sdpa import SdpaAttention
from tests.device.batches import Case, attended

SHAPE = LayerShape(4, 2, 8, 8, 0.3)


class Counting(SdpaAttention):
    """A backend that counts its steps."""

    def __init__(self, name: str) -> None:
        super().__init__(4)
        self.name = name
        self.num_steps = 0

    def begin_step(self, batch: attention_choice.AttentionBatch) -> None:
        self.num_steps += 1
        super().begin_step(batch)


@pytest.mark.parametrize(
    ("parts", "num_decode", "takes_chunks"),
    [
        ([(60, 1), (50, 1)], 2, False),
        ([(60, 1), (0, 8)], 1, True),
        ([(0, 8), (0, 8)], 0, False),
        ([(60, 4)], 0, False),
        ([(60, 9)], 0, True),
    ],
)
def test_long_chunks_go_to_the_second(
    monkeypatch: pytest.MonkeyPatch,
    parts: list[tuple[int, int]],
    num_decode: int,
    takes_chunks: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Decode rows and short prompts have a faster kernel; the answer is the same."""
    monkeypatch.setattr(attention_choice, "MIN_QUERIES", 8)
    monkeypatch.setattr(attention_choice, "MIN_KEYS", 32)
    usual, for_chunks = Counting("usual"), Counting("other")
    chosen = ChosenAttention(usual, for_chunks)
    assert chosen.name == "usual and other"
    got, expected = attended(chosen, Case(parts, SHAPE, num_decode=num_decode))
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    assert (usual.num_steps, for_chunks.num_steps) == ((0, 1) if takes_chunks else (1, 0))


@pytest.mark.parametrize(("usual", "other"), [(True, True), (True, False), (False, True), (False, False)])
def test_heads_are_normed_where_both_do(usual: bool, other: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A layer is bound once, and runs on either."""
    backends = Counting("a"), Counting("b")
    backends[0].norms_heads, backends[1].norms_heads = usual, other
    assert ChosenAttention(*backends).norms_heads == (usual and other)


def test_either_ones_refusal_counts() -> None:
    """A step must run whichever is chosen."""
    assert ChosenAttention(Counting("a"), Counting("b")).refusal(SHAPE) is None
