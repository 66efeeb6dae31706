"""What is built and installed: the wheel has every module under edgeinfer/ and nothing else, however it is built."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli import TIME_LIMIT

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("export", "quant", "runtime", "apps")
BUILTIN = ROOT / "edgeinfer" / "builtin"
PAGE = ROOT / "apps" / "desktop" / "static"
BUILD = "import sys; from setuptools import build_meta; print(build_meta.{}(sys.argv[1]))"
NATIVE = "edgeinfer/runtime/native"
KERNEL = "edgeinfer_native"
COMPILER = any(map(shutil.which, ("cc", "gcc", "clang", "cl")))


def sources(*suffixes: str) -> Iterator[tuple[Path, str]]:
    """Files of the package in the tree, each with the path it has in the wheel."""
    for folder in ("edgeinfer", *ROOMS):
        for base, folders, files in os.walk(ROOT / folder):
            # os.walk lists links to folders but does not enter them, so each file comes once, by its real path.
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in files:
                path = Path(base, name)
                inside = path.relative_to(ROOT).as_posix()
                if name.endswith(suffixes):
                    yield path, inside if folder == "edgeinfer" else f"edgeinfer/{inside}"


def copy_tree(target: Path, *, with_links: bool) -> None:
    """A checkout with the links, or with the text files that Windows makes of them by default."""
    target.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    for name in ("edgeinfer", *ROOMS):
        unwanted = shutil.ignore_patterns("__pycache__", f"{KERNEL}.*")
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=unwanted)
    if not with_links:
        for name in ROOMS:
            (target / "edgeinfer" / name).unlink()
            (target / "edgeinfer" / name).write_text(f"../{name}")


def run(where: Path, code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a Python of its own, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=where,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done


@dataclass(frozen=True)
class Built:
    """What a build hook made, and all that it wrote on the way."""

    path: Path
    said: str


def build(kind: str, where: Path, out: Path, **environment: str) -> Built:
    """Runs a build hook of setuptools in `where`, as an installer without build isolation does."""
    done = run(where, BUILD.format(f"build_{kind}"), str(out), **environment)
    return Built(out / done.stdout.split()[-1], done.stdout + done.stderr)


def make_sdist(work: Path, *, with_links: bool) -> Path:
    """The sdist of a checkout."""
    copy_tree(work / "checkout", with_links=with_links)
    return build("sdist", work / "checkout", work).path


def unpack(sdist: Path) -> Path:
    shutil.unpack_archive(sdist, sdist.parent / "unpacked", filter="data")
    (folder,) = (sdist.parent / "unpacked").iterdir()
    return folder


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sdist(tmp_path_factory.mktemp("build"), with_links=True)


@pytest.fixture(scope="module")
def unpacked(sdist: Path) -> Path:
    return unpack(sdist)


@pytest.fixture(scope="module")
def without_kernel(unpacked: Path) -> Built:
    """The wheel made from the sdist, as a machine without a compiler makes it."""
    return build("wheel", unpacked, unpacked.parent, CC="false")


@pytest.fixture(scope="module")
def wheel(without_kernel: Built) -> Path:
    return without_kernel.path


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_every_module_is_in_the_wheel_and_nothing_outside_edgeinfer(wheel: Path) -> None:
    expected = {name for _, name in sources(".py")}
    assert {name for name in names(wheel) if name.endswith(".py")} == expected
    assert all(name.startswith("edgeinfer/") for name in names(wheel))


def test_the_sdist_carries_the_kernels_sources(unpacked: Path) -> None:
    present = {path.name for path in (unpacked / "runtime" / "native").iterdir()}
    assert {path.name for path in (ROOT / "runtime" / "native").glob("*.[ch]")} <= present
    assert not any(name.startswith(KERNEL) for name in present)


def test_a_wheel_without_the_kernel_is_for_all_platforms(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any(KERNEL in name for name in names(wheel))


@pytest.mark.slow
def test_text_files_for_links_make_the_same_packages(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    """Windows checks links out as such files by default."""
    other = make_sdist(tmp_path, with_links=False)
    with tarfile.open(other) as ours, tarfile.open(sdist) as theirs:
        assert set(ours.getnames()) == set(theirs.getnames())
    assert names(build("wheel", unpack(other), tmp_path, CC="false").path) == names(wheel)


def test_a_build_without_a_compiler_says_so_in_one_line(without_kernel: Built) -> None:
    lines = [line for line in without_kernel.said.splitlines() if "native kernel" in line]
    assert len(lines) == 1
    assert "no C compiler works here: the native kernel is left out" in lines[0]


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="there is no C compiler here")
def test_a_wheel_with_the_kernel_is_for_one_platform_and_runs(tmp_path: Path) -> None:
    copy_tree(tmp_path / "checkout", with_links=True)
    wheel = build("wheel", tmp_path / "checkout", tmp_path, **quick_compiler(tmp_path)).path
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if KERNEL in name]
        info = next(name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(info).decode()
        archive.extractall(tmp_path / "installed")
    assert [Path(name).parent.as_posix() for name in libraries] == [NATIVE]
    code = (
        "from edgeinfer.runtime.native.library import native_kernel as k; from edgeinfer.runtime.native.binding import"
        " Binding; print(k().path, k().isa, *Binding(k().path).isas())"
    )
    done = run(Path("/"), code, PYTHONPATH=str(tmp_path / "installed"), PYTHONWARNINGS="error")
    path, chosen, *usable = done.stdout.split()
    assert path == str(tmp_path / "installed" / libraries[0])
    assert chosen == usable[0]
    assert usable[-1] == "portable"


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="there is no C compiler here")
def test_an_editable_install_has_the_kernel_beside_its_sources(tmp_path: Path) -> None:
    copy_tree(tmp_path / "checkout", with_links=True)
    build("editable", tmp_path / "checkout", tmp_path, **quick_compiler(tmp_path))
    built = list((tmp_path / "checkout" / "runtime" / "native").glob(f"{KERNEL}.*"))
    assert len(built) == 1
    # A compiler that went away leaves no library of other sources behind.
    build("editable", tmp_path / "checkout", tmp_path, CC="false")
    assert not built[0].exists()


def quick_compiler(folder: Path) -> dict[str, str]:
    """The environment of a build whose compiler optimises nothing, which takes a fraction of the time."""
    real = shutil.which("cc")
    if real is None:
        return {}
    script = folder / "quick-cc"
    script.write_text(f'#!/bin/sh\nexec "{real}" "$@" -O1\n')
    script.chmod(0o755)
    return {"CC": str(script)}


def test_the_built_library_is_no_part_of_the_repository() -> None:
    assert f"/runtime/native/{KERNEL}.*" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def test_data_is_in_the_wheel(wheel: Path) -> None:
    present = names(wheel)
    texts = {f"edgeinfer/export/source/calibration/{name}" for name in ("calibrate.txt", "held_out.txt", "NOTICE.md")}
    assert texts <= present
    data = ("py.typed", "apps/bench/stories.json", "apps/desktop/languages.json", "apps/desktop/schema.sql")
    assert {f"edgeinfer/{name}" for name in data} <= present
    for path in BUILTIN.rglob("*"):
        if path.is_file():
            assert path.relative_to(ROOT).as_posix() in present
    for path in PAGE.rglob("*"):
        if path.is_file():
            assert f"edgeinfer/{path.relative_to(ROOT).as_posix()}" in present


def test_wheel_carries_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = {name.split("/", 1)[1]: name for name in archive.namelist() if ".dist-info/" in name}
        assert "Apache License" in archive.read(info["licenses/LICENSE"]).decode()
        assert "edgeinfer = edgeinfer.apps.cli.main:main" in archive.read(info["entry_points.txt"]).decode()


def test_installed_wheel_imports_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import edgeinfer, importlib.resources as r; "
        "from edgeinfer.apps.cli.main import build_parser; build_parser(); "
        "import edgeinfer.quant, edgeinfer.runtime, edgeinfer.apps, edgeinfer.apps.terminal; "
        "print(edgeinfer.__file__, r.files('edgeinfer').joinpath('py.typed').is_file())"
    )
    done = run(Path("/"), code, PYTHONPATH=str(tmp_path), PYTHONWARNINGS="error")
    assert done.stdout.split() == [str(tmp_path / "edgeinfer" / "__init__.py"), "True"]


def test_links_point_to_the_rooms() -> None:
    links = {room: ROOT / "edgeinfer" / room for room in ROOMS}
    if not any(link.is_symlink() for link in links.values()):
        pytest.skip("this checkout was made without symbolic links")
    assert {room: link.readlink() for room, link in links.items()} == {room: Path("..", room) for room in ROOMS}


def test_every_folder_with_python_is_a_package() -> None:
    folders = {path.parent for path, _ in sources(".py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_versions_agree() -> None:
    import edgeinfer

    try:
        installed = importlib.metadata.version("edgeinfer")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("edgeinfer is run from the checkout without being installed")
    assert edgeinfer.__version__ == installed


def test_readme_and_ci_run_the_same_test_command() -> None:
    command = 'python3 -m venv .venv && .venv/bin/pip install -q -e ".[dev]" && .venv/bin/pytest'
    for path in (ROOT / "README.md", ROOT / ".ci" / "run"):
        assert command in path.read_text("utf-8").splitlines(), f"{path.name} lacks: {command}"


def test_ci_script_is_valid_and_executable() -> None:
    script = ROOT / ".ci" / "run"
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    subprocess.run([bash, "-n", str(script)], check=True, timeout=TIME_LIMIT)
    assert os.access(script, os.X_OK)
    assert shlex.split(script.read_text("utf-8").splitlines()[0].removeprefix("#!")) == ["/usr/bin/env", "bash"]


def test_the_extra_asks_for_the_range_of_llama_cpp_that_is_checked() -> None:
    from edgeinfer.bundle.gguf.library import SUPPORTED

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    first, end = SUPPORTED
    assert f"llama-cpp-python>={first},<{end}" in extras["gguf"]
