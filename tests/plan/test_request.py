"""What the scheduler knows of one request: counts, targets, filled blocks, and what it tells of itself."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.messages import (
    FilledBlocks,
    Finished,
    NewRequest,
    RequestId,
    Row,
    RowSetup,
    Sampling,
    TextSpec,
    pack_ints,
    unpack_ints,
)
from megallm.core_async.plan.prefix import ROOT, extend_keys, root_of
from megallm.core_async.plan.request import NO_ROW, Request


def new_request(
    prompt: list[int],
    num_new: int = 4,
    *,
    sampling: Sampling | None = None,
    stop_ids: tuple[int, ...] = (),
    min_new: int = 0,
    scores: bool = False,
    salt: str = "",
    is_fork: bool = False,
) -> NewRequest:
    """Gives the message that a request is made from."""
    return NewRequest(
        request_id=RequestId(5),
        prompt=pack_ints(prompt),
        max_new_tokens=num_new,
        stop_token_ids=stop_ids,
        sampling=sampling or Sampling(),
        text=TextSpec(RequestId(5)),
        min_new_tokens=min_new,
        scores_prompt=scores,
        salt=salt,
        shares_prefix=is_fork,
    )


def test_a_new_request_has_its_prompt_to_compute_and_no_row() -> None:
    """There is no state of its own for a request before, in, and after its prefill."""
    request = Request(new_request([7, 8, 9], 4))
    assert list(request.tokens) == [7, 8, 9]
    assert (request.num_tokens, request.num_computed, request.num_missing) == (3, 0, 3)
    assert (request.num_unknown, request.max_tokens) == (0, 7)
    assert (request.row, request.is_decoding, request.finish_reason) == (NO_ROW, False, None)


def test_tokens_on_the_device_are_missing_from_the_cache_and_unknown_to_the_host() -> None:
    """With two plans in flight both counts run ahead of the ids."""
    request = Request(new_request([7, 8, 9]))
    request.num_computed += 3
    request.num_tokens += 1
    assert (request.num_missing, request.num_unknown) == (1, 1)
    request.tokens.append(4)
    assert (request.num_missing, request.num_unknown) == (1, 0)


def test_leaving_its_row_it_starts_from_the_first_token() -> None:
    """Its blocks are others' now; its tokens, its history and its row's number of tokens are not lost."""
    request = Request(new_request([7, 8, 9]), shares_prefix=True)
    request.take_row(Row(2), 6, None)
    request.num_computed, request.capacity, request.is_decoding = 3, 4, True
    request.tokens.append(4)
    request.num_tokens += 1
    assert request.newly_filled(3) is not None
    request.leave_row()
    assert request.row == NO_ROW
    assert (request.num_missing, request.num_unknown) == (4, 0)
    assert (request.num_computed, request.capacity, request.num_filled) == (0, 0, 0)
    assert not request.is_decoding
    assert list(request.tokens) == [7, 8, 9, 4]


def test_the_ranks_learn_only_what_their_rows_need() -> None:
    """Prompts travel as tokens of steps; a second copy goes out only where sampling looks back."""
    plain = Request(new_request([7, 8], sampling=Sampling(seed=3)))
    plain.take_row(Row(1), 1, None)
    assert plain.setup() == RowSetup(Row(1), Sampling(seed=3), num_prompt=2, masked_until=2)
    backward = Request(new_request([7, 8], sampling=Sampling(presence_penalty=0.5)))
    backward.take_row(Row(1), 1, None)
    backward.tokens.append(9)
    setup = backward.setup()
    assert list(unpack_ints(setup.known)) == [7, 8, 9]
    assert setup.num_prompt == 2


def test_stop_ids_are_masked_up_to_the_least_length() -> None:
    """Counted from the prompt, also when the request comes back to a row with some output."""
    request = Request(new_request([7, 8], stop_ids=(2, 3), min_new=2))
    request.take_row(Row(1), 1, None)
    request.tokens.append(9)
    assert (request.setup().masked_ids, request.setup().masked_until) == ((2, 3), 4)


@given(
    num_prompt=st.integers(1, 12),
    cuts=st.lists(st.integers(1, 5), min_size=12, max_size=12),
    num_output=st.integers(0, 3),
    num_reported=st.integers(1, 12),
)
def test_chunks_score_each_prompt_token_after_the_first_once(
    num_prompt: int, cuts: list[int], num_output: int, num_reported: int
) -> None:
    """Whatever the chunks, and also when it computes its prompt again: what was reported is not again."""
    request = Request(new_request(list(range(100, 100 + num_prompt)), scores=True))
    request.tokens.extend(range(num_output))
    request.num_scored = min(num_reported, num_prompt)
    start = 0
    targets: list[int] = []
    for length in cuts:
        targets += request.targets(start, length)
        start += length
    expected = [
        100 + place if request.num_scored <= place < num_prompt else -1
        for place in range(1, len(targets) + 1)
    ]
    assert len(targets) == sum(cuts)
    assert targets == expected


@given(
    block_size=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12),
    num_cached=st.integers(0, 2),
)
def test_each_block_is_given_once_it_is_computed_and_known(
    block_size: int, steps: list[tuple[int, int]], num_cached: int
) -> None:
    """Sharing a block too soon would serve what nobody has written; never, would compute it again."""
    request = Request(new_request(list(range(9))), shares_prefix=True)
    request.take_row(Row(3), 1, None)
    request.reuse(min(num_cached, 8 // block_size) * block_size, block_size)
    first = request.num_filled
    given: list[FilledBlocks] = []
    for num_computed, num_known in steps:
        request.num_computed += num_computed
        request.tokens.extend(range(50, 50 + num_known))
        filled = request.newly_filled(block_size)
        given += [] if filled is None else [filled]
        complete = min(request.num_computed, len(request.tokens)) // block_size
        places = [each.start + place for each in given for place in range(len(each.keys))]
        assert places == list(range(first, complete))
    keys: list[bytes] = []
    extend_keys(keys, request.tokens, block_size, ROOT)
    for each in given:
        start, end = each.start, each.start + len(each.keys)
        assert each.row == Row(3)
        assert each.keys == keys[start:end]
        assert each.parent == (keys[start - 1] if start else ROOT)
        assert unpack_ints(each.tokens) == request.tokens[start * block_size : end * block_size]


def test_a_request_that_shares_nothing_gives_no_blocks_and_no_keys() -> None:
    """Hashing costs time, and an off switch must be one."""
    request = Request(new_request(list(range(8))))
    request.take_row(Row(0), 1, None)
    request.num_computed = 8
    assert request.newly_filled(2) is None
    admission = request.admission(Row(0), 2, may_split=False, max_passes=9)
    assert (admission.keys, admission.tokens) == ([], b"")


def test_a_fork_shares_although_the_engine_does_not() -> None:
    """Several answers to one prompt compute it once."""
    request = Request(new_request(list(range(8)), is_fork=True))
    assert len(request.admission(Row(0), 2, may_split=False, max_passes=9).keys) == 4


def test_an_admission_says_what_may_come_from_the_cache() -> None:
    """The last token is computed in any case, since its logits are wanted; so is what is to be scored."""
    request = Request(new_request(list(range(8)), salt="mine"), shares_prefix=True)
    admission = request.admission(Row(2), 4, may_split=True, max_passes=1)
    assert (admission.row, admission.num_tokens, admission.max_cached) == (Row(2), 8, 7)
    assert unpack_ints(admission.tokens) == request.tokens
    assert admission.root == root_of("mine") != ROOT
    assert (admission.may_split, admission.may_be_passed) == (True, True)
    request.num_passed = 1
    assert not request.admission(Row(2), 4, may_split=True, max_passes=1).may_be_passed
    scored = Request(new_request(list(range(8)), scores=True), shares_prefix=True)
    assert scored.admission(Row(2), 4, may_split=True, max_passes=1).max_cached == 0
    scored.num_scored = 6
    assert scored.admission(Row(2), 4, may_split=True, max_passes=1).max_cached == 5


def test_keys_cover_the_tokens_of_now() -> None:
    """A request that comes back has a longer prefix to find."""
    request = Request(new_request([1, 2, 3]), shares_prefix=True)
    assert len(request.admission(Row(0), 2, may_split=False, max_passes=9).keys) == 1
    request.tokens.extend(array("i", [4, 5]))
    assert len(request.admission(Row(0), 2, may_split=False, max_passes=9).keys) == 2


def test_only_the_first_admission_counts_as_a_hit() -> None:
    """Coming back after a preemption it finds its own blocks, which says nothing of the traffic."""
    request = Request(new_request(list(range(8))), shares_prefix=True)
    request.take_row(Row(1), 1, None)
    request.reuse(4, 4)
    assert (request.num_computed, request.capacity, request.num_filled, request.num_missing) == (4, 4, 1, 4)
    request.leave_row()
    request.take_row(Row(1), 2, None)
    request.reuse(0, 4)
    assert (request.num_computed, request.num_filled) == (0, 0)
    assert request.finished("length", None).num_cached_tokens == 4


def test_its_end_carries_what_a_result_needs() -> None:
    """The detokeniser knows text and tokens, and nothing of rows and weights."""
    request = Request(new_request([1, 2]))
    request.num_preemptions = 2
    assert request.finished("stop", 7) == Finished(RequestId(5), "stop", 7, num_preemptions=2)


def test_its_start_carries_what_an_early_end_needs() -> None:
    """A stop word ends it where only the detokeniser knows."""
    request = Request(new_request([1, 2, 3, 4, 5]), shares_prefix=True, epoch=3)
    request.take_row(Row(1), 1, 3)
    request.reuse(4, 4)
    request.events.append(("add_context", 1.0))
    text = request.started_text()
    assert (text.request_id, text.num_cached_tokens, text.events) == (5, 4, (("add_context", 1.0),))
    assert (text.policy_epoch, text.kv_cache_epoch) == (((0, 3),), ((0, 3),))


def test_epochs_note_from_which_token_on_they_hold() -> None:
    """One that began under old weights carries both; its keys and values are new ones when it starts anew."""
    request = Request(new_request([1, 2, 3]), epoch=4)
    request.take_row(Row(0), 1, 4)
    request.num_tokens += 2
    request.mark_epoch(5)
    end = request.finished("length", None)
    assert end.policy_epoch == end.kv_cache_epoch == ((0, 4), (4, 5))
    request.leave_row()
    request.take_row(Row(0), 2, 5)
    end = request.finished("length", None)
    assert (end.policy_epoch, end.kv_cache_epoch) == (((0, 4), (4, 5)), ((0, 5),))
    unmarked = Request(new_request([1]))
    assert unmarked.finished("length", None).policy_epoch is None
    unmarked.mark_epoch(1)
    assert unmarked.finished("length", None).policy_epoch == ((0, 1),)
