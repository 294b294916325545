"""The prompt of a chat request: its exact tokens, and where the answer begins."""

from typing import Any

import pytest

from tests.http.serving import Served, serving

pytestmark = pytest.mark.anyio

URL = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}


async def prompt_of(served: Served, **body: Any) -> list[int]:  # Any: JSON
    """Gives the prompt that a request has."""
    reply = await served.json(URL, {"max_tokens": 0, **body})
    return reply["choices"][0]["message"]["prompt_token_ids"]


def answer(text: str, prompt: list[int], tokens: list[int]) -> dict[str, Any]:  # Any: JSON
    """Gives an assistant's message with the tokens that it was made of."""
    message = {"role": "assistant", "content": text}
    return message | {"prompt_token_ids": prompt, "generation_token_ids": tokens}


@pytest.mark.parametrize("ending", [[], [256]], ids=["cut off", "ended"])
async def test_a_conversation_that_goes_on_keeps_its_tokens(ending: list[int]) -> None:
    """What was sampled as three tokens may be one when it is tokenised again: another prefix."""
    async with serving() as served:
        prompt, tokens = served.prompt_of(USER), [ord(letter) for letter in "abc"]
        messages = [USER, answer("abc", prompt, [*tokens, *ending]), MORE]
        ids = await prompt_of(served, messages=messages)
        assert ids[: len(prompt) + 3] == [*prompt, *tokens]
        assert served.tokenizer.detokenize(ids) == served.tokenizer.detokenize(
            served.prompt_of(USER, {"role": "assistant", "content": "abc"}, MORE)
        )


async def test_the_last_answer_that_has_tokens_counts() -> None:
    """Its prompt holds those before it already."""
    async with serving() as served:
        prompt, tokens = served.prompt_of(USER), [ord(letter) for letter in "abc"]
        first = answer("abc", [1, 2, 3], [4, 5])
        messages = [USER, first, MORE, answer("abc", prompt, tokens), MORE]
        ids = await prompt_of(served, messages=messages)
        assert ids[: len(prompt) + 3] == [*prompt, *tokens]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER, {"role": "assistant", "content": "abc", "prompt_token_ids": [1]}, MORE]},
        {"messages": [USER, answer("abc", [], []), MORE]},
        {"messages": [{**MORE, "prompt_token_ids": [1], "generation_token_ids": [2]}]},
        {"messages": [USER, answer("abc", [1], [2]), MORE], "prevent_retokenization": False},
    ],
)
async def test_without_them_the_text_is_tokenised(body: dict[str, Any]) -> None:  # Any: JSON
    """Half of it is nothing, and a user's message has none."""
    async with serving() as served:
        plain = [{key: message[key] for key in ("role", "content")} for message in body["messages"]]
        assert await prompt_of(served, **body) == served.prompt_of(*plain)


async def test_tokens_out_of_the_vocabulary_are_refused() -> None:
    """They come from the caller, as any prompt does."""
    async with serving() as served:
        body = {"messages": [USER, answer("abc", [10**6], [2]), MORE], "max_tokens": 1}
        assert (await served.refused(URL, body))["param"] == "messages"


async def test_the_answer_begins_or_goes_on_as_asked() -> None:
    """By default a new one begins."""
    async with serving() as served:
        begun = {"role": "assistant", "content": " so far "}
        text = served.tokenizer.detokenize
        assert text(await prompt_of(served, messages=[USER])).endswith("assistant:")
        ids = await prompt_of(served, messages=[USER], add_generation_prompt=False)
        assert text(ids).endswith("user:hi<|end|>")
        ids = await prompt_of(served, messages=[USER, begun], continue_final_message=True)
        assert text(ids).endswith("assistant: so far")
        body = {"messages": [USER, begun], "continue_final_message": True, "add_generation_prompt": True}
        assert (await served.refused(URL, body))["param"] == "continue_final_message"
        empty = {"messages": [USER, {"role": "assistant"}], "continue_final_message": True}
        assert (await served.refused(URL, empty))["param"] == "continue_final_message"


async def test_a_long_conversation_is_made_off_the_loop() -> None:
    """It is the same prompt."""
    async with serving() as served:
        long = {"role": "user", "content": "x" * 25_000}
        error = await served.refused(URL, {"messages": [long]})
        assert f"resulted in {len(served.prompt_of(long))} tokens." in error["message"]


async def test_template_variables_reach_the_template() -> None:
    """And others are refused."""
    async with serving() as served:
        ids = await prompt_of(served, messages=[USER], chat_template_kwargs={"enable_thinking": True})
        assert "think" in served.tokenizer.detokenize(ids)
        body = {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}
        assert (await served.refused(URL, body))["param"] == "chat_template_kwargs.chat_template"
