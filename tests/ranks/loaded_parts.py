"""One rank's program: models loaded in parts, as under torchrun, and the logits of all ranks together.

Nothing here sets up process groups: `load_model` does. Each rank prints one JSON line of what it saw.
"""
# megatron-core is untyped, torch in part:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed

from megallm import InferenceConfig, MegatronLLM, load_model
from tests.device.models import cpu_is_current, plain_attention
from tests.models.engine_tokens import SETTINGS
from tests.models.tiny_hf import PROMPT
from tests.ranks.tensor_parallel import seen
from tests.small_llm import greedy

if TYPE_CHECKING:
    from megallm.models.gpt import ModelClass


def load(
    source: Path, *, tp: int = 1, pp: int = 1, ep: int = 1, model_class: "ModelClass | None" = None
) -> tuple[Any, Any]:  # Any: megatron's model and its tokenizer
    """Loads this rank's part of a model, split anew."""
    parallel_state.destroy_model_parallel()
    return load_model(source, device="cpu", dtype="float32", tp=tp, pp=pp, ep=ep, model_class=model_class)


@torch.inference_mode()
def logits(model: Any) -> list[list[float]] | None:  # Any: the same
    """Gives the prompt's logits, `[tokens, vocab]`, on the ranks of the last stage."""
    ids, positions = torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None]
    group: Any = parallel_state.get_pipeline_model_parallel_group()  # Any: the same
    stages = distributed.get_process_group_ranks(group)
    stage = distributed.get_rank(group)
    if stage:
        states = torch.empty(len(PROMPT), 1, model.config.hidden_size)
        distributed.recv(states, stages[stage - 1], group=group)
        model.set_input_tensor(states)
    with plain_attention(model), cpu_is_current():
        output: Tensor = model(ids, positions, None)
    if stage == len(stages) - 1:
        return output[0].tolist()
    distributed.send(output, stages[stage + 1], group=group)
    return None


def generated(model: Any, tokenizer: Any) -> list[int] | None:  # Any: the same
    """Gives the greedy continuation through an engine over all ranks."""
    with MegatronLLM(model=model, tokenizer=tokenizer, inference_config=InferenceConfig(**SETTINGS)) as llm:
        if not llm.is_primary_rank:
            return None
        return llm.generate([PROMPT], greedy(8))[0].generated_tokens


def main() -> None:
    """Loads each folder of the command line in each way that it is asked for."""
    folders = {path.name: path for path in map(Path, sys.argv[1:])}
    report: dict[str, object] = {
        "world": seen(lambda: load_model(folders["llama"], tp=4)),
        "heads": seen(lambda: load_model(folders["single"], tp=2)),
        "untouched": not distributed.is_initialized(),
    }
    model, tokenizer = load_model(folders["llama"], device="cpu", dtype="float32", tp=2)
    report["backend"] = distributed.get_backend()
    report["differs"] = seen(lambda: load_model(folders["llama"], pp=2))
    report["llama tp"] = logits(model)
    report["llama ids"] = generated(model, tokenizer)
    report["rows"] = [len(model.embedding.word_embeddings.weight), model.vocab_size]
    report["run tp"] = logits(load(folders["run"], tp=2)[0])
    report["run pp"] = logits(load(folders["run"], pp=2)[0])
    report["gguf tp"] = logits(load(folders["tiny.gguf"], tp=2)[0])
    report["llama hybrid pp"] = logits(load(folders["llama"], pp=2, model_class="hybrid")[0])
    report["mixtral tp"] = logits(load(folders["mixtral"], tp=2)[0])
    report["mixtral pp"] = logits(load(folders["mixtral"], pp=2)[0])
    model, tokenizer = load(folders["tied"], pp=2)
    report["tied pp"] = logits(model)
    report["tied ids"] = generated(model, tokenizer)
    model, tokenizer = load(folders["mixtral"], tp=2, ep=2)
    report["mixtral ep"] = logits(model)
    report["mixtral ids"] = generated(model, tokenizer)
    print(json.dumps(report), flush=True)  # noqa: T201 - the parent reads it
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
