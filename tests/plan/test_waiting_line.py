"""The waiting line against plain lists, and that a long one costs no more than a short one."""

import sys
from itertools import islice
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from megallm.core_async.plan.request import Request
from megallm.core_async.plan.waiting_line import WaitingLine
from tests.counted_lines import lines_run
from tests.plan.requests import request_of


class LineAgainstLists(RuleBasedStateMachine):
    """Requests of three priorities come, are admitted from anywhere, come back, and leave for good."""

    def __init__(self) -> None:
        super().__init__()
        self.line = WaitingLine()
        self.waiting: dict[int, list[Request]] = {-1: [], 0: [], 5: []}
        self.running: list[Request] = []
        self.num_requests = 0

    @rule(priority=st.sampled_from([-1, 0, 5]))
    def comes(self, priority: int) -> None:
        """A new one stands behind all of its priority."""
        self.num_requests += 1
        request = request_of(self.num_requests, priority=priority)
        self.line.append(request)
        self.waiting[priority].append(request)

    @rule(place=st.integers(0, 20), runs=st.booleans())
    def leaves(self, place: int, *, runs: bool) -> None:
        """One that stands anywhere is admitted, or ends."""
        everyone = [request for queue in self.waiting.values() for request in queue]
        if place < len(everyone):
            request = everyone[place]
            self.line.leave(request)
            self.waiting[request.priority].remove(request)
            self.running += [request] if runs else []

    @rule(place=st.integers(0, 20))
    def comes_back(self, place: int) -> None:
        """One that was running stands before all of its priority."""
        if place < len(self.running):
            request = self.running.pop(place)
            self.line.put_back(request)
            self.waiting[request.priority].insert(0, request)

    @invariant()
    def line_equals_lists(self) -> None:
        """In order, by priority; and each knows whether it waits."""
        expected = [request for priority in sorted(self.waiting) for request in self.waiting[priority]]
        assert list(self.line) == expected
        assert len(self.line) == len(expected)
        assert all(request.is_waiting for request in expected)
        assert not any(request.is_waiting for request in self.running)


TestLineAgainstLists = LineAgainstLists.TestCase
TestLineAgainstLists.settings = settings(stateful_step_count=25)


def test_the_lower_priority_is_the_sooner_admitted() -> None:
    """And within one, who came first."""
    line = WaitingLine()
    first, second, urgent, idle = (
        request_of(number, priority=priority) for number, priority in [(1, 0), (2, 0), (3, -2), (4, 9)]
    )
    for request in (idle, first, urgent, second):
        line.append(request)
    assert list(line) == [urgent, first, second, idle]
    line.leave(first)
    line.put_back(first)
    assert list(line) == [urgent, first, second, idle]


def test_nobody_waits_twice_or_leaves_twice() -> None:
    """A request that is admitted twice would run at two rows."""
    line = WaitingLine()
    request = request_of(7)
    line.append(request)
    with pytest.raises(AssertionError, match="request 7 waits already"):
        line.put_back(request)
    line.leave(request)
    with pytest.raises(AssertionError, match="request 7 does not wait"):
        line.leave(request)
    assert (len(line), list(line)) == (0, [])


def test_a_request_that_left_is_forgotten_wherever_it_stood() -> None:
    """Clients that come and go behind a head that does not fit must not fill the memory with prompts."""
    line = WaitingLine()
    head, other = request_of(1), request_of(2)
    line.append(head)
    num_references = sys.getrefcount(other)
    line.append(other)
    assert sys.getrefcount(other) > num_references
    line.leave(other)
    assert sys.getrefcount(other) == num_references


def test_the_head_is_found_at_once_after_many_have_left_from_behind_it() -> None:
    """The line's head is looked at in every step; those that have gone must not be looked at with it."""
    line = WaitingLine()
    requests = [request_of(number, priority=number % 3) for number in range(5000)]
    for request in requests:
        line.append(request)
    for request in Random(0).sample(requests[3:-3], len(requests) - 6):
        line.leave(request)
    head: list[Request] = []
    num_lines = lines_run(lambda: head.extend(islice(line, 6)))
    assert head == sorted(
        requests[:3] + requests[-3:], key=lambda request: (request.priority, request.request_id)
    )
    assert 0 < num_lines < 30
