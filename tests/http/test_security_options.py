"""Options that are fine alone and were not together; caches of one caller that another could feel."""

import argparse
import ast
import itertools
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import structs

import megallm
from megallm.commands import serve
from megallm.http.serve_config import ServeConfig
from megallm.http.service import AppSettings, Bounds
from tests.http.serving import Served, frames_of, serving, serving_config, strict_json

pytestmark = pytest.mark.anyio

on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""What options mean does not depend on the loop."""

type Json = dict[str, Any]  # Any: JSON

COMMON: Final[dict[str, Json]] = {
    "temperature": {"temperature": 1.3},
    "top": {"top_k": 3, "top_p": 0.5, "min_p": 0.1},
    "choices": {"n": 3},
    "seed": {"seed": -5},
    "penalties": {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1.5},
    "biases": {"logit_bias": {"1": -100, "2": 100}},
    "least": {"min_tokens": 3},
    "stops": {"stop": ["a", "b"], "stop_token_ids": [3], "include_stop_str_in_output": True},
    "ends": {"ignore_eos": True, "skip_special_tokens": False},
    "stream": {"stream": True, "stream_options": {"include_usage": True}, "streaming_interval": 2},
    "grammar": {"guided_regex": "[ab]+"},
    "schema": {"response_format": {"type": "json_object"}},
    "order": {"priority": -3, "cache_salt": "s", "return_token_ids": True},
    "nothing": {"max_tokens": 0},
}
"""Each a set of fields that belong together."""
OPTIONS: Final[dict[str, dict[str, Json]]] = {
    "/v1/completions": COMMON
    | {"scores": {"logprobs": 3}, "echo": {"echo": True}, "prompts": {"prompt": [[1, 2], [3]]}},
    "/v1/chat/completions": COMMON
    | {
        "scores": {"logprobs": True, "top_logprobs": 3},
        "tools": {"tools": [{"function": {"name": "f"}}], "tool_choice": "required"},
        "goes on": {"continue_final_message": True},
    },
}
SAID: Final[dict[str, Json]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
}


@on_asyncio
@pytest.mark.parametrize("url", OPTIONS)
async def test_any_two_options_are_answered_or_refused(url: str) -> None:
    """CVE-2026-44223: a penalty ended the engine, though only beside one mode of another feature."""
    told = AppSettings(model_name="fake", parsers=("hermes",), bounds=Bounds(schema_compile_s=2.0))
    config = structs.replace(serving_config(), shares_prefixes=True, chunks_prompts=True)
    async with serving(config, settings=told) as served:
        for first, second in itertools.combinations(OPTIONS[url].values(), 2):
            await expect_answer(served, url, {**SAID[url], "max_tokens": 4, **first, **second})


async def expect_answer(served: Served, url: str, body: Json) -> None:
    """Fails unless a body is answered whole, or refused by the field's name."""
    response = await served.post(url, body)
    if response.status_code != 200:
        assert response.status_code == 400, f"{body}: {response.text}"
        assert response.json()["error"]["param"], f"{body}: {response.text}"
    elif body.get("stream"):
        *chunks, last = frames_of(response.content)
        assert last == b"[DONE]", body
        assert all("error" not in strict_json(chunk) for chunk in chunks), body
    else:
        assert all(choice["finish_reason"] for choice in strict_json(response.content)["choices"]), body


async def test_one_salt_sees_no_cache_of_another() -> None:
    """CVE-2025-46570: how fast an answer begins told what others had asked; `cached_tokens` would say it."""
    async with serving(structs.replace(serving_config(), shares_prefixes=True)) as served:
        asked = {"prompt": "a secret of some length", "max_tokens": 1, "temperature": 0}

        async def num_cached(salt: str | None) -> int:
            reply = await served.json("/v1/completions", {**asked, "cache_salt": salt})
            return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await num_cached("ann") == 0
        assert await num_cached("ann") > 0
        assert await num_cached("bob") == 0
        assert await num_cached(None) == 0
        assert await num_cached("bob") > 0


def test_no_code_reads_what_could_run_code() -> None:
    """CVE-2025-32444 and its kin: who takes pickle takes programs. CVE-2026-22807: checkpoints bring some."""
    unsafe = {"load", "loads", "Unpickler", "eval", "exec", "trust_remote_code"}
    modules = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch"}
    found: list[str] = []
    for path in Path(megallm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id=module), attr=name) if (
                    module in modules and name in unsafe
                ):
                    found.append(f"{path.name}:{node.lineno}: {module}.{name}")
                case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                    found.append(f"{path.name}:{node.lineno}: {name}")
                case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                    found.append(f"{path.name}:{node.value.lineno}: trust_remote_code")
                case _:
                    pass
    assert not found


def test_the_command_listens_on_this_machine_alone_unless_it_is_told_otherwise() -> None:
    """CVE-2025-30202: a port that was open to everybody, and nobody knew."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    options = parser.parse_args([])
    with ServeConfig(host=options.host, port=0).listen() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
