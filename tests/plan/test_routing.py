"""Where requests go: the policies, the score, and what the table remembers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.messages import PrefixReport, RequestId
from megallm.core_async.plan.routing import RoutingPolicy, RoutingTable

LONGEST, FIRST, BALANCED = (
    RoutingPolicy.LONGEST_PREFIX,
    RoutingPolicy.FIRST_PREFIX_BLOCK,
    RoutingPolicy.LOAD_BALANCED,
)


def table_of(
    num_ranks: int = 3,
    policy: RoutingPolicy = LONGEST,
    *,
    alpha: float = 0.5,
    max_requests: int = 10,
    max_keys: int = 100,
) -> RoutingTable:
    """Gives a table that knows nothing."""
    return RoutingTable(num_ranks, policy=policy, alpha=alpha, max_requests=max_requests, max_keys=max_keys)


def keys_of(text: str) -> list[bytes]:
    """Gives a key for each letter, which stands for all letters up to it."""
    return [text[: end + 1].encode() for end in range(len(text))]


def route(table: RoutingTable, *prompts: str, first: int = 1) -> list[int]:
    """Gives the rank of each prompt; ids count up."""
    return [table.route(RequestId(first + place), keys_of(prompt)) for place, prompt in enumerate(prompts)]


@pytest.mark.parametrize("policy", list(RoutingPolicy))
def test_prompts_without_blocks_go_to_the_rank_with_the_fewest_requests(policy: RoutingPolicy) -> None:
    """The lowest of several; who ends makes room."""
    table = table_of(policy=policy)
    assert route(table, "", "", "", "") == [0, 1, 2, 0]
    table.end(RequestId(3))
    assert route(table, "", first=5) == [2]


def test_a_prompt_goes_where_the_longest_part_of_it_is() -> None:
    """Work that is done is worth more than a rank that is a little less busy."""
    table = table_of()
    assert route(table, "abcd", "xyz") == [0, 1]
    assert route(table, "abcde", "xyzzy", "ab", first=3) == [0, 1, 0]


def test_a_share_of_the_prompt_counts_and_not_its_blocks() -> None:
    """One block of twenty is hardly worth a queue."""
    table = table_of(2)
    assert route(table, "a", "abcdefghijklmnopqrst") == [0, 1]


def test_load_takes_over_where_a_rank_is_full() -> None:
    """A popular prefix must not queue on one rank while the others idle."""
    table = table_of(2, alpha=0.4, max_requests=4)
    assert route(table, *["ab"] * 6) == [0, 0, 0, 1, 1, 1]


def test_the_weight_decides_between_prefix_and_load() -> None:
    """0 is load alone, 1 is the prefix alone."""
    assert route(table_of(2, alpha=0.0), *["ab"] * 4) == [0, 1, 1, 0]
    assert route(table_of(2, alpha=1.0, max_requests=1), *["ab"] * 4) == [0] * 4


def test_equal_scores_go_to_the_rank_that_had_the_prefix_last() -> None:
    """Its blocks are the least likely to be evicted."""
    table = table_of(2, alpha=0.0)
    assert route(table, "a", "a") == [0, 1]
    assert route(table, "a", first=3) == [1]


def test_the_first_block_is_enough_for_the_policy_that_looks_at_no_more() -> None:
    """Conversations that begin alike go together, whatever follows; only one key of each is kept."""
    table = table_of(policy=FIRST)
    assert route(table, "abcd", "axyz", "qrst") == [0, 0, 1]
    assert table.num_keys == 2


def test_balanced_routing_remembers_no_prefix() -> None:
    """What is never looked up costs no memory."""
    table = table_of(policy=BALANCED)
    assert route(table, *["ab"] * 4) == [0, 1, 2, 0]
    assert table.num_keys == 0


def test_the_prefix_used_longest_ago_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    """The table is bounded, and what it knows is always a prefix."""
    table = table_of(2, alpha=1.0, max_keys=4)
    route(table, "abc", "xy")
    assert table.num_keys == 4
    assert [table.route(RequestId(9), keys_of("abc")), table.num_keys] == [0, 4]


def test_a_flushed_rank_is_not_preferred_any_more() -> None:
    """After an update of the weights it has nothing."""
    table = table_of(2)
    route(table, "ab", "ab")
    table.forget_prefixes(0)
    assert route(table, "ab", first=3) == [1]
    table.forget_prefixes(1)
    table.end(RequestId(1))
    assert route(table, "ab", first=4) == [0]


def test_a_lost_rank_gets_nothing_and_gives_up_its_requests() -> None:
    """Whoever was there has to go elsewhere; their ends come too late and mean nothing."""
    table = table_of(2)
    route(table, "ab", "ab", "xy")
    assert table.lose(0) == [1, 2]
    assert route(table, "ab", first=4) == [1]
    table.end(RequestId(1))
    assert table.num_pending(1) == 2
    table.add(0)
    assert table.ranks == [0, 1]
    assert route(table, "qq", first=5) == [0]


def test_ranks_with_more_requests_than_rows_are_still_told_apart() -> None:
    """A popular prompt in a rush would else queue on one rank for good: no other has a place free either."""
    table = table_of(2, alpha=0.5, max_requests=2)
    assert route(table, *["ab"] * 8) == [0, 0, 0, 1, 1, 1, 1, 0]


def test_a_rank_that_reports_a_prefix_gone_is_not_taken_for_it() -> None:
    """Its cache is finite, and a rank that computes anew should be the idlest one."""
    table = table_of(2, alpha=0.8)
    assert route(table, "abcd", "x") == [0, 1]
    table.correct(0, PrefixReport([], keys_of("abcd")[::-1]))
    table.end(RequestId(2))
    assert route(table, "abcd", first=3) == [1]


def test_what_is_left_of_a_prefix_counts() -> None:
    """Caches give up the end of a prompt first."""
    table = table_of(2, alpha=0.8)
    route(table, "abcd", "xy")
    table.correct(0, PrefixReport([], keys_of("abcd")[:1:-1]))
    assert route(table, "abzz", first=3) == [0]


def test_a_report_of_a_prefix_computed_again_comes_after_that_of_its_end() -> None:
    """A request may be on its way to a rank while that one's report says that its prefix is gone."""
    table = table_of(2, alpha=0.8)
    route(table, "ab")
    table.correct(0, PrefixReport([], keys_of("ab")[::-1]))
    assert route(table, "xy", first=2) == [1]
    table.end(RequestId(2))
    table.correct(0, PrefixReport(keys_of("ab"), []))
    assert route(table, "ab", first=3) == [0]


