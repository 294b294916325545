"""The detokeniser of a front end with many streams: fewer deltas, and nothing of them is lost or late."""

from typing import Any

import pytest
from msgspec import structs

from megallm.core_async.actors.detokenizer import Parcel
from megallm.core_async.kit.outbox import Outbox
from megallm.core_async.messages import Delta, Floats, RequestId, TextSpec, TokenBatch, pack_floats, pack_ints
from megallm.core_async.plan.pace import Pace
from tests.actors.detokenizing import Rig, Stream, finished, text_of

MANY = range(256)
STEP_S = 0.02


def busy(**extra: Any) -> tuple[Rig, list[Outbox[Parcel]]]:  # Any: fields of TextSpec
    """Gives a detokeniser whose many streams wait for each other's sake, after their first token."""
    rig = Rig(Pace())
    outboxes = [rig.open(TextSpec(RequestId(key), is_streamed=True, **extra)) for key in MANY]
    rig.handle(scored(rig.batch(dict.fromkeys(MANY, 0)), 0.0))
    return rig, outboxes


def scored(batch: TokenBatch, log_prob: float) -> TokenBatch:
    """Gives a batch with the same log-prob for each of its tokens."""
    return structs.replace(batch, log_probs=pack_floats([log_prob] * len(batch.requests)))


def test_many_streams_get_the_same_in_fewer_deltas() -> None:
    """What a delta costs on its way to a client does not depend on its length."""
    rig, outboxes = busy()
    for step in range(1, 8):
        ends = [finished(key) for key in MANY] if step == 7 else []
        rig.feed({key: (key + step) % 4 for key in MANY}, *ends, time_s=step * STEP_S)
    for key, outbox in enumerate(outboxes):
        deltas = [parcel for parcel in outbox.take_nowait() if isinstance(parcel, Delta)]
        assert [len(delta.token_ids) for delta in deltas] == [1, 3, 3, 1]
        tokens = [0, *((key + step) % 4 for step in range(1, 8))]
        assert [token for delta in deltas for token in delta.token_ids] == tokens
        assert "".join(delta.text for delta in deltas) == text_of(tokens)
        assert deltas[-1].finish_reason == "length"


def test_among_many_a_stop_word_is_found_at_once() -> None:
    """What the model computes behind it is for nobody."""
    rig, outboxes = busy(stop_words=("cc",))
    for step in (1, 2):
        rig.feed(dict.fromkeys(MANY, 2), time_s=step * STEP_S / 4)
    assert rig.outboxes.take_closed() == list(MANY)
    stream = Stream()
    stream.read(outboxes[0])
    assert (stream.text, stream.endings) == ("a", [("stop", "cc")])


@pytest.mark.parametrize("way", ["aborted", "given", "preempted"])
def test_what_waits_is_given_where_no_token_follows(way: str) -> None:
    """The request has ended, the engine stands still, or others run in its place."""
    rig, outboxes = busy()
    outboxes[0].take_nowait()
    rig.feed(dict.fromkeys(MANY, 1), time_s=STEP_S)
    assert outboxes[0].take_nowait() == []
    match way:
        case "aborted":
            rig.handle(TokenBatch([], [], pack_ints([]), Floats(b""), [finished(0, "abort")], STEP_S))
        case "given":
            rig.detokenizer.give_waiting()
        case _:
            for step in (2, 3, 4):
                rig.feed(dict.fromkeys(MANY[1:], 1), time_s=step * STEP_S)
    (delta,) = outboxes[0].take_nowait()
    assert isinstance(delta, Delta)
    assert (delta.text, delta.token_ids) == ("b", [1])
    assert delta.finish_reason == ("abort" if way == "aborted" else None)


def test_a_reader_that_left_is_not_given_what_waited() -> None:
    """Its request ends at the next step only."""
    rig, outboxes = busy()
    rig.feed(dict.fromkeys(MANY, 1), time_s=STEP_S)
    outboxes[0].close()
    rig.detokenizer.give_waiting()
    assert outboxes[0].take_nowait() == []
    assert len(outboxes[1].take_nowait()) == len([0, 1])


def test_log_probs_wait_with_their_tokens() -> None:
    """They are matched by their place alone."""
    rig, outboxes = busy(wants_log_probs=True)
    for step in (1, 2, 3):
        rig.handle(scored(rig.batch(dict.fromkeys(MANY, 1), time_s=step * STEP_S), -step))
    _, delta = outboxes[7].take_nowait()
    assert isinstance(delta, Delta)
    assert (delta.token_ids, delta.log_probs) == ([1, 1, 1], [-1.0, -2.0, -3.0])
