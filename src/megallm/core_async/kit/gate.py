"""The gate before the pump: it sleeps there until there is work. No polling, no lost wake-up."""

import anyio


class Gate:
    """Opens when somebody needs the pump; says whether it may plan new work.

    `need()` may be called by anyone in the loop who made work: the scheduler on a submission, an
    outbox whose reader left. Owner of `is_allowed`: the lifecycle. The pump calls `rest()`
    *before* it looks for work, so that work made while it looks opens the gate again.
    """

    def __init__(self) -> None:
        self._is_needed = False
        self._opened = anyio.Event()
        self.is_allowed = False
        self.order = 0
        """Counts what the lifecycle has said; see `PumpRested`."""

    @property
    def is_open(self) -> bool:
        """Whether somebody needed the pump since its last `rest`."""
        return self._is_needed

    def allow(self) -> None:
        """Lets the pump plan."""
        self.is_allowed = True
        self.call()

    def forbid(self) -> None:
        """Makes the pump finish what is in flight and plan nothing."""
        self.is_allowed = False
        self.call()

    def call(self) -> None:
        """Makes the pump come by and report that it rests, when it does."""
        self.order += 1
        self.need()

    def need(self) -> None:
        """Says that there is work."""
        if not self._is_needed:
            self._is_needed = True
            self._opened.set()

    def rest(self) -> None:
        """Says that no work is known; whoever makes some calls `need`."""
        if self._is_needed:
            self._is_needed = False
            self._opened = anyio.Event()

    async def wait(self) -> None:
        """Waits until somebody needs the pump."""
        await self._opened.wait()
