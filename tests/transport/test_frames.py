"""The frames between processes: each comes out as it went in, and an error stays the error that it was."""

from typing import Any

import msgspec
import pytest

from megallm.core_async.errors import EngineBusy, EngineDeadError, InvalidRequestError, MegaLLMError
from megallm.core_async.messages import (
    EngineStats,
    Finished,
    Floats,
    NewRequest,
    RequestId,
    Sampling,
    ScoredChunk,
    TextSpec,
    TokenBatch,
    TopLogProbs,
    pack_floats,
    pack_ints,
)
from megallm.core_async.transport.frames import (
    Answer,
    CallEngine,
    CloseRequests,
    Drain,
    EngineEnded,
    EngineState,
    Fault,
    FromFrontend,
    Ready,
    RemoteFailureError,
    StepOutput,
    SubmitRequests,
    ToFrontend,
    Welcome,
    error_of,
    fault_of,
)
from tests.engines import engine_config

KEY = RequestId((7 << 40) + 1)
TOP = TopLogProbs(2, pack_ints([1, 2]), pack_floats([-0.5, -1.5]))
SPEC = TextSpec(KEY, stop_words=("end", "\n"), is_streamed=True, wants_log_probs=True, num_top=2)
REQUEST = NewRequest(
    request_id=KEY,
    prompt=pack_ints([1, 2, 3]),
    max_new_tokens=5,
    stop_token_ids=(4, 5),
    sampling=Sampling(temperature=0.5, logit_bias=((3, 1.5),), grammar='{"grammars": []}'),
    text=SPEC,
    salt="tenant",
)
BATCH = TokenBatch(
    started=[SPEC],
    requests=[KEY],
    tokens=pack_ints([9]),
    log_probs=pack_floats([-0.25]),
    finished=[Finished(KEY, "stop", "end", events=(("add_context", 1.5),), policy_epoch=((0, 3),))],
    time_s=2.5,
    top=TOP,
    scored=[ScoredChunk(KEY, Floats(b""), None)],
)
FROM_FRONTEND: list[FromFrontend] = [
    Ready(),
    SubmitRequests(3, [REQUEST]),
    CloseRequests([KEY]),
    CallEngine(4, "pause", "wait"),
    CallEngine(5, "profile", "start"),
]
TO_FRONTEND: list[ToFrontend] = [
    Welcome(7, engine_config(), EngineStats(step=3), "running", b"setup"),
    StepOutput(BATCH, EngineStats(running=1)),
    EngineState(EngineStats(), "paused"),
    Answer(3, "running", Fault("EngineBusy", "full")),
    Answer(4, "running"),
    EngineEnded(Fault("EngineDeadError", "it failed", "cause"), "failed"),
    Drain(1.5),
]


@pytest.mark.parametrize(
    ("kinds", "frame"),
    [
        *((FromFrontend.__value__, frame) for frame in FROM_FRONTEND),
        *((ToFrontend.__value__, frame) for frame in TO_FRONTEND),
    ],
)
def test_a_frame_comes_out_as_it_went_in(kinds: Any, frame: msgspec.Struct) -> None:  # Any: a union of types
    """A field that the wire loses is a request that is run otherwise than it was asked for."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=kinds) == frame


@pytest.mark.parametrize(
    "error", [EngineBusy("full"), InvalidRequestError("too long"), ValueError("mode is x")]
)
def test_an_error_keeps_its_class_and_its_text(error: Exception) -> None:
    """The class decides the HTTP status, the text is what the user reads."""
    came = error_of(fault_of(error))
    assert (type(came), str(came), came.__cause__) == (type(error), str(error), None)


def test_the_cause_of_the_engines_death_is_told() -> None:
    """Whoever runs the server sees in the front end's log what broke the engine."""
    dead = EngineDeadError("the engine failed")
    dead.__cause__ = RuntimeError("CUDA error")
    came = error_of(fault_of(dead))
    assert isinstance(came, EngineDeadError)
    assert isinstance(came.__cause__, RemoteFailureError)
    assert str(came.__cause__) == "RuntimeError('CUDA error')"


def test_an_error_of_another_class_is_still_one_of_ours() -> None:
    """A front end answers 500 to it, and does not fall over it."""
    assert type(error_of(Fault("SomethingNew", "what"))) is MegaLLMError
