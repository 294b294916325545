"""A request's choices on their way through the engine: counts, failures, epochs, order."""

from collections.abc import Sequence

import pytest
from msgspec import structs

from megallm.core_async.messages import StepResult
from megallm.core_async.protocols import PendingStep
from tests.http.asgi_call import AsgiCall
from tests.http.serving import Served, eventually, frames_of, serving, serving_config, strict_json

pytestmark = pytest.mark.anyio

C = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


async def test_metrics_hear_of_each_choice() -> None:
    """One request, a first token and an end for each choice, the tokens between."""
    async with serving(checks_idle=False) as served:
        await served.json(C, {**BODY, "n": 2})
        assert served.counts.of("request") == [(5, 2, 3)]
        assert len(served.counts.of("first")) == 2
        assert served.counts.of("tokens") == [(2,), (2,)]
        assert served.counts.of("finished") == [("length", 5, 3), ("length", 5, 3)]
        assert len(served.counts.of("queue")) == 2


async def test_metrics_of_a_stream_are_the_same_counts() -> None:
    """However it was cut into chunks."""
    async with serving(checks_idle=False) as served:
        await served.events(C, {**BODY, "n": 2})
        assert served.counts.of("request") == [(5, 2, 3)]
        assert len(served.counts.of("first")) == 2
        assert sum(num for (num,) in served.counts.of("tokens")) == 4
        assert served.counts.of("finished") == [("length", 5, 3), ("length", 5, 3)]
        assert len(served.counts.of("queue")) == 2


async def test_cached_tokens_of_a_prompt_are_counted_once() -> None:
    """Forks find the blocks of the first choice, which nobody had cached before the request."""
    async with serving(structs.replace(serving_config(), shares_prefixes=True)) as served:
        body = {**BODY, "prompt": "a prompt of several blocks", "n": 3}
        details = [(await served.json(C, body))["usage"]["prompt_tokens_details"] for _ in range(2)]
        assert details[0]["cached_tokens"] == 0
        assert 0 < details[1]["cached_tokens"] < len("a prompt of several blocks")


async def test_chunks_wait_for_as_many_tokens_as_were_asked_for() -> None:
    """`streaming_interval`; the last chunk of a choice waits for nobody."""
    async with serving() as served:
        events = await served.events(
            C, {**BODY, "max_tokens": 7, "streaming_interval": 3, "return_token_ids": True}
        )
        sizes = [len(event["choices"][0].get("token_ids", [])) for event in events]
        assert sizes == [3, 3, 1, 0]


async def test_epochs_of_the_weights_are_told() -> None:
    """Trainers learn which policy made which token, also of an answer that a stop string ended."""
    async with serving() as served:
        served.script.say(b"hello", "well!")
        await served.engine.set_generation_epoch(7)
        for extra in ({}, {"stop": "!"}):
            (choice,) = (await served.json(C, {**BODY, **extra, "max_tokens": 9, "ignore_eos": False}))[
                "choices"
            ]
            assert choice["policy_epoch"] == [[0, 7]]
            assert choice["kv_cache_epoch"] == [[0, 7]]


def failing(served: Served, message: str) -> None:
    """Makes the model fail on every token."""
    launch = served.runner.launch

    class Failed:
        """A step in which every row failed."""

        def __init__(self, pending: PendingStep) -> None:
            self._pending = pending

        def result(self) -> StepResult:
            result = self._pending.result()
            num_tokens: Sequence[int] = range(len(result.tokens) // 4)
            return structs.replace(result, failed=[(place, message) for place in num_tokens])

    served.runner.launch = lambda plan: Failed(launch(plan))  # type: ignore[method-assign] - a fake of a fake


async def test_a_model_that_fails_on_a_request_is_a_500_without_its_words() -> None:
    """And in a stream one frame."""
    async with serving(checks_idle=False) as served:
        failing(served, "NaN at 0x7f00")
        error = await served.refused(C, BODY, 500)
        assert "0x7f00" not in error["message"]
        response = await served.post(C, {**BODY, "stream": True})
        (last,) = [strict_json(each) for each in frames_of(response.content)]
        assert last["error"]["type"] == "server_error"
        assert [reason for reason, *_ in served.counts.of("finished")] == ["error", "error"]
        await eventually(lambda: served.num_busy == 0)


async def test_an_aborting_pause_ends_what_runs_with_what_it_has() -> None:
    """The reason is the engine's own."""
    async with serving(checks_idle=False) as served:
        body = {**BODY, "max_tokens": 400}
        stream = AsgiCall(served, C, {**body, "stream": True})
        whole = AsgiCall(served, C, body)
        await stream.until_chunks(2)
        await eventually(lambda: served.engine.stats().running == 2)
        await served.engine.pause("abort")
        (choice,) = strict_json(await whole.ended())["choices"]
        assert choice["finish_reason"] == "abort"
        frames = frames_of(await stream.ended())
        assert frames[-1] == b"[DONE]"
        assert strict_json(frames[-2])["choices"][0]["finish_reason"] == "abort"


async def test_an_engine_that_dies_ends_every_request() -> None:
    """Nothing hangs, and nothing of the failure is told."""
    async with serving(checks_idle=False) as served:
        stream = AsgiCall(served, C, {**BODY, "max_tokens": 400, "stream": True})
        await stream.until_chunks(2)

        def die(plan: object) -> None:
            raise RuntimeError("secret 0x7f00")

        served.runner.before_launch = die
        last = strict_json(frames_of(await stream.ended())[-1])
        assert "0x7f00" not in last["error"]["message"]
        assert (await served.refused(C, BODY, 503))["type"] == "service_unavailable_error"
        assert (await served.client.get("/health")).status_code == 503
