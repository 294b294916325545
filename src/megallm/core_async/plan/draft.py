"""A block grant while it is being made."""

from megallm.core_async.messages import BlockGrant, BlockId, Row


class Draft:
    """The columns of a `BlockGrant`, growing."""

    __slots__ = (
        "_blocks",
        "_changed_counts",
        "_changed_rows",
        "_changed_starts",
        "admitted",
        "held",
        "num_cached",
        "num_chunk",
        "preempted",
    )

    def __init__(self) -> None:
        self.admitted: list[int] = []
        self.num_cached: list[int] = []
        self.num_chunk: list[int] = []
        self.preempted: list[Row] = []
        self.held: list[Row] = []
        self._changed_rows: list[Row] = []
        self._changed_starts: list[int] = []
        self._changed_counts: list[int] = []
        self._blocks: list[BlockId] = []

    def change(self, row: Row, start: int, blocks: list[BlockId]) -> None:
        """Notes the new entries of a row's block table from `start` on."""
        self._changed_rows.append(row)
        self._changed_starts.append(start)
        self._changed_counts.append(len(blocks))
        self._blocks += blocks

    def grant(self, *, num_free: int, num_cached_blocks: int) -> BlockGrant:
        """Gives the message."""
        return BlockGrant(
            admitted=self.admitted,
            num_cached=self.num_cached,
            num_chunk=self.num_chunk,
            preempted=self.preempted,
            held=self.held,
            changed_rows=self._changed_rows,
            changed_starts=self._changed_starts,
            changed_counts=self._changed_counts,
            blocks=self._blocks,
            num_free=num_free,
            num_cached_blocks=num_cached_blocks,
        )
