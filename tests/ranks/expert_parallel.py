"""One rank's program: its part of a mixture of experts, driven by hand, and what it samples.

Where the experts are spread over two replicas, each replica's steps are its own, and only their number is the
same. The whole model's runner, driven by the same steps, has to give the same.
"""

import json
import random
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from torch import distributed

from megallm.core_async.device.expert_layers import GATHERED, SENT
from megallm.core_async.device.model import ModelHook
from megallm.core_async.device.runner import TorchRunner
from megallm.core_async.errors import UnsupportedModelError
from megallm.core_async.messages import Sampling
from megallm.models.megatron_setup import quiet_megatron
from tests.device.models import Megatron
from tests.device.plans import Planner, engine_config
from tests.ranks.split_moe import cpu_as_cuda, split_moe

NUM_RANKS = 2
NUM_STEPS = 6
NUM_SEQUENCES = 3
NUM_INTERLEAVINGS = 20

type Steps = list[list[int]]
"""For each step the most tokens that each sequence may compute; 0 is none."""
type Outputs = list[tuple[list[int], list[float]]]
"""Of each sequence its tokens, and their log-probs."""


class Split(NamedTuple):
    """Over how many ranks the model is split, in each of megatron's ways."""

    tp: int
    ep: int
    etp: int
    sequence_parallel: bool = False

    @property
    def is_spread(self) -> bool:
        """Whether each rank is a replica."""
        return self.tp == 1


SPLITS = {
    "whole experts, two replicas": Split(tp=1, ep=2, etp=1),
    "halves of experts, two replicas": Split(tp=1, ep=1, etp=2),
    "whole experts, one replica": Split(tp=2, ep=2, etp=1, sequence_parallel=True),
    "halves of experts, one replica": Split(tp=2, ep=1, etp=2),
}
DISPATCHERS = (GATHERED, SENT)

IDLE: Steps = [[0, 0, 0]] * NUM_STEPS
BUSY: Steps = [[5, 9, 3], *[[9, 1, 1]] * (NUM_STEPS - 1)]
FEWER: Steps = [[1, 0, 0]] * NUM_STEPS
FIXED = {
    "both": (BUSY, BUSY[::-1]),
    "fewer": (BUSY, FEWER),
    "more": (FEWER, BUSY),
    "second is idle": (BUSY, IDLE),
    "first is idle": (IDLE, BUSY),
    "nobody": (IDLE, IDLE),
}


REFUSED = {
    "moe_token_dispatcher_type": "flex",
    "moe_expert_capacity_factor": 1.5,
    "moe_permute_fusion": True,
    "moe_router_fusion": True,
}
"""Options that need as many tokens on each rank, or some."""


def cases(split: str, dispatcher: str) -> dict[str, tuple[Steps, Steps]]:
    """Gives the steps of both replicas in each case of a model."""
    if split == "halves of experts, two replicas" and dispatcher == SENT:
        return {}  # gloo, unlike NCCL, can't gather unequal numbers of tokens
    if split != next(iter(SPLITS)):
        return {"fewer": FIXED["fewer"]}
    seeds = range(DISPATCHERS.index(dispatcher), NUM_INTERLEAVINGS, len(DISPATCHERS))
    return FIXED | {f"seed {seed}": (interleaving(seed, 0), interleaving(seed, 1)) for seed in seeds}


def interleaving(seed: int, replica: int) -> Steps:
    """Draws a replica's steps: a third of them without tokens."""
    source = random.Random(seed * NUM_RANKS + replica)
    return [
        [source.choice((0, 1, 6)) if source.random() < 2 / 3 else 0 for _ in range(NUM_SEQUENCES)]
        if source.random() < 2 / 3
        else [0] * NUM_SEQUENCES
        for _ in range(NUM_STEPS)
    ]


def prompts(replica: int) -> list[list[int]]:
    """Gives a replica's prompts."""
    source = random.Random(replica)
    return [[source.randrange(96) for _ in range(length)] for length in (7, 9, 1)]


def drive(runner: TorchRunner, replica: int, steps: Steps) -> Outputs:
    """Runs a replica's steps."""
    planner = Planner(runner, engine_config(), seed=replica)
    sampling = Sampling(temperature=0.0, wants_log_probs=True)
    sequences = [planner.add(prompt, sampling) for prompt in prompts(replica)]
    for most in steps:
        work = zip(sequences, most, strict=True)
        planner.step(*((each, min(count, each.num_pending)) for each, count in work if count))
    return [(each.output, each.log_probs) for each in sequences]


def run_cases(model: Megatron, replica: int, drawn: Mapping[str, tuple[Steps, Steps]]) -> dict[str, Outputs]:
    """Runs a replica's steps of every case on one runner."""
    runner = TorchRunner(model, engine_config())
    runner.start()
    try:
        return {name: drive(runner, replica, steps[replica]) for name, steps in drawn.items()}
    finally:
        runner.close()


def refusal(model: Megatron, option: str, value: object) -> str:
    """Gives what a runner says of an option."""
    kept = getattr(model.config, option)
    setattr(model.config, option, value)
    try:
        TorchRunner(model, engine_config())
    except UnsupportedModelError as error:
        return str(error)
    finally:
        setattr(model.config, option, kept)
    return "taken"


def run_split(name: str) -> dict[str, object]:
    """Runs the cases of a model split in one way, with both ways for tokens to reach experts."""
    split = SPLITS[name]
    with quiet_megatron():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=split.tp,
            expert_model_parallel_size=split.ep,
            expert_tensor_parallel_size=split.etp,
            create_gloo_process_groups=False,
        )
    replica = distributed.get_rank() if split.is_spread else 0
    report: dict[str, object] = {}
    for dispatcher in DISPATCHERS:
        needs_cuda = dispatcher == SENT
        with quiet_megatron(), cpu_as_cuda() if needs_cuda else nullcontext():
            model = split_moe(dispatcher, sequence_parallel=split.sequence_parallel)
            experts = ModelHook(model).experts
            report[dispatcher] = run_cases(model, replica, cases(name, dispatcher))
            report["experts"] = [experts.ranks, experts.is_spread]
            report["is unbound"] = "token_dispatch" not in vars(model.decoder.layers[0].mlp.token_dispatcher)
            report["refused"] = {option: refusal(model, option, value) for option, value in REFUSED.items()}
    parallel_state.destroy_model_parallel()
    return report


def main() -> None:
    """Runs every way to split the model on one pair of processes: their start is what takes long."""
    distributed.init_process_group("gloo")
    print(json.dumps({name: run_split(name) for name in SPLITS}), flush=True)  # noqa: T201 - the parent reads it
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
