"""A detokeniser that others hear with: they hear first, and of everything."""

import pytest

from megallm.core_async.actors.detokenizer import Parcel
from megallm.core_async.kit.outbox import Outboxes
from megallm.core_async.messages import (
    Completion,
    Finished,
    RequestId,
    TextSpec,
    TokenBatch,
    pack_floats,
    pack_ints,
)
from megallm.core_async.ranks.shared_detokenizer import SharedDetokenizer
from megallm.core_async.step_times import StepTimes
from megallm.core_async.transport.routes import Routes
from tests.fakes import FakeTokenizer
from tests.loops import EVERY_LOOP

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


async def test_whoever_listens_hears_of_a_batch_before_a_reader_does() -> None:
    """A reader that asks for more at once must find the router told of what has ended."""
    heard: list[TokenBatch] = []
    outboxes = Outboxes[Parcel](lambda: None)
    key = RequestId(1)
    outbox = outboxes.open([key])

    async def hear(batch: TokenBatch) -> None:
        assert not outbox.take_nowait()
        heard.append(batch)

    detokenizer = SharedDetokenizer(
        FakeTokenizer().detokenize, outboxes, StepTimes(), Routes(), on_batch=hear
    )
    batch = TokenBatch(
        [TextSpec(key)], [key], pack_ints([5]), pack_floats([]), [Finished(key, "length")], time_s=1.0
    )
    await detokenizer.handle(batch)
    assert heard == [batch]
    (completion,) = outbox.take_nowait()
    assert isinstance(completion, Completion)
    assert completion.token_ids == [5]
