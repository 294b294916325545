"""What the tokenizer makes of things."""

import pytest

from tests.http.serving import BosTokenizer, serving

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("url", ["/tokenize", "/v1/tokenize"])
async def test_a_text_is_tokenised_as_a_completion_would_see_it(url: str) -> None:
    """The bos included, where there is one."""
    async with serving(tokenizer=BosTokenizer()) as served:
        reply = await served.json(url, {"prompt": "hé", "return_token_strs": True})
        assert reply["tokens"] == [257, ord("h"), 258 + 5]
        assert (reply["count"], reply["token_strs"]) == (3, ["<|start|>", "h", "é"])
        assert reply["max_model_len"] == served.engine.config.max_sequence_length
        reply = await served.json(url, {"prompt": "h" * 30_000, "add_special_tokens": False})
        assert reply["count"] == 30_000


async def test_a_conversation_is_tokenised_as_a_chat_would_see_it() -> None:
    """Clients count what fits."""
    async with serving() as served:
        reply = await served.json("/tokenize", {"messages": [USER]})
        assert reply["tokens"] == served.prompt_of(USER)
        longer = await served.json("/tokenize", {"messages": [USER], "tools": [{"function": {"name": "f"}}]})
        assert longer["count"] > reply["count"]


async def test_ids_become_text_again() -> None:
    """Special tokens as they are spelled."""
    async with serving() as served:
        for text in ("hé 世界<|end|>", ""):
            tokens = (await served.json("/tokenize", {"prompt": text}))["tokens"]
            assert (await served.json("/detokenize", {"tokens": tokens}))["prompt"] == text


async def test_wrong_requests_are_told_what_is_wrong() -> None:
    """By name, as everywhere."""
    async with serving() as served:
        for body in ({}, {"prompt": "a", "messages": [USER]}):
            assert (await served.refused("/tokenize", body))["param"] == "prompt"
        assert (await served.refused("/tokenize", {"messages": []}))["param"] == "messages"
        for bad in (-1, 10**6, 2**70):
            assert (await served.refused("/detokenize", {"tokens": [1, bad]}))["param"] == "tokens[1]"
        assert (await served.refused("/detokenize", {"tokens": "a"}))["param"] == "tokens"
        await served.refused("/tokenize", {"prompt": "a", "model": "other"}, 404)
