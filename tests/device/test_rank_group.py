"""Ranks over torch.distributed; with several of them it is tested in tests/ranks."""

import pytest
import torch
from torch import distributed

from megallm.core_async.device.rank_group import MAX_RECORD, RankGroup, gathered_logits
from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron


def group() -> distributed.ProcessGroup:
    """Gives a group of this process alone."""
    with quiet_megatron():
        ensure_process_groups()
    world = distributed.group.WORLD
    assert world is not None
    return world


def test_a_group_knows_its_ranks_and_exchanges_records() -> None:
    """Whatever their length, up to the limit."""
    ranks = RankGroup(group(), torch.device("cpu"))
    assert (ranks.place, ranks.names) == (0, (0,))
    for record in (b"", b"\0\1\0", bytes(MAX_RECORD)):
        assert ranks.exchange(record) == [record]


def test_a_record_that_is_too_long_is_refused() -> None:
    """All records have one size on the wire."""
    with pytest.raises(ValueError, match=r"a record of 1,025 bytes; ranks exchange 1,024 at most"):
        RankGroup(group(), torch.device("cpu")).exchange(bytes(MAX_RECORD + 1))


def test_logits_of_one_rank_are_the_whole() -> None:
    """The parts come in the ranks' order."""
    logits = torch.arange(6.0).view(2, 3)
    assert torch.equal(gathered_logits(logits, group()), logits)
