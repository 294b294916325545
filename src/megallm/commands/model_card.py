"""`megallm info`: what a checkpoint holds and costs, without loading it.

Architecture, parameters, bytes of the KV cache a token, and how many requests fit into a memory. Knows
the loader's readers; imports torch only for what can't be read without.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any, Final, TextIO

from megallm.commands.argument_types import DTYPES, share, whole

EXIT_OK = 0
GIB: Final = 2**30
MIB: Final = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    add = parser.add_argument
    add("source", nargs="?", default="smollm2-135m", metavar="SOURCE", help="a known name or a path")
    add(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="of weights and cache (default: %(default)s; a CPU loads float32)",
    )
    add(
        "--memory-gb",
        type=share(None),
        metavar="GB",
        help="memory for weights and cache (default: this machine's)",
    )
    add(
        "--context",
        type=whole(1),
        metavar="N",
        help="tokens of a request (default: the model's, 4096 at most)",
    )
    add("--json", action="store_true", help="one JSON object instead of text")


def run(options: argparse.Namespace, *, stdout: TextIO, memory_bytes: int | None = None) -> int:
    """Shows a model's figures; gives the exit code. `memory_bytes`: tests put a machine's there.

    Raises: what opening the checkpoint raises.
    """
    from megallm.models.load import find_file, first_step, open_checkpoint
    from megallm.models.loading_bar import loading_bar
    from megallm.models.model_facts import facts_of, requests_that_fit

    with loading_bar(is_shown=None) as bar:
        bar.say(first_step(options.source))
        checkpoint = open_checkpoint(find_file(options.source))
    size = checkpoint.hyperparameters
    facts = facts_of(size, options.dtype)
    if options.memory_gb is not None:
        memory = int(options.memory_gb * GIB)
    else:
        memory = _machine_bytes() if memory_bytes is None else memory_bytes
    context = options.context or min(size.max_positions, 4096)
    shown: dict[str, Any] = {  # Any: text and numbers
        "source": str(checkpoint.path),
        "architecture": architecture_of(size),
        "layers": size.num_layers,
        "hidden_size": size.hidden_size,
        "heads": size.num_heads,
        "kv_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "vocabulary": size.vocab_size,
        "context": size.max_positions,
        "parameters": facts.num_parameters,
        "active_parameters": facts.num_active_parameters,
        "dtype": options.dtype,
        "weight_bytes": facts.weight_bytes,
        "kv_bytes_per_token": facts.cache_bytes_per_token,
        "memory_bytes": memory,
        "requests": {
            "tokens_each": context,
            "fit": requests_that_fit(facts, memory_bytes=memory, context=context),
        },
    }
    stdout.write(json.dumps(shown) + "\n" if options.json else _readable(shown))
    stdout.flush()
    return EXIT_OK


def architecture_of(size: Any) -> str:  # Any: Hyperparameters, whose module takes a while to import
    """Gives the kind of decoder in words."""
    heads = "multi-head attention" if size.num_heads == size.num_kv_heads else "grouped-query attention"
    positions = "rotary positions" + (f" ({size.rope_scaling.kind})" if size.rope_scaling else "")
    if len(size.unturned_layers) == size.num_layers:
        positions = "no positions"
    parts = ["decoder", heads, positions]
    if size.layer_kinds is not None:
        parts[0] = f"hybrid decoder of layers {size.layer_kinds}"
    if size.has_qk_norm:
        parts.append("query and key norms")
    if size.windowed_layers:
        parts.append(f"window of {size.window + 1} tokens in {len(size.windowed_layers)} layers")
    if size.experts is not None:
        parts.append(f"{size.experts.num_chosen} of {size.experts.num_experts} experts")
    parts.append("tied embedding" if size.is_tied else "output projection of its own")
    return ", ".join(parts)


def _readable(shown: dict[str, Any]) -> str:  # Any: the same
    requests = shown["requests"]
    memory = f"{shown['memory_bytes'] / GIB:.1f} GiB"
    fit = f"{requests['fit']:,} of {requests['tokens_each']:,} tokens in {memory}, weights included"
    active = shown["active_parameters"]
    heads = f"{shown['heads']} heads of {shown['head_dim']}, {shown['kv_heads']} for keys and values"
    lines = {
        "source": shown["source"],
        "architecture": shown["architecture"],
        "layers": f"{shown['layers']} of {shown['hidden_size']:,}, {heads}",
        "vocabulary": f"{shown['vocabulary']:,} tokens",
        "context": f"{shown['context']:,} tokens",
        "parameters": f"{shown['parameters']:,}"
        + (f", {active:,} of them for a token" if active != shown["parameters"] else ""),
        "weights": f"{_size_of(shown['weight_bytes'])} in {shown['dtype']}",
        "KV cache": f"{shown['kv_bytes_per_token']:,} bytes a token",
        "requests": fit,
    }
    return "".join(f"{name + ':':14}{value}\n" for name, value in lines.items())


def _size_of(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / MIB:.2f} MiB"


def _machine_bytes() -> int:
    """Gives the first GPU's memory where there is one that the driver lists, else the machine's."""
    listed = sorted(Path("/proc/driver/nvidia/gpus").glob("*")) if os.name == "posix" else []
    if listed:
        import torch

        if torch.cuda.is_available():
            return torch.cuda.mem_get_info(0)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
