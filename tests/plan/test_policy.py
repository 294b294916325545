"""The policy: budget and order kept, nobody starved, prompts split only where that is allowed."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from megallm.core_async.messages import NewRequest, RequestId, Row, Sampling, TextSpec, pack_ints
from megallm.core_async.plan.policy import MAX_PASSES, Choice, Limits, candidates, choose
from megallm.core_async.plan.request import Request
from tests.engines import engine_config


@dataclass(frozen=True)
class State:
    """How far a request has come, in numbers."""

    num_prompt: int
    num_new: int = 4
    num_computed: int = 0
    num_sampled: int = 0
    """Tokens of output, those in flight included."""
    num_unknown: int = 0
    num_passed: int = 0

    def request(self) -> Request:
        """Gives a request in that state."""
        new = NewRequest(
            RequestId(1),
            pack_ints(range(self.num_prompt)),
            self.num_new,
            (),
            Sampling(),
            TextSpec(RequestId(1)),
        )
        request = Request(new)
        request.tokens.extend(range(self.num_sampled - self.num_unknown))
        request.num_tokens += self.num_sampled
        request.num_computed = self.num_computed
        request.is_decoding = self.num_computed == request.num_tokens - 1 and self.num_sampled > 0
        request.num_passed = self.num_passed
        return request


def decoding(num_sampled: int = 1, num_new: int = 4) -> State:
    """Gives one that computes the token it sampled last."""
    return State(3, num_new, num_computed=2 + num_sampled, num_sampled=num_sampled)


@st.composite
def running_states(draw: st.DrawFn) -> State:
    """Gives any state of a running request: in its prompt, decoding, or waiting for its last token."""
    num_prompt = draw(st.integers(1, 20))
    num_new = draw(st.integers(1, 5))
    num_sampled = draw(st.integers(0, num_new))
    if draw(st.booleans()) and num_sampled:
        return State(num_prompt, num_new, num_prompt + num_sampled - 1, num_sampled)
    return State(num_prompt, num_new, draw(st.integers(0, num_prompt + num_sampled - 1)), num_sampled)


def bounds(max_tokens: int = 8, *, chunks_prompts: bool = False) -> Limits:
    """Gives limits; the policy looks at no block."""
    return Limits(max_tokens, max_requests=8, block_size=4, chunks_prompts=chunks_prompts)


def choice_of(*states: State, max_tokens: int = 8) -> tuple[list[Request], Choice]:
    """Gives requests in these states, and what the policy picks of them."""
    requests = [state.request() for state in states]
    return requests, choose(requests, bounds(max_tokens))


@given(states=st.lists(running_states(), max_size=8), spare=st.integers(0, 12))
def test_budget_and_order_are_kept_and_nobody_starves(states: list[State], spare: int) -> None:
    """The properties that every step of every engine relies on."""
    requests = [state.request() for state in states]
    max_tokens = max(1, len(states)) + spare  # a step holds a token of each running request
    choice = choose(requests, bounds(max_tokens))

    used = len(choice.decodes) + sum(length for _, length in choice.chunks)
    assert used + choice.budget == max_tokens
    assert choice.budget >= 0
    assert choice.admitted == []
    assert choice.decodes == [r for r in requests if r.is_decoding and r.num_tokens < r.max_tokens]
    begun = [r for r in requests if not r.is_decoding and r.num_missing]
    chunked = [request for request, _ in choice.chunks]
    assert chunked == begun[: len(chunked)]
    assert bool(begun) == bool(chunked)
    for request, length in choice.chunks[:-1]:
        assert length == request.num_missing
    for request, length in choice.chunks[-1:]:
        assert 1 <= length <= request.num_missing
        assert length == request.num_missing or choice.budget == 0
    if len(chunked) < len(begun):
        assert choice.budget == 0
    assert [s.num_computed for s in states] == [r.num_computed for r in requests], "it changes nothing"


def test_decodes_go_before_prompts() -> None:
    """A reader waits for each token of a stream, and for a prompt only once."""
    requests, choice = choice_of(State(20), decoding(), State(5), decoding(2))
    assert choice.decodes == [requests[1], requests[3]]
    assert choice.chunks == [(requests[0], 6)]
    assert choice.budget == 0


def test_a_request_that_has_sampled_its_last_token_waits_for_it() -> None:
    """Its id is on the way; computing on would go beyond what was asked."""
    requests, choice = choice_of(decoding(3, num_new=3), decoding(2, num_new=3))
    assert choice.decodes == [requests[1]]
    assert choice.chunks == []


def test_a_prompt_that_is_only_scored_is_computed_and_nothing_more() -> None:
    """It samples nothing: once it is computed it waits for its scores."""
    requests, choice = choice_of(State(5, num_new=0, num_computed=2), State(5, num_new=0, num_computed=5))
    assert choice.decodes == []
    assert choice.chunks == [(requests[0], 3)]


def test_a_request_that_came_back_computes_its_output_as_it_does_its_prompt() -> None:
    """Tokens known minus tokens computed: preemption needs no rule of its own."""
    requests, choice = choice_of(State(3, num_sampled=4, num_new=9))
    assert choice.chunks == [(requests[0], 7)]


def test_candidates_are_the_first_of_the_line_one_for_each_row() -> None:
    """The allocator admits in their order."""
    waiting = [State(num_prompt).request() for num_prompt in (3, 4, 5, 6)]
    rows = [Row(5), Row(2), Row(7)]
    offered = candidates(waiting, rows, bounds(), most=9)
    assert [request for request, _ in offered] == waiting[:3]
    assert [admission.row for _, admission in offered] == rows
    assert [admission.num_tokens for _, admission in offered] == [3, 4, 5]
    assert len(candidates(waiting, rows, bounds(), most=2)) == 2
    assert candidates([], rows, bounds(), most=2) == []
    assert candidates(waiting, [], bounds(), most=2) == []


def test_one_whose_last_tokens_are_on_the_device_ends_the_candidates() -> None:
    """It yielded a moment ago and stands at the head; letting others pass it would turn the line round."""
    waiting = [State(3), State(3, num_sampled=2, num_unknown=1), State(3)]
    offered = candidates([state.request() for state in waiting], [Row(0)] * 3, bounds(), most=9)
    assert len(offered) == 1


@given(num_tokens=st.integers(1, 20), max_tokens=st.integers(1, 20), chunks_prompts=st.booleans())
def test_a_prompt_is_split_where_chunking_is_on_or_no_step_could_hold_it(
    num_tokens: int,
    max_tokens: int,
    chunks_prompts: bool,  # noqa: FBT001 - hypothesis passes it by name
) -> None:
    """Without the second rule such a prompt would wait for ever."""
    offered = candidates(
        [State(num_tokens).request()], [Row(0)], bounds(max_tokens, chunks_prompts=chunks_prompts), most=1
    )
    assert offered[0][1].may_split == (chunks_prompts or num_tokens > max_tokens)


def test_one_that_was_passed_often_is_not_passed_any_more() -> None:
    """Bounded bypass: gaps are filled, and nobody waits for ever."""
    waiting = [State(3, num_passed=MAX_PASSES - 1).request(), State(3, num_passed=MAX_PASSES).request()]
    offered = candidates(waiting, [Row(0), Row(1)], bounds(), most=9)
    assert [admission.may_be_passed for _, admission in offered] == [True, False]


def test_the_limits_of_an_engine_are_its_configs() -> None:
    """The engine, and the simulated one, go by what the user has set."""
    config = structs.replace(
        engine_config(max_tokens=48, max_requests=5, chunks_prompts=True), shares_prefixes=True
    )
    assert Limits.of(config) == Limits(
        max_tokens=48, max_requests=5, block_size=4, chunks_prompts=True, shares_prefixes=True
    )
