"""What asks for too much is refused by name before anything is tokenised or queued."""

import pytest

from megallm.http.service import Bounds
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

C, H = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, object]] = {
    C: {"prompt": "a"},
    H: {"messages": [{"role": "user", "content": "a"}]},
}
TIGHT = Bounds(
    max_body_bytes=4000,
    max_prompts=2,
    max_choices=3,
    max_n=4,
    max_logprobs=2,
    max_top_logprobs=2,
    max_stop_words=2,
    max_stop_characters=5,
    max_stop_token_ids=2,
    max_logit_bias=2,
    max_messages=2,
    max_tools=1,
    max_schema_bytes=50,
)
TOOL = {"type": "function", "function": {"name": "f"}}
LONG: dict[str, object] = {"type": "object", "properties": {"x" * 60: {}}}


REFUSED: list[tuple[str, dict[str, object], str]] = [
    (C, {"prompt": ["a", "b", "c"]}, "prompt"),
    (C, {"prompt": ["a", "b"], "n": 2}, "n"),
    (C, {"n": 5}, "n"),
    (H, {"n": 4}, "n"),
    (C, {"logprobs": 3}, "logprobs"),
    (H, {"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
    (H, {"top_logprobs": 1}, "top_logprobs"),
    (C, {"stop": ["a", "b", "c"]}, "stop"),
    (H, {"stop": ["a", "bbbbbb"]}, "stop[1]"),
    (H, {"stop": [""]}, "stop"),
    (C, {"stop_token_ids": [1, 2, 3]}, "stop_token_ids"),
    (C, {"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias"),
    (H, {"messages": [{"role": "user", "content": "a"}] * 3}, "messages"),
    (H, {"messages": []}, "messages"),
    (H, {"tools": [TOOL, TOOL]}, "tools"),
    (H, {"tools": [{"function": {"name": "f", "parameters": LONG}}]}, "tools[0].function.parameters"),
    (C, {"guided_json": LONG}, "guided_json"),
    (C, {"guided_regex": "a" * 51}, "guided_regex"),
    (C, {"structured_outputs": {"choice": ["a" * 60]}}, "structured_outputs.choice"),
    (
        H,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": LONG}}},
        "response_format.json_schema.schema",
    ),
    (C, {"best_of": 2}, "best_of"),
    (C, {"suffix": "x"}, "suffix"),
    (C, {"multi_modal_data": {"image": "x"}}, "multi_modal_data"),
    (C, {"prompt": []}, "prompt"),
    (C, {"prompt": ""}, "prompt"),
    (C, {"prompt": [[1], []]}, "prompt[1]"),
    (C, {"prompt": [1, 2**40]}, "prompt"),
    (C, {"prompt": [[1], [-1]]}, "prompt[1]"),
    (C, {"prompt": [[1], "a"]}, "prompt[1]"),
]


@pytest.mark.parametrize(("url", "extra", "param"), REFUSED)
async def test_it_is_refused_by_name(url: str, extra: dict[str, object], param: str) -> None:
    """A huge `n`, a long list or a deep schema cost the server nothing."""
    async with serving(bounds=TIGHT, checks_idle=False) as served:
        error = await served.refused(url, {**BODIES[url], **extra})
        assert error["param"] == param
        assert served.counts.told == []
        assert not served.runner.plans


async def test_what_is_within_all_limits_is_not_refused() -> None:
    """A limit is the last that passes."""
    async with serving(bounds=TIGHT, checks_idle=False) as served:
        body = {"prompt": ["a"], "n": 3, "logprobs": 2, "stop": ["a", "bbbbb"], "stop_token_ids": [1, 2]}
        more = {"logit_bias": {"1": 1, "2": 1}, "best_of": 3, "suffix": "", "max_tokens": 1}
        assert len((await served.json(C, {**body, **more}))["choices"]) == 3


@pytest.mark.parametrize("url", [C, H])
async def test_a_body_that_is_too_long_is_413(url: str) -> None:
    """Declared or not, it is not read to its end."""
    async with serving(bounds=TIGHT, checks_idle=False) as served:
        body = {**BODIES[url], "user": "x" * 5000}
        assert "longer" in (await served.refused(url, body, 413))["message"]


async def test_more_than_may_wait_is_429() -> None:
    """A client with patience comes again."""
    async with serving(bounds=Bounds(max_waiting=1), checks_idle=False) as served:
        response = await served.post(C, {"prompt": "a", "n": 2})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert response.json()["error"]["code"] == "engine_busy"
