"""A step's plan, as the ranks get it, and what it counts."""

from megallm.core_async.messages import BlockGrant, BlockId, Row, Sampling, StepPlan, unpack_ints
from megallm.core_async.plan.flight import InFlight
from megallm.core_async.plan.policy import Choice
from megallm.core_async.plan.request import Request
from megallm.core_async.plan.writing import write_plan
from tests.plan.requests import decoding, request_of


def written(
    decodes: list[Request], chunks: list[tuple[Request, int]], admitted: list[Request] | None = None
) -> tuple[StepPlan, InFlight]:
    """Gives the plan of a choice without block-table changes, and who is in flight then."""
    step = InFlight(7)
    return write_plan(step, Choice(decodes, chunks, 0, admitted or []), None), step


def columns(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    """Gives (row, start, length, samples) in batch order."""
    rows, starts, lengths = (unpack_ints(column) for column in (plan.rows, plan.starts, plan.lengths))
    return list(zip(rows, starts, lengths, map(bool, plan.samples), strict=True))


def test_a_decoding_row_computes_the_token_that_is_on_the_device() -> None:
    """Its id is not in the plan: the host may not know it yet."""
    first, second = decoding(1, [5, 6], [7], row=3), decoding(2, [5], [6, 8], row=0)
    plan, step = written([first, second], [])
    assert (plan.step, plan.num_decode) == (7, 2)
    assert columns(plan) == [(3, 2, 1, True), (0, 2, 1, True)]
    assert list(unpack_ints(plan.tokens)) == []
    assert step.sampled == [first, second]
    assert [(each.num_computed, each.num_tokens, each.num_unknown) for each in step.sampled] == [
        (3, 4, 1)
    ] * 2


def test_chunks_follow_the_decodes_and_bring_their_tokens() -> None:
    """Rows in batch order, the tokens of one row after those of another."""
    decode = decoding(1, [5], [6], row=2)
    part, rest = request_of(2, [11, 12, 13, 14], row=0), request_of(3, [21, 22, 23], row=1)
    rest.num_computed = 1
    plan, step = written([decode], [(part, 3), (rest, 2)])
    assert plan.num_decode == 1
    assert columns(plan) == [(2, 1, 1, True), (0, 0, 3, False), (1, 1, 2, True)]
    assert list(unpack_ints(plan.tokens)) == [11, 12, 13, 22, 23]
    assert (part.num_computed, part.num_tokens, rest.num_computed, rest.num_tokens) == (3, 4, 3, 4)
    assert (step.sampled, step.firsts) == ([decode, rest], [rest])


def test_who_gets_a_last_token_is_noted() -> None:
    """Whether it decodes or ends its prompt with it."""
    decode, prompt = decoding(1, [5], [6], row=0, num_new=2), request_of(2, num_new=1, row=1)
    goes_on = decoding(3, [5], [6], row=2, num_new=3)
    _, step = written([decode, goes_on], [(prompt, 3)])
    assert step.last == [decode, prompt]


def test_new_rows_are_set_up_before_the_step() -> None:
    """The rank keeps for a row what the request asked for, until another takes the row."""
    request = request_of(1, [5, 6], row=4, sampling=Sampling(temperature=0.5))
    plan, _ = written([], [(request, 2)], [request])
    assert plan.new_rows == [request.setup()]
    assert plan.new_rows[0].row == 4
    assert plan.new_rows[0].sampling.temperature == 0.5


def test_targets_are_given_for_scored_rows_alone() -> None:
    """Every other row projects one place at most."""
    decode = decoding(1, [5], [6], row=0)
    plain, scored = request_of(2, row=1), request_of(3, [11, 12, 13], row=2, scores=True)
    plan, step = written([decode], [(plain, 3), (scored, 3)])
    assert list(plan.scored) == [0, 0, 1]
    assert list(unpack_ints(plan.targets)) == [12, 13, -1]
    assert step.scored == [(scored, 2)]
    plan, _ = written([], [(request_of(4, row=1), 3)])
    assert (plan.scored, plan.targets) == (b"", b"")


def test_a_prompt_that_is_only_scored_samples_nothing() -> None:
    """Its row is part of the step all the same."""
    request = request_of(1, num_new=0, row=0, scores=True)
    plan, step = written([], [(request, 3)])
    assert columns(plan) == [(0, 0, 3, False)]
    assert (step.complete, step.sampled) == ([request], [])


def test_the_changes_of_the_grant_are_passed_on() -> None:
    """Differences of block tables, not tables: a step of many rows is a few numbers."""
    grant = BlockGrant(
        [], [], [], [], [], [Row(1), Row(0)], [2, 0], [1, 2], [BlockId(8), BlockId(5), BlockId(6)], 0, 0
    )
    plan = write_plan(InFlight(1), Choice([], [(request_of(1, row=1), 3)], 0, []), grant)
    assert list(unpack_ints(plan.changed_rows)) == [1, 0]
    assert list(unpack_ints(plan.changed_starts)) == [2, 0]
    assert list(unpack_ints(plan.changed_counts)) == [1, 2]
    assert list(unpack_ints(plan.blocks)) == [8, 5, 6]
    plan, _ = written([], [(request_of(2, row=0), 3)])
    assert (plan.changed_rows, plan.blocks) == (b"", b"")
