"""The house rules that no linter knows: budgets, floors, a test per file, words that must not be there.

Each test reports all its violations at once, `file:line: what`.
"""

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "megallm"

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60

TESTED_ELSEWHERE = {
    "__init__.py": "tests/test_import.py",
    "__main__.py": "tests/test_cli.py",
    "core_async/errors.py": "tests/test_import.py; holds no behaviour",
    "core_async/messages/ask.py": "by every actor's test; holds no behaviour",
    "core_async/messages/control.py": "the same",
    "core_async/messages/output.py": "the same",
    "core_async/messages/request.py": "the same",
    "core_async/messages/step.py": "the same",
    "core_async/protocols.py": "by every fake; holds types alone",
}
"""Source files without a test file of their own, and where their tests are."""

OWN_PACKAGES = {"megallm", "benchmarks", "tests"}

BANNED_WORDS = {"data", "helper", "helpers", "info", "manager", "util", "utils"}
"""Words that name nothing: no module, class or function carries them."""

BANNED_TEXT = {
    "a path of one machine": re.compile(r"(?<![\w.])/(?:work|root|home|opt|farm|tmp)/\w"),
    "unfinished work": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b"),
    "a package registry's host": re.compile(r"\b(?:pypi\.org|pythonhosted\.org|npmjs\.|debian\.org/debian)"),
    "how work was organised": re.compile(r"\b(?:issue|phase|milestone|ticket) #?\d", re.IGNORECASE),
}

type Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def python_files() -> list[Path]:
    """Gives every Python file of the project."""
    return sorted(path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def text_files() -> list[Path]:
    """Gives every file a person reads: the sources, and what stands beside them."""
    beside = [ROOT / "Makefile", ROOT / ".gitignore", *ROOT.glob("*.md"), *ROOT.glob("*.toml")]
    prose = [path for suffix in ("md", "txt") for path in (ROOT / "docs").rglob(f"*.{suffix}")]
    return sorted([*beside, *(ROOT / ".ci").iterdir(), *prose, *SOURCE.rglob("*.cpp"), *python_files()])


def name_of(path: Path) -> str:
    """Gives a file's path as a report shows it."""
    return path.relative_to(ROOT).as_posix()


def definitions(path: Path) -> Iterator[Definition]:
    """Gives every class and function of a file, nested ones too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def expect_none(violations: list[str]) -> None:
    """Fails with the whole list."""
    if violations:
        pytest.fail(f"{len(violations)} violations:\n" + "\n".join(violations), pytrace=False)


def test_no_file_is_over_its_budget() -> None:
    """A file that a reader can't hold in mind is two files."""
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    expect_none(
        [
            f"{name_of(path)}: {size} lines, at most {MAX_FILE_LINES}; split it"
            for path, size in sizes.items()
            if size > MAX_FILE_LINES
        ]
    )


def test_no_function_is_over_its_budget() -> None:
    """A function that does not fit a screen does more than one thing."""
    violations: list[str] = []
    for path in python_files():
        for node in definitions(path):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if not isinstance(node, ast.ClassDef) and size > MAX_FUNCTION_LINES:
                at = f"{name_of(path)}:{node.lineno}"
                violations.append(
                    f"{at}: {node.name} has {size} lines, at most {MAX_FUNCTION_LINES}; split it"
                )
    expect_none(violations)


def test_every_import_goes_to_a_lower_floor() -> None:
    """The floors are what lets a reader understand one file without the ones above it.

    In a process of its own: in this one import-linter would switch every logger off.
    """
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(done.stdout + done.stderr, pytrace=False)


def test_every_imported_package_is_a_declared_requirement() -> None:
    """What comes along with another package today is gone with its next release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = itertools.chain.from_iterable(project["optional-dependencies"].values())
    declared = {distribution_of(line) for line in [*project["dependencies"], *optional]}
    distributions = packages_distributions()
    expect_none(
        [
            f"{name_of(path)}: {package} is imported and not declared in pyproject.toml"
            for path in python_files()
            for package in sorted(imported_packages(path) - OWN_PACKAGES - sys.stdlib_module_names)
            if not {distribution_of(name) for name in distributions.get(package, [package])} & declared
        ]
    )


def imported_packages(path: Path) -> set[str]:
    """Gives the first part of every module that a file imports."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                modules += [alias.name for alias in names]
            case ast.ImportFrom(module=str(module)):
                modules.append(module)
            case _:
                pass
    return {module.partition(".")[0] for module in modules}


def distribution_of(requirement: str) -> str:
    """Gives the normalised name at the start of a requirement."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_every_source_file_has_a_test_file() -> None:
    """Whoever changes a file must know where its tests are: its folder below tests/, without core_async/."""
    violations: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        folder = path.parent.relative_to(SOURCE).as_posix().removeprefix("core_async").lstrip("/")
        test = ROOT / "tests" / folder / f"test_{path.stem}.py"
        is_bare_package = path.name == "__init__.py" and path.parent != SOURCE
        if (
            path.relative_to(SOURCE).as_posix() not in TESTED_ELSEWHERE
            and not is_bare_package
            and not test.exists()
        ):
            violations.append(f"{name_of(path)}: no {name_of(test)}")
    expect_none(violations)


def test_the_list_of_files_tested_elsewhere_is_true() -> None:
    """An exception that outlives its reason hides an untested file."""
    expect_none(
        [
            f"{name} is listed as tested elsewhere, and there is no such file"
            for name in TESTED_ELSEWHERE
            if not (SOURCE / name).exists()
        ]
    )


def test_packages_hold_no_code() -> None:
    """Nobody looks for logic in an `__init__.py`; below megallm's own they hold names at most.

    Names may come late, by PEP 562, where what holds them is dear to import.
    """
    allowed = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    late = {"if TYPE_CHECKING", "def __getattr__"}
    expect_none(
        [
            f"{name_of(path)}:{node.lineno}: code; move it into a module"
            for path in sorted(SOURCE.rglob("__init__.py"))
            if path.parent != SOURCE
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if not isinstance(node, allowed) and not ast.unparse(node).startswith(tuple(late))
        ]
    )


def test_names_say_what_a_thing_is() -> None:
    """A word that fits everything tells a reader nothing."""
    violations: list[str] = []
    for path in python_files():
        if words_of(path.stem) & BANNED_WORDS:
            violations.append(f"{name_of(path)}: the file's name says nothing")
        violations += [
            f"{name_of(path)}:{node.lineno}: {node.name} says nothing"
            for node in definitions(path)
            if words_of(node.name) & BANNED_WORDS
        ]
    expect_none(violations)


def words_of(name: str) -> set[str]:
    """Gives the words of a snake_case or CamelCase name, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_public_things_have_a_docstring() -> None:
    """The first line is all most readers read; a protocol's one-line members speak for themselves."""
    violations: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not ast.get_docstring(tree):
            violations.append(f"{name_of(path)}:1: no docstring")
        violations += [
            f"{name_of(path)}:{node.lineno}: no docstring: {node.name}" for node in undocumented(tree)
        ]
    expect_none(violations)


def undocumented(parent: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    """Gives the public classes, functions and methods below `parent` that have no docstring and need one."""
    for node in parent.body:
        if not isinstance(
            node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node) and not is_self_explaining(node):
            yield node
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node)


def is_self_explaining(node: Definition) -> bool:
    """Says whether a function is a protocol's `...`, an overload, or documented where it was declared."""
    decorators = {getattr(decorator, "id", "") for decorator in node.decorator_list}
    body = node.body[0]
    is_stub = isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant) and body.value.value is ...
    return not isinstance(node, ast.ClassDef) and (is_stub or bool(decorators & {"overload", "override"}))


def test_no_file_says_what_only_its_author_can_read() -> None:
    """Paths of a machine, plans and postponed work mean nothing to the next reader."""
    expect_none(
        [
            f"{name_of(path)}:{number}: {what}: {line.strip()[:100]}"
            for path in text_files()
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
            for what, pattern in BANNED_TEXT.items()
            if pattern.search(line)
        ]
    )
