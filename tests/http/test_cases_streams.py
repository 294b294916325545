"""Faults that public trackers are full of, in what streams show: stops, characters, reasons, counts."""

from collections.abc import Mapping

import pytest
from msgspec import structs

from tests.http.serving import Served, serving, serving_config

pytestmark = pytest.mark.anyio

C, H = "/v1/completions", "/v1/chat/completions"
EMOJI = "👩‍👩‍👧 漢字 é"


async def streamed_text(served: Served, body: Mapping[str, object]) -> tuple[str, list[str | None]]:
    """Gives the joined text of a streamed completion, and its finish reasons, a chunk each."""
    chunks = [event["choices"][0] for event in await served.events(C, body)]
    return "".join(chunk["text"] for chunk in chunks), [chunk["finish_reason"] for chunk in chunks]


@pytest.mark.parametrize("stop", ["CDE", ["zzz", "CDE"], "CD", "EF"])
async def test_no_part_of_a_stop_string_is_ever_shown(stop: object) -> None:
    """Seen as the first part of a stop string at the end of a stream, when it spans tokens."""
    async with serving() as served:
        served.script.say(b"letters", "xyzABCDEFGH")
        body = {"prompt": "letters", "temperature": 0, "max_tokens": 30, "stop": stop}
        (choice,) = (await served.json(C, body))["choices"]
        text, reasons = await streamed_text(served, body)
        word = stop if isinstance(stop, str) else "CDE"
        assert text == choice["text"] == "xyzABCDEFGH".partition(word)[0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]


async def test_characters_of_several_tokens_come_whole() -> None:
    """Seen as U+FFFD where a chunk ended inside a character."""
    async with serving() as served:
        user = {"role": "user", "content": "say it"}
        tokens = list(EMOJI.encode())
        served.script.say(served.prompt_of(user), tokens)
        body = {"messages": [user], "temperature": 0}
        (choice,) = (await served.json(H, body))["choices"]
        deltas = [event["choices"][0]["delta"].get("content", "") for event in await served.events(H, body)]
        assert "".join(deltas) == choice["message"]["content"] == EMOJI
        assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)


async def test_log_probs_of_a_split_character_have_its_exact_bytes() -> None:
    """A token that is a part of a character has no text, but it has bytes."""
    async with serving() as served:
        user = {"role": "user", "content": "say it"}
        served.script.say(served.prompt_of(user), list("é".encode()))
        body = {"messages": [user], "temperature": 0, "logprobs": True, "max_tokens": 2}
        (choice,) = (await served.json(H, body))["choices"]
        entries = choice["logprobs"]["content"]
        assert [(entry["token"], entry["bytes"]) for entry in entries] == [
            ("bytes:\\xc3", [0xC3]),
            ("bytes:\\xa9", [0xA9]),
        ]


@pytest.mark.parametrize(
    ("extra", "reason"), [(0, "stop"), (1, "stop"), (-1, "length")], ids=["exactly", "more", "less"]
)
async def test_the_finish_reason_is_what_ended_the_answer(extra: int, reason: str) -> None:
    """Seen as "length" although the end of sequence came as the last token allowed, or as null."""
    async with serving() as served:
        length = len(served.script.say(b"count", "12345")) + 1
        body = {"prompt": "count", "temperature": 0, "max_tokens": length + extra}
        (choice,) = (await served.json(C, body))["choices"]
        _, reasons = await streamed_text(served, body)
        assert choice["finish_reason"] == reason
        assert reasons == [None] * (len(reasons) - 1) + [reason]


async def test_a_stop_string_on_the_last_token_is_a_stop() -> None:
    """Both ends come with one token; the stop string is why there is no more."""
    async with serving() as served:
        length = len(served.script.say(b"count", "12345"))
        body = {"prompt": "count", "temperature": 0, "max_tokens": length, "stop": "5"}
        (choice,) = (await served.json(C, body))["choices"]
        text, reasons = await streamed_text(served, body)
        assert (choice["finish_reason"], choice["text"]) == ("stop", "1234")
        assert (reasons[-1], text) == ("stop", "1234")


@pytest.mark.parametrize("url", [C, H])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": False}])
async def test_usage_comes_to_those_who_ask(url: str, options: object) -> None:
    """Seen as counts in every chunk, or in none."""
    async with serving() as served:
        said = {"prompt": "a"} if url == C else {"messages": [{"role": "user", "content": "a"}]}
        body = {**said, "max_tokens": 4, "temperature": 0, "stream_options": options}
        assert all("usage" not in event for event in await served.events(url, body))
        events = await served.events(url, {**body, "stream_options": {"include_usage": True}})
        assert all("usage" not in event for event in events[:-1])
        del body["stream_options"]
        assert events[-1]["usage"] == (await served.json(url, body))["usage"]
        assert events[-1]["choices"] == []
        error = await served.refused(url, {**body, "stream_options": {"include_usage": True}})
        assert error["param"] == "stream_options"


@pytest.mark.parametrize("stop", [None, "!"])
async def test_a_stop_string_changes_nothing_in_the_counts(stop: str | None) -> None:
    """An answer that a stop string ends reports its cached tokens as one that ends otherwise does."""
    async with serving(structs.replace(serving_config(), shares_prefixes=True)) as served:
        prompt = "a prompt of several blocks"
        served.script.say(prompt.encode(), "well!")
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 5, "n": 2, "stop": stop}
        usage = (await served.json(C, body))["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        events = await served.events(C, {**body, "stream_options": {"include_usage": True}})
        assert events[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
