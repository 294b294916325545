"""Swaps on instances, taken back."""

import pytest

from megallm.core_async.device.swaps import Swaps


class Thing:
    """Something of the user's."""

    def speak(self) -> str:
        """Gives the class's own answer."""
        return "class"


def test_undo_uncovers_what_the_class_says() -> None:
    """An attribute left behind on the instance would outlive the engine."""
    thing, swaps = Thing(), Swaps()
    swaps.set(thing, "speak", lambda: "ours")
    assert thing.speak() == "ours"
    swaps.undo()
    assert vars(thing) == {}
    assert thing.speak() == "class"


def test_undo_gives_back_what_the_user_had_set() -> None:
    """The user may have patched the same instance before."""
    thing, swaps = Thing(), Swaps()
    theirs = lambda: "theirs"  # noqa: E731 - compared by identity
    thing.speak = theirs
    swaps.set(thing, "speak", lambda: "ours")
    swaps.set(thing, "speak", lambda: "ours again")
    swaps.undo()
    assert vars(thing) == {"speak": theirs}


def test_changes_are_taken_back_last_first_and_once() -> None:
    """A later change may rest on an earlier one; and shutdown may run twice."""
    order: list[int] = []
    swaps = Swaps()
    swaps.on_undo(lambda: order.append(1))
    swaps.on_undo(lambda: order.append(2))
    swaps.undo()
    swaps.undo()
    assert order == [2, 1]


def test_one_failure_does_not_keep_the_others() -> None:
    """The user's model matters more than the error, which is raised all the same."""
    thing, swaps = Thing(), Swaps()
    swaps.set(thing, "speak", lambda: "ours")

    def fail() -> None:
        raise ValueError("can't")

    swaps.on_undo(fail)
    with pytest.raises(ValueError, match="can't"):
        swaps.undo()
    assert vars(thing) == {}
