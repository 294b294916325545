"""Models and runners for the device tests: built once a session, bound afresh in every test."""

from collections.abc import Callable, Iterator

import pytest

from megallm.core_async.config import EngineConfig
from megallm.core_async.device.runner import TorchRunner
from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron
from tests.device import models
from tests.device.models import Megatron
from tests.device.plans import Planner, engine_config

BUILDERS: dict[str, Callable[[], Megatron]] = {
    "grouped heads": models.gpt,
    "one kv head per head": lambda: models.gpt(num_query_groups=4),
    "one kv head": lambda: models.gpt(num_query_groups=1),
    "query and key norms, biases": lambda: models.gpt(
        spec={"qk_layernorm": True}, qk_layernorm=True, add_qkv_bias=True, add_bias_linear=True
    ),
    "tied, interleaved rotary": lambda: models.gpt(
        model={"share_embeddings_and_output_weights": True}, rotary_interleaved=True
    ),
    "part of the head turns": lambda: models.gpt(model={"rotary_percent": 0.5}),
    "some layers do not turn": lambda: models.gpt(no_rope_freq=3),
    "yarn": models.yarn,
    "two rotary tables": models.two_rotary_tables,
    "latent attention, yarn": lambda: models.mla(
        rope_type="yarn",
        rotary_scaling_factor=4.0,
        original_max_position_embeddings=16,
        mscale=1.0,
        mscale_all_dim=0.5,
    ),
    "no positions": lambda: models.gpt(model={"position_embedding_type": "none"}),
    "learned positions": lambda: models.gpt(model={"position_embedding_type": "learned_absolute"}),
    "window on some layers": lambda: models.gpt(window_size=(5, 0), window_attn_skip_freq=2),
    "scaled scores": lambda: models.gpt(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True),
    "learned sinks": lambda: models.gpt(softmax_type="learnable"),
    "sinks of zero": lambda: models.gpt(softmax_type="off-by-one"),
    "mixture of experts": models.moe,
    "latent attention": models.mla,
    "hybrid": models.hybrid,
}
_built: dict[str, Megatron] = {}


def built(name: str) -> Megatron:
    """Gives a small model by name; the same object all session long."""
    if name not in _built:
        with quiet_megatron():
            ensure_process_groups()
            _built[name] = BUILDERS[name]()
    return _built[name]


@pytest.fixture(params=list(BUILDERS))
def any_model(request: pytest.FixtureRequest) -> Megatron:
    """Gives each kind of small model."""
    return built(request.param)


@pytest.fixture
def model() -> Megatron:
    """Gives the small model with grouped heads."""
    return built("grouped heads")


type StartRunner = Callable[..., Planner]


@pytest.fixture
def start() -> Iterator[StartRunner]:
    """Gives a function that binds a model to a runner and gives a planner; unbound after the test."""
    runners: list[TorchRunner] = []

    def start_runner(model: Megatron, config: EngineConfig | None = None, *, seed: int = 0) -> Planner:
        limits = engine_config() if config is None else config
        runner = TorchRunner(model, limits)
        runner.start()
        runners.append(runner)
        return Planner(runner, limits, seed=seed)

    yield start_runner
    for runner in runners:
        runner.close()
