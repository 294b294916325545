"""Text with its special tokens spelled out."""

from collections.abc import Sequence

import pytest

from megallm.core_async.messages import Completion, Delta, RequestId
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.answers.spelled_text import SpelledText, spelling_detokenizer
from tests.byte_tokenizer import ByteTokenizer
from tests.http.bodies.test_prompts import FaceTokenizer
from tests.http.serving import serving

ANSWER = [*b"a", 257, *b"bc"]
C = "/v1/completions"


class PlainTokenizer(ByteTokenizer):
    """One that has no choice."""

    def detokenize(self, tokens: Sequence[int]) -> str:  # type: ignore[override] - that is the point
        """Gives the text of ids, without special ones."""
        return ByteTokenizer.detokenize(self, tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [(ByteTokenizer(), "<|start|>a"), (PlainTokenizer(), "a")],
    ids=["can", "can't"],
)
def test_a_tokenizer_spells_what_it_can(tokenizer: object, text: str) -> None:
    """Either interface; one without the choice gives what it gives."""
    assert spelling_detokenizer(TokenizerAdapter(tokenizer))([257, *b"a"]) == text
    assert spelling_detokenizer(TokenizerAdapter(FaceTokenizer()))([*b"a"]) == "a"


def spelled(*stop_words: str, keep_stop: bool = False) -> SpelledText:
    """Gives the text of one choice."""
    return SpelledText(
        spelling_detokenizer(TokenizerAdapter(ByteTokenizer())), stop_words, keep_stop=keep_stop
    )


def test_deltas_and_completion_have_the_same_text() -> None:
    """And the id that ends it has none, unless it is to be kept."""
    whole = Completion(RequestId(1), "abc", [*ANSWER, 256], "stop", 256, 0, None, None)
    assert spelled().of_completion(whole).text == "a<|start|>bc"
    assert spelled(keep_stop=True).of_completion(whole).text == "a<|start|>bc<|end|>"
    text = spelled()
    parts = [text.of_delta(Delta("", ANSWER[:2])), text.of_delta(Delta("", ANSWER[2:]))]
    assert not text.has_ended
    parts.append(text.of_delta(Delta("", [256], finish_reason="stop", stop_reason=256)))
    assert "".join(part.text for part in parts) == "a<|start|>bc"
    assert text.has_ended


def test_a_special_token_may_be_a_stop_word() -> None:
    """The engine does not see it; the text and the tokens end there all the same."""
    no_place: list[tuple[int, float]] = []
    whole = Completion(RequestId(1), "abc", ANSWER, "length", None, 0, None, None, [-1.0] * 4, [no_place] * 4)
    cut = spelled("<|start|>").of_completion(whole)
    assert (cut.text, cut.token_ids, cut.finish_reason) == ("a", [*b"a"], "stop")
    assert (cut.stop_reason, cut.log_probs, cut.top) == ("<|start|>", [-1.0], [[]])
    text = spelled("<|start|>")
    last = text.of_delta(Delta("", ANSWER, [-1.0] * 4))
    assert (last.text, last.finish_reason, last.stop_reason) == ("a", "stop", "<|start|>")
    assert (last.token_ids, last.log_probs) == ([*b"a"], [-1.0])
    assert text.has_ended


@pytest.mark.anyio
@pytest.mark.parametrize("stop", [None, "<|start|>", "c"])
async def test_a_request_may_ask_for_it(stop: str | None) -> None:
    """Whole and streamed; a request that has ended runs no longer."""
    async with serving() as served:
        served.script.say(b"say", [*ANSWER, *[65] * 200])
        body = {
            "prompt": "say",
            "max_tokens": 300,
            "temperature": 0,
            "stop": stop,
            "skip_special_tokens": False,
        }
        (choice,) = (await served.json(C, body))["choices"]
        full = "a<|start|>bc" + "A" * 200
        assert choice["text"] == (full if stop is None else full.partition(stop)[0])
        chunks = [event["choices"][0] for event in await served.events(C, body)]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"] == "stop"
