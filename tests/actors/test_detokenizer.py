"""The detokeniser: every token reaches its reader once, as text, in deltas or at the end."""

import gc

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.actors.detokenizer import Parcel
from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.outbox import Outbox
from megallm.core_async.messages import (
    Completion,
    Finished,
    Floats,
    Progress,
    RequestId,
    ScoredChunk,
    TextSpec,
    TokenBatch,
    TopLogProbs,
    pack_floats,
    pack_ints,
)
from megallm.core_async.plan.output import Output
from tests.actors.detokenizing import PIECES, Rig, Stream, finished, text_of

pytestmark = pytest.mark.anyio


def completion_of(outbox: Outbox[Parcel]) -> Completion:
    """Gives the one parcel there is."""
    (parcel,) = outbox.take_nowait()
    assert isinstance(parcel, Completion)
    return parcel


def expected_output(spec: TextSpec, tokens: list[int], end: Finished) -> tuple[str, list[int], str, object]:
    """Gives text, tokens, finish reason and stop reason, from all tokens at once."""
    is_silent = end.finish_reason == "stop" and not spec.keep_stop
    text = text_of(tokens[:-1] if is_silent else tokens)
    for length in range(1, len(text) + 1):
        ending = [word for word in spec.stop_words if text[:length].endswith(word)]
        if ending:
            word = max(ending, key=len)
            kept = text[: length if spec.keep_stop else length - len(word)]
            num_kept = next(num for num in range(len(tokens) + 1) if len(text_of(tokens[:num])) >= len(kept))
            return kept, tokens[:num_kept], "stop", word
    return text, tokens, end.finish_reason, end.stop_reason


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12),
    stop_words=st.lists(st.text("abc ", min_size=1, max_size=4), max_size=2, unique=True),
    keep_stop=st.booleans(),
    reads=st.lists(st.booleans(), min_size=12, max_size=12),
    ends_by_id=st.booleans(),
)
def test_deltas_put_together_are_the_completion_and_both_are_the_text_up_to_the_stop(
    tokens: list[int],
    stop_words: list[str],
    keep_stop: bool,  # noqa: FBT001 - hypothesis passes these by name
    reads: list[bool],
    ends_by_id: bool,  # noqa: FBT001 - as above
) -> None:
    """Streaming or not, however tokens cut the words, and however late the reader comes."""
    rig = Rig()
    words = tuple(stop_words)
    specs = [TextSpec(RequestId(key), words, keep_stop=keep_stop, is_streamed=key == 1) for key in (1, 2)]
    streamed, whole = (rig.open(spec) for spec in specs)
    stream = Stream()
    stop_id = tokens[-1] if ends_by_id else None
    ends = [finished(key, "stop" if ends_by_id else "length", stop_id) for key in (1, 2)]
    for place, token in enumerate(tokens):
        rig.feed({1: token, 2: token}, *(ends if place == len(tokens) - 1 else ()))
        if reads[place]:
            stream.read(streamed)
    stream.read(streamed)
    completion = completion_of(whole)
    expected = expected_output(specs[0], tokens, ends[0])
    assert (stream.text, stream.token_ids, *stream.endings[0]) == expected
    assert (completion.text, completion.token_ids) == expected[:2]
    assert (completion.finish_reason, completion.stop_reason) == expected[2:]
    assert len(rig.outboxes) == 0


def test_a_request_without_a_stream_is_told_once_and_whole() -> None:
    """Its text is made at the end, once: most requests of a batch job need no more."""
    rig = Rig()
    outbox = rig.open(TextSpec(RequestId(1)))
    rig.feed({1: 3}, time_s=2.0)
    rig.feed({1: 7}, time_s=3.0)
    assert outbox.take_nowait() == []
    rig.feed({1: 0}, finished(1), time_s=5.0)
    completion = completion_of(outbox)
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("ab a", [3, 7, 0], "length")
    assert (completion.first_token_s, completion.last_token_s) == (2.0, 5.0)
    assert rig.num_calls == 0, "the scheduler knows that it ended"


def test_what_the_end_says_reaches_the_reader() -> None:
    """Why it ended, what was cached, how often it yielded, and under which weights it was computed."""
    rig = Rig()
    outbox = rig.open(TextSpec(RequestId(1)))
    end = Finished(
        RequestId(1),
        "abort",
        num_cached_tokens=4,
        num_preemptions=2,
        policy_epoch=((0, 1),),
        kv_cache_epoch=((0, 1), (3, 2)),
    )
    rig.feed({1: 0}, end)
    completion = completion_of(outbox)
    told = (completion.finish_reason, completion.num_cached_tokens, completion.num_preemptions)
    assert told == ("abort", 4, 2)
    assert (completion.policy_epoch, completion.kv_cache_epoch) == (((0, 1),), ((0, 1), (3, 2)))


def test_a_request_that_ends_without_a_token_is_told_all_the_same() -> None:
    """Its reader waits for it."""
    rig = Rig()
    spec = TextSpec(RequestId(1))
    outbox = rig.open(spec)
    batch = TokenBatch([spec], [], pack_ints([]), Floats(b""), [finished(1, "abort")], 0.0)
    rig.handle(batch)
    completion = completion_of(outbox)
    assert (completion.text, completion.token_ids, completion.first_token_s) == ("", [], None)


