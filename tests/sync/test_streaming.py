"""Sync streams: an iterator of deltas that frees its request however it is left."""

import gc
import threading

import pytest

from megallm.core_async.errors import InvalidRequestError
from megallm.core_async.messages import Delta
from tests.small_llm import brake, expected, greedy, settings, sync_llm, tokens_of


def text_of(deltas: list[Delta]) -> str:
    """Gives the text of deltas in a row."""
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: list[Delta]) -> list[int]:
    """Gives the tokens of deltas in a row."""
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_stream_gives_what_generate_gives(loop: str) -> None:
    """Joined, to the character; the reason at the end."""
    with sync_llm(loop=loop) as llm:
        (whole,) = llm.generate("Hello", greedy(30))
        deltas = list(llm.stream("Hello", greedy(30)))
        assert text_of(deltas) == whole.generated_text
        assert ids_of(deltas) == whole.generated_tokens == expected("Hello", 30)
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_tokens_are_taken_as_well_as_text() -> None:
    """The single forms of `generate`."""
    with sync_llm() as llm:
        assert ids_of(list(llm.stream([5, 6], greedy(4)))) == expected([5, 6], 4)


def test_a_slow_reader_gets_fewer_and_larger_deltas() -> None:
    """The engine is done before the reader looks again."""
    with sync_llm() as llm:
        stream = llm.stream("Hello", greedy(30))
        first = next(stream)
        llm.generate("Hello", greedy(32))  # longer, begun later, and waited for
        rest = list(stream)
        assert len(rest) == 1
        assert ids_of([first, *rest]) == expected("Hello", 30)


def test_several_streams_run_side_by_side() -> None:
    """Each thread reads its own."""
    answers: dict[int, list[int]] = {}

    def read(index: int) -> None:
        answers[index] = ids_of(list(llm.stream([index], greedy(20))))

    with sync_llm() as llm, brake() as braked:
        braked.hold()
        readers = [threading.Thread(target=read, args=(index,)) for index in range(6)]
        for reader in readers:
            reader.start()
        assert braked.is_holding.wait(5)
        braked.release()
        for reader in readers:
            reader.join()
        assert answers == {index: expected([index], 20) for index in range(6)}
        assert llm.engine.stats().step < 6 * 20


@pytest.mark.parametrize("way", ["break", "close", "with", "del"])
def test_leaving_early_frees_the_request(way: str) -> None:
    """`sync_llm` holds the books; and the abandoned request takes no more steps."""
    with sync_llm(config=settings(num_blocks=40)) as llm, brake() as braked:
        stream = llm.stream([5] * 20, greedy(None))
        if way == "break":
            for _ in stream:
                break
            del stream
        elif way == "close":
            next(stream)
            stream.close()
            assert list(stream) == []
        elif way == "with":
            with stream:
                next(stream)
            assert list(stream) == []
        else:
            next(stream)
            del stream
            gc.collect()
        assert tokens_of(llm.generate([6], greedy(4))) == [expected([6], 4)]
        assert braked.num_forwards < 40, "108 tokens were left to generate"


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_closing_a_stream_that_another_thread_reads_ends_the_reading(loop: str) -> None:
    """A watchdog closes it; the reader's loop ends as if that were all there is."""
    read: list[Delta] = []

    def read_all() -> None:
        read.extend(stream)
        has_ended.set()

    has_ended = threading.Event()
    with sync_llm(loop=loop) as llm, brake() as braked:
        stream = llm.stream("Hello", greedy(None))
        braked.hold(after=3)
        threading.Thread(target=read_all).start()
        assert braked.is_holding.wait(5)
        stream.close()
        assert has_ended.wait(5), "the reader still waits, for a step that is held"
        braked.release()
    assert ids_of(read) == expected("Hello", len(ids_of(read)))


def test_an_error_in_the_loop_body_frees_the_request() -> None:
    """The traceback holds the stream; what matters is that it goes when that does."""

    class WriteFailedError(Exception):
        pass

    def consume() -> None:
        for _ in llm.stream([5] * 20, greedy(None)):
            raise WriteFailedError

    with sync_llm(config=settings(num_blocks=40)) as llm:
        with pytest.raises(WriteFailedError):
            consume()
        gc.collect()


def test_a_stream_that_is_never_read_costs_nothing() -> None:
    """The request starts with the first `next`."""
    with sync_llm() as llm:
        llm.stream("Hello", greedy(None))
        assert llm.engine.stats().step == 0


def test_what_can_not_run_raises_at_the_call() -> None:
    """Not at the first `next`, where nobody expects it."""
    with sync_llm() as llm:
        with pytest.raises(InvalidRequestError, match="129 tokens"):
            llm.stream([1] * 129)
        with pytest.raises(TypeError, match="prompt is a list of 2 prompts"):
            llm.stream(["A", "B"])  # pyright: ignore[reportArgumentType] - the mistake is the test
        with pytest.raises(ValueError, match="top_p"):
            llm.stream("A", greedy(top_p=7.0))
        assert llm.engine.stats().step == 0


def test_nothing_to_generate_is_one_delta() -> None:
    """With the reason that there is no more."""
    with sync_llm() as llm:
        assert list(llm.stream([1] * 128, greedy(None))) == [Delta("", [], finish_reason="length")]
