"""What a backend refuses is said once for each kind of layer."""

from torch import Tensor

from megallm.core_async.device.attention import AttentionBatch, LayerShape, PagedLayer, refusals

PLAIN = LayerShape(num_heads=4, num_kv_heads=2, head_dim=8, value_head_dim=8, scale=0.3)
WINDOWED = LayerShape(num_heads=4, num_kv_heads=2, head_dim=8, value_head_dim=8, scale=0.3, window=9)


class NoWindows:
    """A backend that runs full attention alone."""

    name = "no windows"

    def refusal(self, shape: LayerShape) -> str | None:
        """Refuses windows."""
        return None if shape.window is None else f"no window of {shape.window}"

    def begin_step(self, batch: AttentionBatch) -> None:
        """Prepares nothing."""

    def attend(self, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Gives the query."""
        return query


def test_reasons_are_given_once_for_equal_layers() -> None:
    """A model has dozens of layers of two kinds; the error names the reason, not the layers."""
    assert refusals(NoWindows(), [PLAIN, WINDOWED] * 20) == ["no window of 9"]
    assert refusals(NoWindows(), [PLAIN] * 20) == []
