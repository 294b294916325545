"""The layout of weights that torch multiplies by fastest on a CPU; made in place, and undone.

For machines without a compiler alone: the compiled `linear` of cpu_kernels.py takes weights as they are and
is quicker than torch with any layout, at any number of rows. Measured with 2 threads on weights of 576 to
3,072 rows and columns, column-major against row-major, as the ratio of times: on an AMD EPYC (Zen 4) 0.5-1.1
with 1 or 2 tokens and 0.9-1.3 with 4 to 32; on an Intel Xeon 1.0 with 1 and 0.5-0.6 with 4 to 32. Not for an
embedding, tied or not: rows are looked up in it, and would lie scattered.
"""

import torch
from torch import nn


def make_fast(weight: nn.Parameter) -> bool:
    """Lays a weight, `[n, k]`, out by columns; says whether that changed anything.

    The parameter stays the same object with the same shape and values: whoever updates it in place still
    does, and `functional.linear` takes it as before. Only what holds views of the old memory is left behind.
    """
    is_matrix = len(weight.shape) == 2 and min(weight.shape) > 1  # noqa: PLR2004 - rows and columns
    if not is_matrix or weight.dtype is not torch.float32 or weight.device.type != "cpu":
        return False
    if not weight.is_contiguous():
        return False
    # the new memory must be a trainer's to write to, also when inference mode is on here
    with torch.inference_mode(mode=False), torch.no_grad():
        weight.data = weight.data.t().contiguous().t()
    return True


def restore(weight: nn.Parameter) -> None:
    """Lays a weight out by rows again, with the values it has now."""
    with torch.inference_mode(mode=False), torch.no_grad():
        weight.data = weight.data.contiguous()
