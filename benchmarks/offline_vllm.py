"""vLLM on the cases of `offline`, beside which its figures are meant to be read: same prompts, same shapes.

In a process of its own, since either engine takes a GPU's memory for itself. The weights are vLLM's own
random ones (`load_format="dummy"`), its settings the defaults but for the prefix cache, which is off, and
as many requests at once as a case has. Every case runs once to warm up. Its lines are of suite `offline`,
to be kept beside those of megallm. Needs a CUDA device and vLLM.
"""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# (vLLM is no dependency of the project)

import argparse
import importlib
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec import Struct

from benchmarks.load import Case
from benchmarks.offline import cases_of
from benchmarks.report import Cell, Report, Table, show_progress, significant
from benchmarks.shapes import SHAPES
from megallm.models.checkpoint import Hyperparameters

MAX_LENGTH: Final = 4096
MEMORY_SHARE: Final = 0.8
"""Of the GPU, for weights and cache."""


class Peer(Protocol):
    """What of vLLM is used."""

    version: str

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> int:
        """Generates so many tokens for each prompt, greedily, and gives how many came."""
        ...


class Opened(Struct, frozen=True, eq=False):
    """A started peer."""

    peer: Peer
    ready_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add("--model", default="shape-0.6b", choices=SHAPES, help="random weights (default: %(default)s)")
    add(
        "--cases",
        type=cases_of,
        default="1:128:128,32:512:128,128:512:128,256:512:128,mix",
        metavar="CASE,...",
        help="as of `offline` (default: %(default)s)",
    )
    add("--repetitions", type=int, default=1, metavar="N", help="default: %(default)s")


def run(options: argparse.Namespace) -> Report:
    """Measures every case."""
    if importlib.util.find_spec("vllm") is None:
        return Report("offline", [], [], ["nothing measured: vLLM is not installed"])
    show_progress(f"offline_vllm: starting on {options.model}")
    shape = SHAPES[options.model]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(shape)), encoding="utf-8")
        began = time.perf_counter()
        peer = _Vllm(folder, max_requests=max(case.num_prompts for case in options.cases))
        opened = Opened(peer, time.perf_counter() - began)
        return measured(opened, options.model, options.cases, options.repetitions)


def measured(opened: Opened, model: str, cases: Sequence[Case], repetitions: int) -> Report:
    """Runs the cases on a started peer."""
    engine = f"vLLM {opened.peer.version}"
    results: list[dict[str, object]] = []
    rows: list[tuple[Cell, ...]] = []
    for case in cases:
        show_progress(f"offline_vllm: {case.name}")
        prompts = case.prompts(SHAPES[model].vocab_size)
        walls = [_wall_s(opened.peer, prompts, case) for _ in range(repetitions + 1)][1:]
        speed = significant(case.num_output_tokens / statistics.median(walls))
        results.append({"engine": engine, "shape": model, "case": case.name, "output_tok_s": speed})
        rows.append((case.name, engine, speed))
    notes = [f"{engine}: ready after {opened.ready_s:.1f} s"]
    results.append({"engine": engine, "shape": model, "ready_s": significant(opened.ready_s)})
    return Report(
        "offline",
        [Table(f"Tokens per second: {model}", ("case", "engine", "output_tok_s"), rows)],
        results,
        notes,
    )


def config_of(shape: Hyperparameters) -> dict[str, object]:
    """Gives a shape as the `config.json` of a Llama model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rotary_base,
        "tie_word_embeddings": shape.is_tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def _wall_s(peer: Peer, prompts: Sequence[list[int]], case: Case) -> float:
    began = time.perf_counter()
    count = peer.generate(prompts, case.output_lengths)
    seconds = time.perf_counter() - began
    if count != case.num_output_tokens:
        raise RuntimeError(f"{case.name}: {count} tokens came, {case.num_output_tokens} were asked for")
    return seconds


class _Vllm:
    """`vllm.LLM`. Any: vLLM is not there where types are checked."""

    def __init__(self, folder: str, *, max_requests: int) -> None:
        self._library: Any = importlib.import_module("vllm")
        self.version: str = self._library.__version__
        self._llm: Any = self._library.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MAX_LENGTH,
            gpu_memory_utilization=MEMORY_SHARE,
            enable_prefix_caching=False,
            max_num_seqs=max_requests,
            disable_log_stats=True,
        )

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> int:
        """See `Peer.generate`."""
        params = [
            self._library.SamplingParams(
                max_tokens=length, ignore_eos=True, temperature=0.0, detokenize=False
            )
            for length in lengths
        ]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(given, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)
