"""One rank's program that runs until a rank is lost, and says what each of its waiters got.

Arguments: what the last rank does wrong by itself, "nothing" (the test kills or stops a process) or "raise";
and whether the ranks are "tensor"-parallel, "stages" of a pipeline, "replicas", or replicas with "experts"
that each holds a part of.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from megatron.core import parallel_state
from torch import distributed

from megallm import MegatronLLM
from megallm.core_async.ranks.coordinator import Coordinator
from megallm.core_async.result import Result
from megallm.models.megatron_setup import quiet_megatron
from tests.fakes import FakeTokenizer
from tests.ranks.split_moe import cpu_as_cuda, split_moe
from tests.ranks.staged_model import Layout, staged_gpt
from tests.small_llm import greedy, settings

NUM_FORWARDS = 50
"""Before the rank raises that is to raise."""


def outcome(call: Callable[[], object]) -> dict[str, object]:
    """Makes a call until it raises, and gives the error and its cause."""
    try:
        while True:
            call()
    except Exception as error:  # noqa: BLE001 - which one it is, is the test's matter
        return {"error": repr(error), "cause": repr(error.__cause__), "at": time.time()}


def break_later(model: Any) -> None:  # Any: megatron's model
    """Makes the model raise after some passes."""
    passes: list[int] = []

    def before(_module: object, _args: object) -> None:
        passes.append(1)
        if len(passes) > NUM_FORWARDS:
            raise ArithmeticError("the weights are broken")

    model.decoder.layers[0].register_forward_pre_hook(before)


def model_of(kind: str, num_ranks: int) -> Any:  # Any: megatron's model
    """Gives this rank's part of a model."""
    layouts = {"tensor": Layout(tp=num_ranks), "stages": Layout(pp=num_ranks)}
    layout = layouts.get(kind, Layout())
    with quiet_megatron():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            expert_model_parallel_size=num_ranks if kind == "experts" else 1,
            create_gloo_process_groups=False,
        )
        return split_moe("alltoall") if kind == "experts" else staged_gpt(layout)


def generate(llm: MegatronLLM) -> list[Result]:
    """Generates from some prompts."""
    return llm.generate([[1, 2, 3], [4, 5], [6], [7]], greedy(100), progress=False)


def until_alone(llm: MegatronLLM) -> dict[str, object]:
    """Generates until no other replica is left; gives what failed requests said, and what comes then."""
    assert isinstance(llm.engine, Coordinator), llm.engine
    failures: list[str] = []
    while llm.engine.replicas.links:
        failures += [str(result.stop_reason) for result in generate(llm) if result.failed()]
    at = time.time()
    return {"failures": failures, "at": at, "after": [result.generated_length for result in generate(llm)]}


def main() -> None:
    """Runs until the engine has failed; every waiter's outcome is a line of the report."""
    distributed.init_process_group("gloo")
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    fault, kind = sys.argv[1:]
    model = model_of(kind, num_ranks)
    if fault == "raise" and rank == num_ranks - 1:
        break_later(model)
    llm = MegatronLLM(model=model, tokenizer=FakeTokenizer(), inference_config=settings())
    calls: dict[str, Callable[[], object]] = {"wait_for_shutdown": llm.wait_for_shutdown}
    goes_on = kind == "replicas" and llm.is_primary_rank
    if llm.is_primary_rank:
        calls["generate"] = lambda: generate(llm)
    else:
        calls["pause"] = llm.pause
    if goes_on:
        calls.clear()
    report: dict[str, object] = {}

    def wait(name: str) -> None:
        report[name] = outcome(calls[name])

    waiters = [threading.Thread(target=wait, args=(name,)) for name in calls]
    for waiter in waiters:
        waiter.start()
    if llm.is_primary_rank:
        next(llm.stream([6], greedy(2)))  # so the ranks run, and the waiters are among what they run
    print("running", flush=True)  # noqa: T201 - the parent reads it
    for waiter in waiters:
        waiter.join()
    if goes_on:
        report |= until_alone(llm)
    llm.shutdown()
    print(json.dumps(report), flush=True)  # noqa: T201 - the same


if __name__ == "__main__":
    with cpu_as_cuda() if "experts" in sys.argv else nullcontext():
        main()
