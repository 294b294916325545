"""Which backend a model gets."""

import pytest
from msgspec.structs import replace
from torch import bfloat16, device

from megallm.core_async.device.attention_cpu import ColumnMajorOps, CpuOps
from megallm.core_async.device.backends import backend_for, check_backend
from megallm.core_async.device.cpu_kernels import load_kernels
from megallm.core_async.device.cpu_reference import TorchKernels
from megallm.core_async.device.dense_layer import TorchOps
from megallm.core_async.device.flash_libraries import has_flash
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.model import ModelHook
from megallm.core_async.errors import UnsupportedModelError
from tests.device.conftest import built


def test_auto_takes_the_compiled_kernels_where_they_run_every_layer() -> None:
    """The fast path must be the default, and never at the price of a refused model."""
    has_compiler = load_kernels().is_compiled
    plain = backend_for("auto", ModelHook(built("grouped heads")).shape, block_size=4)
    assert plain.attention.name == ("cpu" if has_compiler else "sdpa")
    assert isinstance(plain.ops, CpuOps if has_compiler else TorchOps)
    assert backend_for("auto", ModelHook(built("learned sinks")).shape, block_size=4).attention.name == "sdpa"


def test_without_a_compiler_torch_runs_on_weights_laid_out_for_it() -> None:
    """Torch multiplies few rows by a column-major weight up to twice as fast."""
    shape = ModelHook(built("grouped heads")).shape
    backend = backend_for("auto", shape, block_size=4, kernels=TorchKernels())
    assert backend.attention.name == "sdpa"
    assert isinstance(backend.ops, ColumnMajorOps)


def test_auto_takes_torch_for_other_dtypes() -> None:
    """The kernels are float32; in bfloat16 they would only add calls."""
    shape = replace(ModelHook(built("grouped heads")).shape, dtype=bfloat16)
    backend = backend_for("auto", shape, block_size=4)
    assert backend.attention.name == "sdpa"
    assert isinstance(backend.ops, TorchOps)


def test_name_is_obeyed() -> None:
    """Comparing backends is how a wrong one is found."""
    shape = ModelHook(built("grouped heads")).shape
    assert [backend_for(name, shape, block_size=4).attention.name for name in ("sdpa", "cpu")] == [
        "sdpa",
        "cpu",
    ]


def test_backend_asked_for_by_name_that_cannot_run_the_model_is_an_error() -> None:
    """Taking another one silently would make every measurement a lie."""
    with pytest.raises(UnsupportedModelError, match=r"'cpu' can't run this model: .*softmax_type"):
        backend_for("cpu", ModelHook(built("learned sinks")).shape, block_size=4)


def test_unknown_backend_is_refused_with_those_of_the_device() -> None:
    """A typing error must not fall back to something slow."""
    with pytest.raises(UnsupportedModelError, match="is 'flahs'; on cpu there are auto, sdpa, cpu"):
        check_backend("flahs", device("cpu"))
    with pytest.raises(UnsupportedModelError, match="is 'cpu'; on cuda there are auto, sdpa"):
        check_backend("cpu", device("cuda"))


def test_flash_is_offered_where_it_is_installed() -> None:
    """A backend that is listed and can't be had would send the user in circles."""
    if has_flash():
        check_backend("flash", device("cuda"))
        return
    with pytest.raises(UnsupportedModelError, match=r"is 'flash'; on cuda there are auto, sdpa, triton$"):
        check_backend("flash", device("cuda"))


def test_bound_model_norms_its_last_layer_as_the_others() -> None:
    """A library's norm may sum a row in another order; and the model comes back with its own."""
    model = built("grouped heads")
    hook = ModelHook(model)
    backend = backend_for("sdpa", hook.shape, block_size=4)
    assert "forward" not in vars(model.decoder.final_layernorm)
    caches = [LayerCache() for _ in hook.shape.attention_layers]
    hook.bind(backend.attention, caches, backend.ops, max_positions=8)
    assert "forward" in vars(model.decoder.final_layernorm)
    hook.unbind()
    assert "forward" not in vars(model.decoder.final_layernorm)