def test_a_report_that_a_cache_was_flushed_counts_for_all_before_it() -> None:
    """What the same report says it has since then, it has."""
    table = table_of(2, alpha=0.8)
    route(table, "ab", "xy")
    route(table, "xy", first=3)
    table.correct(1, PrefixReport(keys_of("x"), [], is_flushed=True))
    assert route(table, "xz", first=4) == [1]
    table.correct(1, PrefixReport([], [], is_flushed=True))
    assert route(table, "xz", first=5) == [0]


def test_prefixes_that_no_request_had_are_not_learnt_from_reports() -> None:
    """Reports name each block that is filled; of outputs, nobody asks most."""
    table = table_of(2, FIRST)
    route(table, "ab")
    table.correct(0, PrefixReport(keys_of("ab") + keys_of("xyz"), []))
    table.correct(7, PrefixReport(keys_of("ab"), []))
    assert table.num_keys == 1


@given(
    prompts=st.lists(st.text("ab", max_size=5), max_size=40),
    policy=st.sampled_from(list(RoutingPolicy)),
    alpha=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    ends=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_the_rank_with_the_highest_score_is_taken(
    prompts: list[str], policy: RoutingPolicy, alpha: float, ends: list[bool]
) -> None:
    """As megatron-core's rule says it, written out over all ranks."""
    num_ranks, max_requests = 3, 4
    table = table_of(num_ranks, policy, alpha=alpha, max_requests=max_requests, max_keys=10_000)
    seen: list[dict[bytes, int]] = [{} for _ in range(num_ranks)]
    pending = [0] * num_ranks
    for number, (prompt, has_ended) in enumerate(zip(prompts, ends, strict=False), 1):
        keys = keys_of(prompt)
        keys = [] if policy is BALANCED else keys[:1] if policy is FIRST else keys
        depth = max((sum(key in known for key in keys) for known in seen), default=0)
        scores: list[tuple[float, ...]] = []
        for rank, known in enumerate(seen):
            matches = bool(depth) and keys[depth - 1] in known
            free = (1 - alpha) * (max_requests - pending[rank]) / max_requests
            score = alpha * depth / len(keys) * matches + free if depth else -pending[rank]
            scores.append((score, known[keys[depth - 1]] if matches else 0, -rank))
        rank = table.route(RequestId(number), keys_of(prompt))
        assert scores[rank][:2] == pytest.approx(max(scores)[:2])
        seen[rank] |= dict.fromkeys(keys, number)
        pending[rank] += 1
        if has_ended:
            table.end(RequestId(number))
            pending[rank] -= 1
    assert [table.num_pending(rank) for rank in range(num_ranks)] == pending


def test_a_request_beside_another_goes_where_that_is() -> None:
    """Forks of one prompt share its blocks, which are on one rank."""
    table = RoutingTable(3, policy=RoutingPolicy.LOAD_BALANCED, alpha=0.5, max_requests=4)
    rank = table.route(RequestId(1), [])
    assert [table.route(RequestId(number), [], RequestId(1)) for number in (2, 3)] == [rank, rank]
    assert table.num_pending(rank) == 3
    assert table.route(RequestId(4), []) != rank
