"""What a wheel of the package holds."""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "megallm"


def settings() -> dict[str, Any]:  # Any: TOML
    """Gives what pyproject.toml says to setuptools."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def test_every_file_that_is_no_python_is_named_for_the_wheel() -> None:
    """A checkout has it anyway: a page or a kernel's source that is forgotten fails for others alone."""
    named = {path for pattern in settings()["package-data"]["megallm"] for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}}
    assert others == named


def test_every_folder_of_modules_is_a_package() -> None:
    """Setuptools leaves the others out."""
    assert settings()["packages"]["find"]["where"] == ["src"]
    assert [path for path in PACKAGE.rglob("*.py") if not (path.parent / "__init__.py").exists()] == []