def test_a_stop_word_ends_a_request_before_the_scheduler_knows() -> None:
    """The scheduler hears of it as of a reader that left; what it computes until then is nobody's."""
    rig = Rig()
    outbox = rig.open(TextSpec(RequestId(1), ("bc",), is_streamed=True))
    rig.feed({1: 3})
    rig.feed({1: 2})
    stream = Stream()
    stream.read(outbox)
    assert (stream.text, stream.endings) == ("a", [("stop", "bc")])
    assert rig.outboxes.take_closed() == [1]
    assert rig.num_calls == 1
    rig.feed({1: 0})
    rig.feed({1: 0}, finished(1, "abort"))
    assert outbox.take_nowait() == []
    assert rig.outboxes.take_closed() == []
    outbox.close()
    assert rig.num_calls == 1


def test_requests_that_nobody_knows_are_passed_over() -> None:
    """A step that was in flight when a request ended gives tokens and an end to nobody."""
    rig = Rig()
    outbox = rig.open(TextSpec(RequestId(1)))
    rig.feed({1: 0, 9: 1})
    rig.feed({9: 1, 1: 2}, finished(9), finished(1))
    assert completion_of(outbox).token_ids == [0, 2]


def test_a_reader_that_left_gets_nothing_and_holds_nothing_up() -> None:
    """Its neighbours in the batch, and in other outboxes, go on."""
    rig = Rig()
    leaving = rig.open(TextSpec(RequestId(1), is_streamed=True), TextSpec(RequestId(2)))
    staying = rig.open(TextSpec(RequestId(3)))
    rig.feed({1: 0, 2: 1, 3: 2})
    leaving.close()
    assert rig.outboxes.take_closed() == [1, 2]
    rig.feed({1: 0, 2: 1, 3: 2}, finished(1, "abort"), finished(2, "abort"))
    rig.feed({3: 2}, finished(3))
    assert leaving.take_nowait() == []
    assert completion_of(staying).token_ids == [2, 2, 2]
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Output], "an output is kept"


def test_progress_counts_the_new_tokens_of_an_outbox() -> None:
    """A bar over a thousand prompts takes one parcel a step."""
    rig = Rig()
    outbox = rig.open(*(TextSpec(RequestId(key), reports_progress=True) for key in (1, 2, 3)))
    other = rig.open(TextSpec(RequestId(4)))
    rig.feed({1: 0, 2: 0, 4: 0})
    assert outbox.take_nowait() == [Progress(2)]
    assert other.take_nowait() == []
    rig.feed({1: 0, 2: 0, 3: 0}, finished(2))
    parcels = outbox.take_nowait()
    assert [parcel for parcel in parcels if isinstance(parcel, Progress)] == [Progress(3)]
    assert [parcel.request_id for parcel in parcels if isinstance(parcel, Completion)] == [2]


def test_log_probs_go_to_those_who_asked() -> None:
    """A batch carries them for all once one asks; the others get none."""
    rig = Rig()
    asking = rig.open(TextSpec(RequestId(1), wants_log_probs=True, num_top=1))
    other = rig.open(TextSpec(RequestId(2)))
    batch = TokenBatch(
        started=[rig.specs[1], rig.specs[2]],
        requests=[RequestId(2), RequestId(1)],
        tokens=pack_ints([0, 1]),
        log_probs=pack_floats([-1.0, -2.0]),
        finished=[finished(1), finished(2)],
        time_s=0.0,
        top=TopLogProbs(2, pack_ints([0, 5, 1, 6]), pack_floats([-1.0, -3.0, -2.0, -4.0])),
        scored=[
            ScoredChunk(
                RequestId(1), pack_floats([-0.5]), TopLogProbs(1, pack_ints([7]), pack_floats([-0.5]))
            )
        ],
    )
    rig.handle(batch)
    completion = completion_of(asking)
    assert (completion.log_probs, completion.top) == ([-2.0], [[(1, -2.0)]])
    assert (completion.prompt_log_probs, completion.prompt_top) == ([-0.5], [[(7, -0.5)]])
    silent = completion_of(other)
    assert (silent.log_probs, silent.top, silent.prompt_log_probs) == (None, None, None)


async def test_it_keeps_up_with_a_burst_of_batches_and_measures_itself() -> None:
    """It falls behind while the loop is busy, and nothing is lost of it."""
    rig = Rig()
    outbox = rig.open(TextSpec(RequestId(1), is_streamed=True))
    for number in range(rig.detokenizer.capacity):
        is_last = number == rig.detokenizer.capacity - 1
        rig.detokenizer.address.tell(rig.batch({1: number % 4}, *([finished(1)] if is_last else ())))
    async with anyio.create_task_group() as tasks:
        await tasks.start(rig.detokenizer.run)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    stream = Stream()
    stream.read(outbox)
    assert stream.token_ids == [number % 4 for number in range(rig.detokenizer.capacity)]
    assert rig.times.post_s > 0


async def test_a_tokenizer_that_breaks_ends_it() -> None:
    """The engine fails with it, instead of leaving readers without their text."""
    rig = Rig()
    rig.open(TextSpec(RequestId(1), is_streamed=True))
    rig.detokenizer.address.tell(rig.batch({1: 99}))
    rig.detokenizer.address.tell(rig.batch({1: 0}))
    with pytest.raises(IndexError):
        await rig.detokenizer.run()
    with pytest.raises(ActorGone, match="detokenizer failed: IndexError"):
        rig.detokenizer.address.tell(rig.batch({1: 0}))
