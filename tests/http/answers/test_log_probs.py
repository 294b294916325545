"""Log-probs as the two APIs show them."""

import math

from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.answers.log_probs import LEAST, LogProbColumns, chat_entries, finite
from megallm.http.answers.vocabulary import Vocabulary
from tests.byte_tokenizer import ByteTokenizer

VOCABULARY = Vocabulary(TokenizerAdapter(ByteTokenizer()))
E_ACUTE = list("é".encode())


def test_json_has_no_infinity() -> None:
    """A token that a mask forbids has a log-prob of minus infinity."""
    assert [finite(each) for each in (-1.5, -math.inf, math.nan)] == [-1.5, LEAST, LEAST]


def test_columns_stand_side_by_side() -> None:
    """A token that begins inside a character has that character's place; a hidden one takes no room."""
    columns = LogProbColumns(VOCABULARY)
    columns.add_first(256)
    columns.add([ord("a"), *E_ACUTE, ord("b")], [-1.0, -2.0, -math.inf, -4.0], None)
    assert columns.take() == {
        "tokens": ["<|end|>", "a", "bytes:\\xc3", "bytes:\\xa9", "b"],
        "token_logprobs": [None, -1.0, -2.0, LEAST, -4.0],
        "top_logprobs": [None, {"a": -1.0}, {"bytes:\\xc3": -2.0}, {"bytes:\\xa9": LEAST}, {"b": -4.0}],
        "text_offset": [0, 0, 1, 1, 2],
    }


def test_what_was_taken_is_not_given_again() -> None:
    """A stream's parts joined are the whole; places go on."""
    columns = LogProbColumns(VOCABULARY)
    columns.add([65], [-1.0], None)
    columns.take()
    columns.add([66], [-1.0], None)
    assert columns.take()["text_offset"] == [1]


def test_the_likeliest_of_those_spelled_alike_counts() -> None:
    """Greedy is told by comparing the chosen one with the greatest, exactly."""
    columns = LogProbColumns(VOCABULARY)
    columns.add([65], [-3.0], [[(66, -0.5), (65, -3.0)]])
    (rivals,) = columns.take()["top_logprobs"]  # type: ignore[misc] - a list, by construction
    assert rivals == {"B": -0.5, "A": -3.0}


def test_chat_has_an_object_a_token_with_as_many_rivals_as_were_asked_for() -> None:
    """The engine may have reported more, for a batchmate."""
    entries = chat_entries(VOCABULARY, [65], [-3.0], [[(66, -0.5), (67, -math.inf)]], 1)
    assert entries == [
        {
            "token": "A",
            "logprob": -3.0,
            "bytes": [65],
            "top_logprobs": [{"token": "B", "logprob": -0.5, "bytes": [66]}],
        }
    ]
    assert chat_entries(VOCABULARY, [65], [-3.0], None, 0)[0]["top_logprobs"] == []
