"""The exact tokens beside the text."""

import math

from msgspec import structs

from megallm.core_async.messages import Completion, RequestId
from megallm.http.answers.exact_tokens import ending_fields, token_fields

DONE = Completion(RequestId(1), "ab", [1, 2], "stop", None, 0, None, None)


def test_tokens_and_evictions_are_always_there() -> None:
    """Trainers read them without asking."""
    assert token_fields(DONE) == {"generation_token_ids": [1, 2], "num_evictions": 0}


def test_the_rest_comes_where_there_is_some() -> None:
    """Log-probs where asked for, epochs where the weights have numbers."""
    rich = structs.replace(
        DONE,
        log_probs=[-1.0, -math.inf],
        policy_epoch=((0, 3),),
        kv_cache_epoch=((0, 2),),
        num_preemptions=1,
    )
    assert token_fields(rich, returns_token_ids=True) == {
        "generation_token_ids": [1, 2],
        "generation_log_probs": [-1.0, -9999.0],
        "token_ids": [1, 2],
        "policy_epoch": ((0, 3),),
        "kv_cache_epoch": ((0, 2),),
        "num_evictions": 1,
    }


def test_a_streams_end_has_the_whole_once_more() -> None:
    """Upstream's names."""
    assert ending_fields(DONE) == {**token_fields(DONE), "generated_text": "ab", "generated_length": 2}
