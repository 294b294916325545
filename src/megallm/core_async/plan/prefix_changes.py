"""What a cache has come to know and has forgotten, noted for the router of several ranks. Pure.

A hint, and bounded like one: what is lost of it costs a router a better choice, and no request
anything. Knows keys; neither blocks nor who takes the reports.
"""

from collections.abc import Iterable
from itertools import islice

from megallm.core_async.messages import PrefixReport


class PrefixChanges:
    """The last change of each key since it was reported, the oldest first.

    In that order no prefix is forgotten before what follows it, nor known after it.
    """

    def __init__(self, *, max_report: int = 4096, max_waiting: int = 1 << 17) -> None:
        """`max_report`: keys of a report. `max_waiting`: beyond them the older half is lost."""
        assert 0 < max_report <= max_waiting, f"reports of {max_report} keys, {max_waiting} wait"
        self._max_report = max_report
        self._max_waiting = max_waiting
        self._is_known: dict[bytes, bool] = {}
        self._is_flushed = False

    def __len__(self) -> int:
        """Gives how many changes wait for a report; a flush is one."""
        return len(self._is_known) + self._is_flushed

    def know(self, keys: Iterable[bytes]) -> None:
        """Notes that the cache has come to hold these, each after the one it follows."""
        self._note(keys, is_known=True)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Notes that the cache holds these no more, each before the one it follows."""
        self._note(keys, is_known=False)

    def flush(self) -> None:
        """Notes that the cache holds nothing."""
        self._is_known.clear()
        self._is_flushed = True

    def take(self) -> PrefixReport:
        """Gives the oldest changes that no report has had; what a report has no room for, the next has."""
        changes = self._is_known
        taken = list(islice(changes.items(), self._max_report))
        if len(taken) == len(changes):
            changes.clear()
        else:
            for key, _ in taken:
                del changes[key]
        is_flushed, self._is_flushed = self._is_flushed, False
        known = [key for key, is_known in taken if is_known]
        return PrefixReport(known, [key for key, is_known in taken if not is_known], is_flushed)

    # ---- below ---------------------------------------------------------------------------------

    def _note(self, keys: Iterable[bytes], *, is_known: bool) -> None:
        changes = self._is_known
        for key in keys:
            changes.pop(key, None)
            changes[key] = is_known
        if len(changes) > self._max_waiting:
            num_lost = len(changes) - self._max_waiting // 2
            self._is_known = dict(islice(changes.items(), num_lost, None))
