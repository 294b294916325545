"""Routes: each front end gets its own rows of a step and nobody else's, the engine keeps the rest."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.messages import (
    Finished,
    Floats,
    RequestId,
    ScoredChunk,
    TextSpec,
    TokenBatch,
    TopLogProbs,
    pack_floats,
    pack_ints,
    unpack_floats,
    unpack_ints,
)
from megallm.core_async.transport.routes import (
    NUM_SILENT,
    OWN,
    Routes,
    owner_of,
    request_ids,
    shifted,
)


class Ledger:
    """A route that keeps what it got."""

    def __init__(self) -> None:
        self.batches: list[TokenBatch] = []
        self.num_notes = 0
        self.aborted: list[str | None] = []

    def put(self, batch: TokenBatch) -> None:
        self.batches.append(batch)

    def abort(self, request_id: str | None) -> None:
        self.aborted.append(request_id)

    def note(self) -> None:
        self.num_notes += 1


def key(owner: int, number: int) -> RequestId:
    """Gives the id of one of an owner's requests."""
    return RequestId((owner << 40) + number)


def batch_of(keys: Iterable[RequestId], *, has_all: bool = True) -> TokenBatch:
    """Gives a step's output whose every number says which request it is of."""
    ids = list(keys)
    tokens = [1000 * owner_of(id_) + id_ - key(owner_of(id_), 0) for id_ in ids]
    log_probs = pack_floats([-float(token) for token in tokens])
    top = TopLogProbs(
        2,
        pack_ints([token + place for token in tokens for place in (0, 1)]),
        pack_floats([-float(token + place) for token in tokens for place in (0, 1)]),
    )
    return TokenBatch(
        started=[TextSpec(id_) for id_ in ids],
        requests=ids,
        tokens=pack_ints(tokens),
        log_probs=log_probs if has_all else Floats(b""),
        finished=[Finished(id_, "length") for id_ in ids],
        time_s=1.5,
        top=top if has_all else None,
        scored=[ScoredChunk(id_, Floats(b""), None) for id_ in ids],
    )


def test_an_id_says_whose_it_is() -> None:
    """No table of requests is kept for routing: it would be one more thing to leak."""
    own, other = request_ids(OWN), request_ids(5)
    ids = [own(), other(), own(), other()]
    assert [owner_of(id_) for id_ in ids] == [OWN, 5, OWN, 5]
    assert len(set(ids)) == 4
    assert ids[0] == 1


def test_no_two_front_ends_have_one_number() -> None:
    """Rows of one that died must not reach the one that took its place."""
    routes = Routes()
    assert routes.new_owner() != routes.new_owner()


@given(
    owners=st.lists(st.integers(0, 3), max_size=30),
    attached=st.sets(st.integers(1, 3)),
    has_all=st.booleans(),
)
def test_every_row_goes_to_its_owner_and_to_nobody_else(
    owners: list[int],
    attached: set[int],
    has_all: bool,  # noqa: FBT001 - Hypothesis passes it by name
) -> None:
    """A row that goes astray is another user's text; one that is lost, a request that never ends."""
    routes = Routes()
    ledgers = {owner: Ledger() for owner in attached}
    for owner, ledger in ledgers.items():
        routes.attach(owner, ledger)
    keys = [key(owner, number) for number, owner in enumerate(owners)]
    for _ in range(2):  # the second step has the rows of the first
        own = routes.split(batch_of(keys, has_all=has_all))
        if attached:
            assert own == batch_of([id_ for id_ in keys if owner_of(id_) == OWN], has_all=has_all) or (
                not keys and own.requests == []
            )
    for owner, ledger in ledgers.items():
        wanted = [id_ for id_ in keys if owner_of(id_) == owner]
        assert ledger.batches == ([batch_of(wanted, has_all=has_all)] * 2 if wanted else [])


def test_a_row_with_its_neighbours_gone_keeps_its_own_numbers() -> None:
    """The same rows in another order are another place for each number."""
    routes = Routes()
    ledger = Ledger()
    routes.attach(1, ledger)
    routes.split(batch_of([key(1, 1), key(2, 2), key(1, 3)]))
    routes.split(batch_of([key(2, 2), key(1, 3)]))
    last = ledger.batches[-1]
    assert last.top is not None
    assert list(unpack_ints(last.tokens)) == [1003]
    assert list(unpack_floats(last.log_probs)) == [-1003.0]
    assert list(unpack_ints(last.top.ids)) == [1003, 1004]


def test_a_batch_of_one_owner_is_passed_on_as_it_is() -> None:
    """With one front end nothing is copied."""
    routes = Routes()
    ledger = Ledger()
    routes.attach(1, ledger)
    batch = batch_of([key(1, 1), key(1, 2)])
    assert routes.split(batch).requests == []
    assert ledger.batches[0] is batch


def test_an_engine_without_front_ends_looks_at_nothing() -> None:
    """Scripts pay nothing for the server they do not run."""
    batch = batch_of([key(OWN, 1), key(9, 1)])
    assert Routes().split(batch) is batch


def test_what_comes_for_one_that_has_gone_is_dropped() -> None:
    """Its requests end a step or two after it."""
    routes = Routes()
    ledger = Ledger()
    routes.attach(1, ledger)
    routes.detach(1)
    routes.detach(1)
    assert routes.split(batch_of([key(1, 1)])).requests == []
    assert ledger.batches == []


def test_one_that_gets_no_tokens_is_told_the_figures_now_and_then() -> None:
    """Its /metrics would else show the engine as it was when its own last request ended."""
    routes = Routes()
    ledger = Ledger()
    routes.attach(1, ledger)
    for _ in range(2 * NUM_SILENT):
        routes.split(batch_of([key(OWN, 1)]))
    assert ledger.num_notes == 2
    routes.note()
    assert ledger.num_notes == 3


def test_times_are_those_of_the_other_clock() -> None:
    """Each loop counts from a moment of its own; a request's times are compared with its front end's."""
    batch = TokenBatch([], [], pack_ints([]), Floats(b""), [], 2.0)
    ended = Finished(key(1, 1), "length", events=(("add_context", 1.0), ("evict", 1.5)))
    moved = shifted(TokenBatch([], [], batch.tokens, batch.log_probs, [ended], 2.0), 100.0)
    assert (moved.time_s, moved.finished[0].events) == (102.0, (("add_context", 101.0), ("evict", 101.5)))
