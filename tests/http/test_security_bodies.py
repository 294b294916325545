"""Bodies made to break a server: too long, too deep, no JSON, or what another server once fell over."""

import json
import re
import socket
from typing import Any, Final

import httpx
import pytest
from msgspec import structs

from megallm.http.service import AppSettings, Bounds
from tests.http.serving import ChatTokenizer, Served, serving, strict_json
from tests.http.walled import walled

pytestmark = pytest.mark.anyio

on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""What a body is taken for does not depend on the loop."""
C, H, R = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER: Final = {"role": "user", "content": "hi"}
type Json = dict[str, Any]  # Any: JSON
BODIES: Final[dict[str, Json]] = {C: {"prompt": "hi"}, H: {"messages": [USER]}, R: {"input": "hi"}}
INTERNALS: Final = re.compile(
    r"0x[0-9a-f]{4}|Traceback|File \"|\.py\b|/src/|site-packages| object at |<class |msgspec|jinja2|torch\b"
)
"""What only an exception's own text has."""
BOUNDS: Final = Bounds(max_body_bytes=100_000, schema_compile_s=2.0)


def refused(response: httpx.Response, *statuses: int) -> Json:
    """Gives the error of a reply that has to be one, and says nothing of the server's inside."""
    assert response.status_code in (statuses or (400,)), response.text
    assert not INTERNALS.search(response.text), response.text
    error = strict_json(response.content)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert len(response.content) < 3000
    return error


async def post(served: Served, url: str, extra: Json) -> httpx.Response:
    """Posts a short request with something more."""
    limit = "max_output_tokens" if url == R else "max_tokens"
    return await served.post(url, {**BODIES[url], limit: 2, **extra})


