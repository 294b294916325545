"""One rank's device work: plans in, results out, all on the rank's one thread.

Owns the model while it is bound, the paged cache and the rows' state. Knows the order of a step; knows no
request, no policy, no megatron.
"""

import time

import numpy as np
import torch
from torch import Tensor, nn

from megallm.core_async.config import EngineConfig, ModelLimits
from megallm.core_async.device.attention import Attention
from megallm.core_async.device.backends import backend_for, check_backend
from megallm.core_async.device.kv_cache import CacheShape, PagedCache, bytes_per_token
from megallm.core_async.device.memory import free_bytes
from megallm.core_async.device.model import ModelHook, ModelShape
from megallm.core_async.device.rows import Rows
from megallm.core_async.device.sampler import Sampled, sample
from megallm.core_async.device.step_inputs import StepInputs, inputs_of
from megallm.core_async.errors import NonFiniteLogitsError
from megallm.core_async.messages import Floats, Ints, StepPlan, StepResult


class TorchRunner:
    """`protocols.Runner` for a megatron-core model on the device that its parameters are on."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self._hook = ModelHook(model)
        self._config = config
        shape = self._hook.shape
        limits = (shape.max_positions, config.max_sequence_length)
        assert limits[0] is None or limits[0] >= limits[1], f"positions and max_sequence_length: {limits}"
        self._device = shape.device
        check_backend(config.attention_backend, shape.device)
        self._attention: Attention | None = None
        self._cache = PagedCache(
            _cache_shapes(shape),
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            dtype=shape.dtype,
            device=shape.device,
        )
        self._rows = Rows(
            max_requests=config.max_requests,
            max_sequence_length=config.max_sequence_length,
            block_size=config.block_size,
            device=shape.device,
        )

    @property
    def attention_name(self) -> str:
        """The attention backend in use; known once started."""
        assert self._attention is not None, "the runner is not started"
        return self._attention.name

    @property
    def cache(self) -> PagedCache:
        """The paged cache, for releasing and restoring it between steps."""
        return self._cache

    def start(self) -> None:
        """Binds the model and allocates the cache; see `protocols.Runner.start`."""
        backend = backend_for(
            self._config.attention_backend, self._hook.shape, block_size=self._config.block_size
        )
        with torch.inference_mode():
            self._cache.allocate()
            self._hook.bind(
                backend.attention,
                self._cache.layers,
                backend.ops,
                max_positions=self._config.max_sequence_length,
            )
        self._attention = backend.attention

    def close(self) -> None:
        """Gives the user's model back as it was and frees the cache; may be called twice."""
        self._hook.unbind()
        self._cache.release(keep_contents=False)

    def release_cache(self, *, keep_contents: bool) -> None:
        """See `protocols.Runner.release_cache`."""
        with torch.inference_mode():
            self._cache.release(keep_contents=keep_contents)

    def restore_cache(self) -> None:
        """See `protocols.Runner.restore_cache`."""
        with torch.inference_mode():
            self._cache.restore()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "QueuedStep":
        """Queues one step: tensors, model, sampler. On a CPU it has run when this returns."""
        started = time.perf_counter()
        self._rows.apply(plan)
        if not plan.rows:
            return QueuedStep(plan.step, None, prepare_s=time.perf_counter() - started)
        inputs = inputs_of(
            plan, self._rows, block_size=self._config.block_size, device=self._device, rope=self._hook.rope
        )
        assert self._attention is not None, "launch before start"
        self._attention.begin_step(inputs.batch)
        prepared = time.perf_counter()
        logits = self._hook.forward(inputs)
        forwarded = time.perf_counter()
        sampled = self._sample(logits, inputs) if inputs.num_samples else None
        return QueuedStep(
            plan.step,
            sampled,
            prepare_s=prepared - started,
            forward_s=forwarded - prepared,
            sample_s=time.perf_counter() - forwarded,
        )

    def _sample(self, logits: Tensor, inputs: StepInputs) -> Sampled:
        sampled = sample(logits[:, : self._config.vocab_size], inputs.sampling, inputs.sampled_positions)
        self._rows.last_tokens.index_copy_(0, inputs.sampled_rows, sampled.tokens)
        return sampled


class QueuedStep:
    """A launched step; its tokens are on the way to the host."""

    def __init__(
        self,
        step: int,
        sampled: Sampled | None,
        *,
        prepare_s: float,
        forward_s: float = 0.0,
        sample_s: float = 0.0,
    ) -> None:
        self._step = step
        self._times = (prepare_s, forward_s, sample_s)
        self._columns: list[Tensor] = []
        self._arrived: torch.cuda.Event | None = None
        if sampled is not None:
            columns = [sampled.tokens.int(), sampled.is_finite]
            if sampled.log_probs is not None:
                columns.append(sampled.log_probs)
            self._columns = [column.to("cpu", non_blocking=True) for column in columns]
            if sampled.tokens.is_cuda:
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def result(self) -> StepResult:
        """Waits until the step has run; see `protocols.PendingStep.result`.

        Raises: NonFiniteLogitsError, and what the device raises late.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        prepare_s, forward_s, sample_s = self._times
        tokens, log_probs = Ints(b""), Floats(b"")
        if self._columns:
            is_finite = self._columns[1].numpy()
            if not is_finite.all():
                raise NonFiniteLogitsError(
                    f"in step {self._step} the logits of {int(np.sum(~is_finite))} of {len(is_finite)} "
                    "sampled rows have no finite best value; look for NaN or infinity in the model's weights"
                )
            tokens = Ints(self._columns[0].numpy().tobytes())
            if len(self._columns) > 2:  # noqa: PLR2004 - tokens, flags, and log-probs where asked
                log_probs = Floats(self._columns[2].numpy().tobytes())
        return StepResult(
            step=self._step,
            tokens=tokens,
            log_probs=log_probs,
            prepare_s=prepare_s,
            forward_s=forward_s,
            sample_s=sample_s,
        )


def model_limits(model: nn.Module, *, sampling_seed: int = 42) -> ModelLimits:
    """Gives what of the model and its device the engine's limits depend on; changes nothing.

    Raises: UnsupportedModelError, naming the layer or option and what is supported.
    """
    shape = ModelHook(model).shape
    return ModelLimits(
        cache_bytes_per_token=bytes_per_token(_cache_shapes(shape), shape.dtype),
        vocab_size=shape.vocab_size,
        device_type=shape.device.type,
        max_positions=shape.max_positions,
        free_bytes=free_bytes(shape.device),
        sampling_seed=sampling_seed,
    )


def _cache_shapes(shape: ModelShape) -> list[CacheShape]:
    return [
        CacheShape(
            num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim, value_head_dim=layer.value_head_dim
        )
        for layer in shape.attention_layers
    ]
