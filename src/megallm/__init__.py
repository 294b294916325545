"""megallm: an inference engine round a megatron-core model that is already in memory.

The public names, each imported when it is first touched: `import megallm` loads no torch, touches
no CUDA, starts no thread and installs no signal handler. Knows where names live; holds no logic.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.inference_request import DynamicInferenceRequest

    from megallm.core_async.errors import (
        DeviceMemoryError,
        EngineBusy,
        EngineDeadError,
        EngineStoppedError,
        InvalidRequestError,
        LifecycleError,
        MegaLLMError,
        ModelFileError,
        NoProfilerError,
        RankLostError,
        RequestFailedError,
        UnsupportedModelError,
    )
    from megallm.core_async.llm import MegatronAsyncLLM
    from megallm.core_async.messages import Delta
    from megallm.core_async.result import Result
    from megallm.core_async.sampling_params import SamplingParams
    from megallm.http.serve_config import ServeConfig
    from megallm.models import load_model
    from megallm.sync.llm import MegatronLLM

__all__ = [
    "Delta",
    "DeviceMemoryError",
    "DynamicInferenceRequest",
    "EngineBusy",
    "EngineDeadError",
    "EngineStoppedError",
    "InferenceConfig",
    "InvalidRequestError",
    "LifecycleError",
    "MegaLLMError",
    "MegatronAsyncLLM",
    "MegatronLLM",
    "ModelFileError",
    "NoProfilerError",
    "RankLostError",
    "RequestFailedError",
    "Result",
    "SamplingParams",
    "ServeConfig",
    "UnsupportedModelError",
    "load_model",
]

_MODULE_OF = {
    "Delta": "megallm.core_async.messages",
    "DeviceMemoryError": "megallm.core_async.errors",
    "DynamicInferenceRequest": "megatron.core.inference.inference_request",
    "EngineBusy": "megallm.core_async.errors",
    "EngineDeadError": "megallm.core_async.errors",
    "EngineStoppedError": "megallm.core_async.errors",
    "InferenceConfig": "megatron.core.inference.config",
    "InvalidRequestError": "megallm.core_async.errors",
    "LifecycleError": "megallm.core_async.errors",
    "MegaLLMError": "megallm.core_async.errors",
    "MegatronAsyncLLM": "megallm.core_async.llm",
    "MegatronLLM": "megallm.sync.llm",
    "ModelFileError": "megallm.core_async.errors",
    "NoProfilerError": "megallm.core_async.errors",
    "RankLostError": "megallm.core_async.errors",
    "RequestFailedError": "megallm.core_async.errors",
    "Result": "megallm.core_async.result",
    "SamplingParams": "megallm.core_async.sampling_params",
    "ServeConfig": "megallm.http.serve_config",
    "UnsupportedModelError": "megallm.core_async.errors",
    "load_model": "megallm.models",
}


def __getattr__(name: str) -> object:
    """Gives a public name, importing its module the first time (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'megallm' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