DEEP: Final = 100_000
ODD: Final[dict[str, bytes]] = {
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "-Infinity": b'{"prompt": "a", "logit_bias": {"1": -Infinity}}',
    "beyond a float": b'{"prompt": "a", "temperature": 1e999}',
    "beyond any number": b'{"prompt": "a", "seed": ' + b"9" * 20_000 + b"}",
    "deep lists": b'{"prompt": ' + b"[" * DEEP,
    "deep objects": b'{"prompt": "a", "metadata": ' + b'{"a":' * (DEEP // 10),
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "two values": b'{"prompt": "a"}{"prompt": "b"}',
    "a comment": b'{"prompt": "a" /* none */}',
    "an empty key": b'{"": 1}',
    "a NUL": b'{"prompt": "a"}\x00',
}


@pytest.mark.parametrize("name", ODD)
async def test_what_is_no_json_is_refused_and_nothing_runs(name: str) -> None:
    """NaN is JSON to Python and to nobody else; depth ends in a stack that overflows."""
    async with serving() as served:
        refused(await served.post(C, ODD[name]))
        assert served.engine.stats().step == 0


@pytest.mark.parametrize("depth", [500, 5000])
@pytest.mark.parametrize(
    ("url", "field"),
    [
        (C, "unknown"),
        (C, "guided_json"),
        (H, "metadata"),
        (H, "chat_template_kwargs"),
        (H, "tools"),
        (R, "metadata"),
    ],
)
async def test_depth_anywhere_is_no_failure(url: str, field: str, depth: int) -> None:
    """llama.cpp PR#22606: each level is a call of whatever reads it next."""
    nest = b'{"a":' * depth + b"1" + b"}" * depth
    wrapped = {
        "chat_template_kwargs": b'{"enable_thinking": ' + nest + b"}",
        "tools": b'[{"function": {"name": "f", "parameters": ' + nest + b"}}]",
    }.get(field, nest)
    body = json.dumps(BODIES[url])[:-1].encode() + b', "' + field.encode() + b'": ' + wrapped + b"}"
    async with serving() as served:
        response = await served.post(url, body)
        if response.status_code != 200:
            refused(response)


async def test_of_a_field_that_comes_twice_the_one_that_is_checked_is_the_one_that_counts() -> None:
    """Two readers of one body that disagree let pass what each of them alone would refuse."""
    async with serving() as served:
        body = b'{"prompt": "a", "max_tokens": 1, "n": %d, "n": %d}'
        refused(await served.post(C, body % (1, 100_000)))
        reply = (await served.post(C, body % (100_000, 1))).json()
        assert len(reply["choices"]) == 1


EMPTY: Final[dict[str, tuple[str, object]]] = {
    "no text": (C, {"prompt": ""}),
    "no prompts": (C, {"prompt": []}),
    "a prompt without ids": (C, {"prompt": [[]]}),
    "one of two texts": (C, {"prompt": ["a", ""]}),
    "no prompt at all": (C, {"prompt": None}),
    "embeddings instead": (C, {"prompt_embeds": "AAAA"}),
    "no messages": (H, {"messages": []}),
    "a message without a role": (H, {"messages": [{"content": "a"}]}),
    "no input": (R, {"input": []}),
}


@pytest.mark.parametrize("name", EMPTY)
async def test_nothing_to_go_on_from_is_refused(name: str) -> None:
    """CVE-2024-8768: an empty prompt ended the server. CVE-2025-62164: tensors from outside are not read."""
    url, body = EMPTY[name]
    async with serving() as served:
        refused(await served.post(url, body))
        assert served.engine.stats().step == 0


@pytest.mark.parametrize("token", [-1, -(2**31), 257, 259, 2**31, 2**32 + 1, 2**63, 10**30])
async def test_a_token_that_is_none_is_refused_wherever_it_stands(token: int) -> None:
    """CVE-2026-21869: a negative number became a place in memory."""
    async with serving() as served:
        last = served.engine.config.vocab_size - 1
        odd = token if not 0 <= token <= last else last + 1
        for url, extra in (
            (C, {"prompt": [1, odd]}),
            (C, {"prompt": [[1], [odd]]}),
            (C, {"stop_token_ids": [odd]}),
            (C, {"logit_bias": {str(odd): 1}}),
            (H, {"logit_bias": {str(odd): 1}}),
        ):
            refused(await post(served, url, extra))
        refused(await served.post("/detokenize", {"tokens": [odd]}))
        for name in ("max_tokens", "min_tokens", "n", "logprobs", "top_k", "streaming_interval"):
            refused(await post(served, C, {name: -abs(token) - 1}))
        assert served.engine.stats().step == 0


FANS: Final[dict[str, tuple[str, Json]]] = {
    "n": (C, {"n": 10**9}),
    "n of a chat": (H, {"n": 10**9}),
    "n times prompts": (C, {"prompt": ["a"] * 2000, "n": 100}),
    "prompts": (C, {"prompt": [[1]] * 5000}),
    "best_of": (C, {"best_of": 10**9}),
    "n times tokens": (C, {"n": 2, "max_tokens": 10**9}),
    "log-probs": (C, {"logprobs": 10**9}),
    "likeliest": (H, {"logprobs": True, "top_logprobs": 10**9}),
    "stop strings": (C, {"stop": ["x"] * 1000}),
    "a long stop string": (C, {"stop": "x" * 50_000}),
    "stop tokens": (C, {"stop_token_ids": [1] * 10_000}),
    "biases": (C, {"logit_bias": {str(token): 1 for token in range(10_000)}}),
    "messages": (H, {"messages": [{"role": "user", "content": ""}] * 5000}),
    "tools": (H, {"tools": [{"function": {"name": "f"}}] * 1000}),
    "a long choice": (C, {"guided_choice": ["x" * 70_000]}),
}


@pytest.mark.parametrize("name", FANS)
async def test_a_small_body_that_asks_for_much_is_refused_before_it_is_multiplied(name: str) -> None:
    """CVE-2024-8939, CVE-2026-34756: a billion choices were made before anybody counted."""
    url, extra = FANS[name]
    async with serving() as served:
        before = served.engine.next_request_id()
        assert refused(await post(served, url, extra))["param"]
        assert served.engine.next_request_id() - before <= 2
        assert served.engine.stats().step == 0


@pytest.mark.parametrize(
    "kind", ["image_url", "input_image", "video_url", "input_audio", "audio_url", "file", "input_file"]
)
async def test_nothing_is_fetched_for_a_message(kind: str) -> None:
    """CVE-2025-6242 and its kin: the server's network is no caller's. CVE-2026-22773: there is no image."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        part = {"type": kind, kind: {"url": url}, "text": url, "url": url}
        async with serving() as served:
            refused(await served.post(H, {"messages": [{"role": "user", "content": [part]}]}))
            refused(await served.post(R, {"input": [{"role": "user", "content": [part]}]}))
            refused(await post(served, C, {"multi_modal_data": {"image": url}}))
            refused(await post(served, C, {"guided_json": {"$ref": url}}))
        with pytest.raises(BlockingIOError):
            listener.accept()


@on_asyncio
async def test_a_body_past_the_bound_is_refused_however_it_comes() -> None:
    """A length that is declared, one that is not, one that is a lie; the rest is not read into memory."""
    async with walled(bounds=structs.replace(BOUNDS, max_body_bytes=2000)) as wall:
        long = b'{"prompt": "' + b"x" * 5000 + b'"}'
        assert (await wall.ask("POST", C, body=long)).status == 413
        head = f"POST {C} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {wall.key}\r\nConnection: close\r\n"
        declared = await wall.say(f"{head}Content-Length: {10**12}\r\n\r\n".encode())
        chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode()
        parts = await wall.say(chunked, *[b"3e8\r\n" + b"x" * 1000 + b"\r\n"] * 5)
        one = await wall.say(chunked, b"ffffffff\r\n" + b"x" * 50_000)
        for reply in (declared, parts, one):
            assert reply.status == 413, reply
            assert strict_json(reply.body)["error"]["type"] == "invalid_request_error"
        exact = await wall.ask("POST", C, body=b'{"prompt": "a", "max_tokens": 1}'.ljust(2000))
        assert exact.status == 200


@on_asyncio
async def test_headers_past_the_bound_are_refused_without_the_key_too() -> None:
    """CVE-2025-48956: they are read before anybody knows whose they are."""
    async with walled(bounds=structs.replace(BOUNDS, max_header_bytes=8000)) as wall:
        for headers in ([f"X-Long: {'x' * 40_000}"], [f"X-{place}: x" for place in range(4000)]):
            assert (await wall.ask("GET", "/health", *headers, key=None)).status == 431
        assert (await wall.ask("GET", f"/health?{'x' * 40_000}", key=None)).status == 431
        assert (await wall.ask("GET", f"/{'x' * 40_000}", key=None)).status == 431


@on_asyncio
async def test_no_header_of_a_caller_reaches_the_reply_or_the_log_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line's end in a log line is another log line; one in a header is another header."""
    caplog.set_level("INFO")
    async with walled(settings=AppSettings(model_name="fake", api_key="k", verbose=True)) as wall:
        for given in ("<script>", "a b", "x" * 500, "\u00e9"):
            reply = await wall.ask("GET", "/v1/models", f"X-Request-Id: {given}", key="k")
            (own,) = re.findall(r"x-request-id: (.*)", reply.head)
            assert re.fullmatch(r"[0-9a-f]{32}", own.strip()), own
        await wall.ask("GET", "/v1/%0d%0aERROR%20all%20is%20lost", key="k")
        assert not [record for record in caplog.records if "\n" in record.getMessage()]


class Breaking(ChatTokenizer):
    """A tokenizer that breaks on one text, with words that are nobody's business."""

    chat_template = "{{ messages[0].content.__class__.__mro__ }}"

    def tokenize(self, text: str) -> list[int]:
        """Breaks on `boom`."""
        if text == "boom":
            raise RuntimeError(f"secret of {self!r} at 0xdeadbeef in /src/inside.py")
        return super().tokenize(text)


class Faulty(ChatTokenizer):
    """One whose template breaks in its own way."""

    def apply_chat_template(self, *_: Any, **__: Any) -> str:  # Any: whatever it is called with
        """Breaks."""
        raise ValueError("secret at 0xdeadbeef")


async def test_what_broke_a_template_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The caller is told that it is there, and whoever runs the server has nothing else to go by."""
    async with serving(tokenizer=Faulty()) as served:
        assert "log says why" in refused(await served.post(H, BODIES[H]))["message"]
    assert "secret at 0xdeadbeef" in caplog.text


async def test_what_breaks_inside_is_not_told_outside() -> None:
    """CVE-2026-22778: an exception's text had addresses. CVE-2026-5760: a template reached classes."""
    async with serving(tokenizer=Breaking()) as served:
        refused(await post(served, C, {"prompt": "boom"}), 400, 500)
        refused(await served.post("/tokenize", {"prompt": "boom"}), 400, 500)
        refused(await served.post(H, BODIES[H]), 400, 500)


async def test_a_caller_brings_no_template_and_its_text_is_none() -> None:
    """CVE-2026-5760; CVE-2025-62426: `tokenize: true` held the loop. Marks of templates are text."""
    async with serving() as served:
        options: list[Json] = [
            {"tokenize": True},
            {"chat_template": "{{ 7 * 7 }}"},
            {"tools": []},
            {"messages": []},
            {"conversation": []},
            {"return_dict": True},
            {"add_generation_prompt": False},
            {"__class__": 1},
            {"padding": "max_length", "max_length": 10**9},
        ]
        for kwargs in options:
            for url, body in ((H, BODIES[H]), ("/tokenize", {"messages": [USER]})):
                error = refused(await served.post(url, {**body, "chat_template_kwargs": kwargs}))
                assert error["param"].startswith("chat_template_kwargs."), error
        said = {"role": "user", "content": "{{ 7 * 7 }}{% for x in range(9) %}x{% endfor %}"}
        body = {"messages": [said], "max_tokens": 1, "chat_template": "{{ 'owned' }}"}
        (choice,) = (await served.json(H, body))["choices"]
        assert choice["message"]["prompt_token_ids"] == served.prompt_of(said)


GRAMMARS: Final[dict[str, Json]] = {
    "no type": {"guided_json": {"type": "wizard"}},
    "no pattern": {"guided_json": {"type": "string", "pattern": "*("}},
    "no expression": {"guided_regex": "(((("},
    "an expression that explodes": {"guided_regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
    "backtracking": {"guided_regex": "(a+)+(b|b)*$" * 50},
    "look-behind": {"guided_regex": "(?<=a)b"},
    "itself": {"guided_json": {"$ref": "#"}},
    "a circle": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "many of many": {"guided_json": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}},
    "no grammar": {"guided_grammar": "start: nothing"},
    "left recursion": {"guided_grammar": "start: start"},
    "a file": {"guided_grammar": '%import "/etc/passwd"\nstart: "a"'},
}


@on_asyncio
@pytest.mark.parametrize("name", GRAMMARS)
async def test_a_grammar_made_to_break_is_refused_in_its_time(name: str) -> None:
    """CVE-2025-48944: a tool's bad pattern or type ended the worker. It is compiled beside the loop."""
    async with serving(settings=AppSettings(model_name="fake", bounds=BOUNDS)) as served:
        response = await post(served, C, GRAMMARS[name])
        if response.status_code != 200:
            refused(response)
        schema = GRAMMARS[name].get("guided_json")
        if schema is not None:
            tool = {"function": {"name": "f", "parameters": schema}}
            response = await post(served, H, {"tools": [tool], "tool_choice": "required"})
            if response.status_code != 200:
                refused(response)
