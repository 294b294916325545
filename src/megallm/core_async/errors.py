"""Every error megallm raises: one shallow tree, each class saying whose fault it is.

`http_status` is what the HTTP server answers for the class. Knows nothing of the rest of the package.
"""


class MegaLLMError(Exception):
    """Base of every error that megallm raises on purpose."""

    http_status = 500


class UnsupportedModelError(MegaLLMError, ValueError):
    """The model has what the engine does not run; names it and what is supported. The caller's fault."""

    http_status = 400


class ModelFileError(MegaLLMError, ValueError):
    """A model's file can't be had or read; names file, fault and remedy. The caller's fault."""

    http_status = 400


class InvalidRequestError(MegaLLMError, ValueError):
    """A prompt or an option can't be run; names value, limit and remedy. The caller's fault.

    As the payload of a failed result's ERROR_NONTRANSIENT event it is data and is never raised.
    """

    http_status = 400


class EngineBusy(MegaLLMError):  # noqa: N818 - the name is part of the public API
    """The waiting list is full; try again later. Nobody's fault."""

    http_status = 429


class LifecycleError(MegaLLMError, RuntimeError):
    """The call is not legal in the engine's state; names both and what is legal. The caller's fault."""

    http_status = 409


class EngineStoppedError(MegaLLMError, RuntimeError):
    """The engine was shut down, so the call can't run or was ended by it. The caller's choice."""

    http_status = 503


class EngineDeadError(MegaLLMError, RuntimeError):
    """The engine failed; `__cause__` is the first failure. The engine's fault."""

    http_status = 503


class RankLostError(MegaLLMError):
    """One of the ranks that run a model has gone, has failed or hangs; names it. Not the caller's fault."""

    http_status = 503


class RequestFailedError(MegaLLMError, RuntimeError):
    """One request can't go on: its logits, its text or its grammar failed. Not the caller's fault.

    As the payload of a failed result's ERROR_NONTRANSIENT event it is data; its neighbours run on.
    """

    http_status = 500


class ActorGone(MegaLLMError):  # noqa: N818 - names a state of the actor, as Erlang's noproc does
    """The actor asked has stopped, so no reply will come; `__cause__` is why, when it failed."""

    http_status = 503


class NoProfilerError(MegaLLMError, RuntimeError):
    """The engine's process has no CUDA profiler, or it refuses; says which. The installation's fault."""

    http_status = 501


class DeviceMemoryError(MegaLLMError, RuntimeError):
    """The device's driver does not give the memory of the KV cache, or not back. The machine's fault."""

    http_status = 500
