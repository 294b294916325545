"""Steps that engines take together: whatever the order of news, none is left waiting in a step."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.messages import StepPlan, StepResult, pack_ints
from megallm.core_async.plan.lockstep import EMPTY, Lockstep, is_empty
from tests.actors.test_worker import step

NUM_ENGINES = 3


class Network:
    """Engines, and news of steps on its way from each to each, which comes in order."""

    def __init__(self) -> None:
        self.news: dict[tuple[int, int], deque[int]] = {}
        self.engines = [Lockstep(self._announcer(sender)) for sender in range(NUM_ENGINES)]

    def _announcer(self, sender: int):  # noqa: ANN202 - a closure
        def announce(number: int) -> None:
            for receiver in range(NUM_ENGINES):
                if receiver != sender:
                    self.news.setdefault((sender, receiver), deque()).append(number)

        return announce

    def deliver(self, sender: int, receiver: int) -> None:
        """Lets the oldest news between two arrive, if there is any."""
        waiting = self.news.get((sender, receiver))
        if waiting:
            self.engines[receiver].follow(waiting.popleft())


PLAN: StepPlan = step(1, [3])


def test_an_engine_alone_runs_its_plans_and_nothing_else() -> None:
    """An empty step is only for company."""
    announced: list[int] = []
    engine = Lockstep(announced.append)
    assert engine.taken(None) is None
    assert engine.taken(PLAN) is PLAN
    assert engine.taken(PLAN) is PLAN
    assert announced == [1, 2]


def test_an_engine_that_is_behind_runs_empty_steps_until_it_is_not() -> None:
    """And says nothing of those: whoever was ahead knows."""
    announced: list[int] = []
    engine = Lockstep(announced.append)
    engine.follow(2)
    assert engine.taken(None) is EMPTY
    assert engine.taken(PLAN) is PLAN
    assert engine.taken(None) is None
    assert announced == []


def test_only_an_empty_steps_result_is_empty() -> None:
    """A scheduler must never see it, and must see every other."""
    assert is_empty(StepResult(step=EMPTY.step, tokens=pack_ints([])))
    assert not is_empty(StepResult(step=1, tokens=pack_ints([])))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("plan"), st.integers(0, NUM_ENGINES - 1), st.just(0)),
            st.tuples(st.just("idle"), st.integers(0, NUM_ENGINES - 1), st.just(0)),
            st.tuples(st.just("news"), st.integers(0, NUM_ENGINES - 1), st.integers(0, NUM_ENGINES - 1)),
        ),
        max_size=60,
    )
)
def test_all_engines_end_at_the_same_step(events: list[tuple[str, int, int]]) -> None:
    """However late the news: a step that one begins, all begin."""
    network = Network()
    for kind, engine, other in events:
        if kind == "news":
            network.deliver(engine, other)
        else:
            network.engines[engine].taken(PLAN if kind == "plan" else None)
    while any(network.news.values()):
        for sender, receiver in list(network.news):
            network.deliver(sender, receiver)
        for engine in network.engines:
            while engine.taken(None) is not None:
                pass
    assert len({engine.num_begun for engine in network.engines}) == 1
    assert not any(engine.is_behind for engine in network.engines)
