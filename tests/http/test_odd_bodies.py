"""Whatever is sent, the answer is the protocol's, and the server goes on: fuzzed with hypothesis."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megallm.http.bodies.schema_chat import ChatRequest
from megallm.http.bodies.schema_completions import CompletionRequest
from megallm.http.service import AppSettings, Bounds
from tests.http.serving import Served, frames_of, serving, serving_config, strict_json

pytestmark = pytest.mark.anyio

NUM_EXAMPLES = 100
"""Of each test on each loop."""

BOUNDS = Bounds(max_body_bytes=20_000, max_n=3, max_choices=4, schema_compile_s=2.0)
MAY_BE = {200, 400, 404, 413}
"""What a caller's body can bring about; never a failure of the server."""

type Strategy = st.SearchStrategy[Any]  # Any: what JSON holds

numbers: Strategy = st.one_of(
    st.integers(-3, 300), st.integers(), st.sampled_from([2**31, 2**63, -(2**63), 10**30]), st.floats()
)
texts: Strategy = st.one_of(
    st.text(max_size=20), st.sampled_from(["", "auto", "none", "json_object", "<|end|>", "\x00", "é世"])
)
leaves: Strategy = st.one_of(st.none(), st.booleans(), numbers, texts)
values: Strategy = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
roles: Strategy = st.sampled_from(["system", "developer", "user", "assistant", "tool", "wizard"])
messages: Strategy = st.lists(
    st.fixed_dictionaries(
        {"role": roles},
        optional={
            "content": st.one_of(st.none(), texts, st.lists(values, max_size=2)),
            "name": values,
            "tool_calls": st.one_of(st.none(), st.lists(values, max_size=2)),
            "prompt_token_ids": st.one_of(values, st.lists(st.integers(-1, 300), max_size=3)),
            "generation_token_ids": st.one_of(values, st.lists(st.integers(-1, 300), max_size=3)),
        },
    ),
    max_size=3,
)
prompts: Strategy = st.one_of(
    texts,
    st.lists(texts, max_size=3),
    st.lists(st.integers(-1, 300), max_size=6),
    st.lists(st.lists(numbers)),
    values,
)
formats: Strategy = st.one_of(
    values,
    st.just({"type": "json_object"}),
    st.fixed_dictionaries(
        {"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"schema": values})}
    ),
)
tools: Strategy = st.one_of(values, st.just([{"function": {"name": "f"}}]))
SPECIAL: dict[str, Strategy] = {
    "response_format": formats,
    "tools": tools,
    "stream": st.one_of(st.booleans(), values),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 30), values),
    "max_tokens": st.one_of(st.integers(-1, 60), values),
    "n": st.one_of(st.integers(-1, 5), values),
    "stop": st.one_of(texts, st.lists(texts, max_size=5), values),
}


def bodies(kind: type[CompletionRequest | ChatRequest], said: str) -> st.SearchStrategy[bytes]:
    """Gives bodies with some of a request's fields, each with something that may or may not fit."""
    names = sorted(set(kind.__struct_fields__) - {said, "model"})
    fields = st.lists(st.sampled_from(names), max_size=4, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: SPECIAL.get(name, values) for name in chosen})
    )

    def encoded(first: object, rest: dict[str, object]) -> bytes:
        return json.dumps({said: first, **rest}).encode()

    def cut(body: bytes, at: int) -> bytes:
        return body[: at % (len(body) + 1)]

    def encoded_value(value: object) -> bytes:
        return json.dumps(value).encode()

    whole = st.builds(encoded, messages if said == "messages" else prompts, fields)
    broken = st.builds(cut, whole, st.integers(0, 10_000))
    return st.one_of(whole, whole, whole, broken, st.binary(max_size=40), values.map(encoded_value))


@pytest.fixture
async def served(anyio_backend: str) -> AsyncGenerator[Served]:
    """Gives an app with a small context; the standing oracle holds after all examples."""
    config = serving_config(max_sequence_length=48, num_blocks=128)
    told = AppSettings(model_name="fake", parsers=("deepseek-r1-reasoning", "hermes"), bounds=BOUNDS)
    async with serving(config, settings=told) as running:
        yield running


async def expect_protocol(served: Served, url: str, body: bytes) -> None:
    """Fails unless a body gets an answer that the protocol has, whole or as a stream."""
    response = await served.post(url, body)
    assert response.status_code in MAY_BE, f"{response.status_code}: {response.text}"
    if response.headers["content-type"].startswith("text/event-stream"):
        frames = frames_of(response.content)
        assert frames[-1] == b"[DONE]"
        for each in frames[:-1]:
            assert "choices" in strict_json(each)
        return
    reply = strict_json(response.content)
    if response.status_code == 200:
        assert reply["choices"]
        assert all(choice["finish_reason"] in ("stop", "length", "tool_calls") for choice in reply["choices"])
    else:
        assert reply["error"].keys() == {"message", "type", "param", "code"}
        assert len(reply["error"]["message"]) < 2000


fuzzed = settings(
    max_examples=NUM_EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@fuzzed
@given(body=bodies(CompletionRequest, "prompt"))
async def test_no_completions_body_breaks_the_server(served: Served, body: bytes) -> None:
    """A body is the caller's, and so is its fault."""
    await expect_protocol(served, "/v1/completions", body)


@fuzzed
@given(body=bodies(ChatRequest, "messages"))
async def test_no_chat_body_breaks_the_server(served: Served, body: bytes) -> None:
    """The same, with templates, tools and parsers behind it."""
    await expect_protocol(served, "/v1/chat/completions", body)
