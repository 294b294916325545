"""One rank's device work: plans in, results out, all on the rank's one thread.

Owns the model while it is bound, the paged cache and the rows' state. Knows the order of a step; knows no
request, no policy, no megatron.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn

from megallm.core_async.config import EngineConfig
from megallm.core_async.device.attention import Attention
from megallm.core_async.device.backends import backend_for, check_backend
from megallm.core_async.device.graph_sizes import row_sizes, token_sizes
from megallm.core_async.device.kv_cache import CacheShape, PagedCache
from megallm.core_async.device.layer_shapes import ModelShape
from megallm.core_async.device.log_probs import LogProbs, joined, log_probs_of
from megallm.core_async.device.model import ModelHook
from megallm.core_async.device.packed_step import num_words, packed, unpacked
from megallm.core_async.device.pipeline import Pipeline
from megallm.core_async.device.queued_step import QueuedStep, StepTensors, StepTimes
from megallm.core_async.device.rows import Rows, column_of
from megallm.core_async.device.step_inputs import StepInputs, inputs_of
from megallm.core_async.device.token_choice import TokenChoice
from megallm.core_async.errors import UnsupportedModelError
from megallm.core_async.matchers import Matchers
from megallm.core_async.messages import Ints, StepPlan

if TYPE_CHECKING:
    from megallm.core_async.device.captured import Replay
    from megallm.core_async.device.step_graphs import StepGraphs

log = logging.getLogger(__name__)


class TorchRunner:
    """`protocols.Runner` for a megatron-core model on the device that its parameters are on."""

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        matchers: Matchers | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """`matchers`: for requests that bring a grammar; without it there are none.

        `pipeline`: of whose stages the model is one; None where it is whole.
        """
        self._hook = ModelHook(model)
        self._config = config
        self._pipeline = pipeline
        shape = self._hook.shape
        limits = (shape.max_positions, config.max_sequence_length)
        assert limits[0] is None or limits[0] >= limits[1], f"positions and max_sequence_length: {limits}"
        self._device = shape.device
        check_backend(config.attention_backend, shape.device)
        self._attention: Attention | None = None
        self._cache = PagedCache(
            _cache_shapes(shape),
            num_blocks=config.num_blocks,
            num_scratch=1 if shape.device.type == "cuda" else 0,
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
        self._choice = TokenChoice(self._rows, config, matchers, device=shape.device)
        self._graphs: StepGraphs | None = None
        """Of steps that are not large; None where all run op by op."""

    @property
    def attention_name(self) -> str:
        """The attention backend in use; known once started."""
        assert self._attention is not None, "the runner is not started"
        return self._attention.name

    @property
    def cache(self) -> PagedCache:
        """The paged cache, for releasing and restoring it between steps."""
        return self._cache

    @property
    def runs_at_launch(self) -> bool:
        """See `protocols.Runner.runs_at_launch`."""
        return self._device.type == "cpu"

    def start(self) -> None:
        """Binds the model and allocates the cache; see `protocols.Runner.start`."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # it is each thread's own
        backend = backend_for(
            self._config.attention_backend,
            self._hook.shape,
            block_size=self._config.block_size,
            max_sequence_length=self._config.max_sequence_length,
            is_batch_invariant=self._config.batch_invariant,
        )
        is_invariant = backend.is_batch_invariant and self._hook.is_dense and self._hook.is_whole
        if self._config.batch_invariant and not is_invariant:
            raise UnsupportedModelError(
                "batch_invariant=True is for models of dense layers on one rank: in bfloat16 or float16 on a"
                " GPU with the triton backend, and in float32 on a CPU where the kernels could be compiled"
                " (install g++);"
                " leave it off"
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
        if backend.is_capturable:
            self._capture(backend.attention)

    @torch.inference_mode()
    def _capture(self, attention: Attention) -> None:
        """Captures steps, where every layer's work is the same for every batch of a size."""
        if not self._hook.is_dense:
            log.info("steps run op by op: CUDA graphs are for models of dense layers alone")
            return
        if self._pipeline is not None or not self._hook.is_whole:
            log.info("steps run op by op: CUDA graphs are for models that one rank has all of")
            return
        config, shape = self._config, self._hook.shape
        rows = row_sizes(config)
        if not rows:
            log.info("steps run op by op: InferenceConfig.num_cuda_graphs is 0")
            return
        # the kernels need Triton, which comes with torch's CUDA builds alone
        from megallm.core_async.device.step_graphs import StepGraphs  # noqa: PLC0415

        self._graphs = StepGraphs(
            self._hook,
            attention,
            self._rows,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_sequence_length,
            row_sizes=rows,
            token_sizes=token_sizes(config, shape.layer_weights if shape.dtype.itemsize == 2 else None),  # noqa: PLR2004 - bytes
            block_size=config.block_size,
            scratch_block=config.num_blocks,
            device=self._device,
        )
        self._graphs.capture()

    def close(self) -> None:
        """Gives the user's model back as it was and frees the cache; may be called twice."""
        self._hook.unbind()
        if self._graphs is not None:
            torch.cuda.synchronize(self._device)  # a step in flight still writes to their memory of the host
            self._graphs = None
        self._cache.close()

    def release_cache(self, kept: Ints) -> None:
        """See `protocols.Runner.release_cache`."""
        if self._graphs is not None and not self._cache.keeps_addresses:
            self._graphs.drop()
        with torch.inference_mode():
            self._cache.release(column_of(kept))

    def restore_cache(self) -> None:
        """See `protocols.Runner.restore_cache`."""
        with torch.inference_mode():
            self._cache.restore()
            if self._graphs is not None and not self._cache.keeps_addresses:
                self._graphs.capture()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> QueuedStep:
        """Queues one step: tensors, model, sampler. On a CPU it has run when this returns."""
        started = time.perf_counter()
        self._rows.apply(plan)
        self._choice.set_up(plan.new_rows)
        if self._graphs is not None:
            self._graphs.follow(plan)
        if not plan.rows:
            self._hook.take_part()
            return QueuedStep(plan.step, StepTensors(), StepTimes(forward_s=time.perf_counter() - started))
        if self._graphs is not None:
            replay = self._graphs.replay(plan)
            if replay is not None:
                return self._after_replay(plan, replay, started)
        inputs = inputs_of(
            plan, self._rows, block_size=self._config.block_size, device=self._device, rope=self._hook.rope
        )
        assert self._attention is not None, "launch before start"
        self._attention.begin_step(inputs.batch)
        prepared = time.perf_counter()
        scores: list[LogProbs] = []

        def score(logits: Tensor, first: int) -> None:
            assert inputs.targets is not None, "logits to score, and no targets"
            targets = inputs.targets[first : first + len(logits)]
            scores.append(log_probs_of(self._of_vocabulary(logits), targets, num_top=inputs.num_top))

        output = self._forward(inputs, score)
        forwarded = time.perf_counter()
        tensors = self._outcome(output, inputs, scores)
        times = StepTimes(
            prepare_s=prepared - started,
            forward_s=forwarded - prepared,
            sample_s=time.perf_counter() - forwarded,
        )
        return QueuedStep(plan.step, tensors, times)

    def _forward(self, inputs: StepInputs, score: Callable[[Tensor, int], None]) -> Tensor:
        """Runs this rank's layers between the stages before and after it; see ModelHook.forward."""
        pipeline, states = self._pipeline, None
        if pipeline is not None and not pipeline.is_first:
            states = pipeline.receive(inputs.batch.num_tokens)
        output = self._hook.forward(inputs, score, states)
        if pipeline is not None and not pipeline.is_last:
            pipeline.send(output)
        return output

    def _outcome(self, output: Tensor, inputs: StepInputs, scores: list[LogProbs]) -> StepTensors:
        """Samples where the logits are; every stage learns what came of it."""
        pipeline = self._pipeline
        count = 0 if pipeline is None else num_words(inputs)
        if pipeline is not None and not pipeline.is_last:
            return self._followed(pipeline.share(None, count), inputs) if count else StepTensors()
        tensors = StepTensors()
        if inputs.num_samples:
            tensors = self._choice.choose(self._of_vocabulary(output), inputs)
        if scores:
            tensors = structs.replace(tensors, scores=joined(scores))
        if pipeline is not None and count:
            pipeline.share(packed(tensors), count)
        return tensors

    def _followed(self, words: Tensor, inputs: StepInputs) -> StepTensors:
        """Takes what the last stage sampled and scored."""
        tensors = unpacked(words, inputs)
        if tensors.sampled is None:
            return tensors
        return structs.replace(tensors, failed=self._choice.follow(tensors.sampled, inputs))

    def _after_replay(self, plan: StepPlan, replay: "Replay", started: float) -> QueuedStep:
        """Queues what follows a graph: nothing, or the sampler where a row wants more than its best token."""
        forwarded = time.perf_counter()
        places = np.flatnonzero(np.frombuffer(plan.samples, dtype=np.uint8))
        rows, count = column_of(plan.rows)[places], len(places)
        if not count:
            times = StepTimes(forward_s=forwarded - started)
            return QueuedStep(plan.step, StepTensors(), times, is_captured=True)
        sampling = self._rows.sampling_of(rows)
        if (
            sampling.is_greedy.all()
            and not sampling.wants_log_probs.any()
            and not self._choice.has_rules(rows)
        ):
            tensors, arrived = StepTensors(told=replay.told[:count]), replay.ended
        else:
            positions = (column_of(plan.starts) + column_of(plan.lengths))[places]
            inputs = replay.outputs.inputs_of(rows, positions, sampling, num_top=self._rows.num_top_of(rows))
            tensors, arrived = self._choice.choose(replay.outputs.logits[:count], inputs), None
        times = StepTimes(forward_s=forwarded - started, sample_s=time.perf_counter() - forwarded)
        return QueuedStep(plan.step, tensors, times, is_captured=True, arrived=arrived)

    def _of_vocabulary(self, logits: Tensor) -> Tensor:
        """Leaves out the output layer's padding, which has logits and no tokens."""
        return logits[:, : self._config.vocab_size]


def _cache_shapes(shape: ModelShape) -> list[CacheShape]:
    return [
        CacheShape(
            num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim, value_head_dim=layer.value_head_dim
        )
        for layer in shape.attention_layers
    ]
