"""Changes to the user's objects that are taken back, in reverse order. Knows nothing of models."""

from collections.abc import Callable
from contextlib import ExitStack


class Swaps:
    """A log of changes. Owned by whoever binds a model; `undo` leaves every object as it was."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def set(self, owner: object, name: str, value: object) -> None:
        """Gives one instance an attribute of its own, hiding its class's.

        The instance's dictionary is written directly: a module would register some values.
        """
        attributes = vars(owner)
        if name in attributes:
            self._undo.callback(attributes.__setitem__, name, attributes[name])
        else:
            self._undo.callback(attributes.pop, name)
        attributes[name] = value

    def on_undo(self, take_back: Callable[[], object]) -> None:
        """Remembers how to take back a change made by the caller."""
        self._undo.callback(take_back)

    def undo(self) -> None:
        """Takes every change back, the last first; a second call finds nothing to do."""
        self._undo.close()
