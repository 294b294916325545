"""A JSON file of a model folder as named settings; knows JSON, no model.

Each error names the file and the key.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from megallm.core_async.errors import ModelFileError


class Settings:
    """The settings of a file, or of an object inside it, read by key and type."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:  # Any: JSON
        self.path: Final = path
        self.values: Final = values
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path) -> "Settings":
        """Reads a file.

        Raises: ModelFileError when it is absent or holds no JSON object.
        """
        try:
            values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except OSError as error:
            raise ModelFileError(f"{path} can't be read: {error}; fetch the folder again") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{path} holds no JSON object: {error}; fetch the file again") from error
        return cls(path, values)

    def name_of(self, key: str) -> str:
        """Gives a key's whole name, for messages."""
        return f"{self.path}: {self._prefix}{key}"

    def has(self, key: str) -> bool:
        """Says whether a key is there and not null."""
        return self.values.get(key) is not None

    def value[T](self, key: str, kind: type[T]) -> T:
        """Gives a setting that must be there.

        Raises: ModelFileError when it is absent, null, or of another type than `kind`.
        """
        if not self.has(key):
            raise ModelFileError(f"{self.name_of(key)} is missing; the file is incomplete, fetch it again")
        found = self.values[key]
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind:
            raise ModelFileError(
                f"{self.name_of(key)} is {type(found).__name__} {str(found)[:40]}, "
                f"{kind.__name__} is needed; fetch the file again"
            )
        return found

    def value_or[T](self, key: str, default: T) -> T:
        """Gives a setting, or `default` when it is absent or null; the type must be the default's."""
        return self.value(key, type(default)) if self.has(key) else default

    def numbers(self, key: str) -> list[float]:
        """Gives a list of numbers that must be there."""
        found = self.value(key, list)
        if not all(type(item) in (int, float) for item in found):
            raise ModelFileError(f"{self.name_of(key)} is no list of numbers; fetch the file again")
        return found

    def over(self, defaults: Mapping[str, Any]) -> "Settings":  # Any: JSON
        """Gives the same settings and, for keys that are absent, others; null stays null."""
        return Settings(self.path, {**defaults, **self.values}, self._prefix)

    def inside(self, key: str) -> "Settings":
        """Gives the settings of an object under a key; none when it is absent or null."""
        return Settings(self.path, self.value_or(key, {}), f"{self._prefix}{key}.")
