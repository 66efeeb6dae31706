"""What is built and installed: the wheel has every module under edgeinfer/ and nothing else, however it is built."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def build(kind: str, where: Path, out: Path, **environment: str) -> Path:
    """Runs a build hook of setuptools in `where`, as an installer without build isolation does."""
    return run_build(kind, where, out, **environment)[0]


def run_build(kind: str, where: Path, out: Path, **environment: str) -> tuple[Path, str]:
    """What `build` gives, and all that was written on the way."""
    command = [sys.executable, "-c", BUILD.format(f"build_{kind}"), str(out)]
    process = {**os.environ, **environment}
    done = subprocess.run(command, cwd=where, env=process, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1], done.stdout + done.stderr


@pytest.fixture(scope="module", params=["links", "text files for links"])
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist made from a checkout, unpacked."""
    work = tmp_path_factory.mktemp("build")
    copy_tree(work / "checkout", with_links=request.param == "links")
    sdist = build("sdist", work / "checkout", work)
    shutil.unpack_archive(sdist, work / "unpacked", filter="data")
    (folder,) = (work / "unpacked").iterdir()
    return folder


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Path:
    """The wheel made from the sdist, as a machine without a compiler makes it."""
    return build("wheel", unpacked, unpacked.parent, CC="false")


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


def test_a_build_without_a_compiler_says_so_in_one_line(unpacked: Path, tmp_path: Path) -> None:
    written = run_build("wheel", unpacked, tmp_path, CC="false")[1]
    lines = [line for line in written.splitlines() if "native kernel" in line]
    assert len(lines) == 1
    assert "no C compiler works here: the native kernel is left out" in lines[0]


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="there is no C compiler here")
def test_a_wheel_with_the_kernel_is_for_one_platform_and_runs(tmp_path: Path) -> None:
    copy_tree(tmp_path / "checkout", with_links=True)
    wheel = build("wheel", tmp_path / "checkout", tmp_path)
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if KERNEL in name]
        info = next(name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(info).decode()
        archive.extractall(tmp_path / "installed")
    assert [Path(name).parent.as_posix() for name in libraries] == [NATIVE]
    isa = (
        "from edgeinfer.runtime.native.library import native_kernel as k; from edgeinfer.runtime.native.binding import"
        " Binding; print(k().path, k().isa, *Binding(k().path).isas())"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-W", "error", "-c", isa]
    done = subprocess.run(command, cwd=Path("/"), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path, chosen, *usable = done.stdout.split()
    assert path == str(tmp_path / "installed" / libraries[0])
    assert chosen == usable[0]
    assert usable[-1] == "portable"


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="there is no C compiler here")
def test_an_editable_install_has_the_kernel_beside_its_sources(tmp_path: Path) -> None:
    copy_tree(tmp_path / "checkout", with_links=True)
    build("editable", tmp_path / "checkout", tmp_path)
    built = list((tmp_path / "checkout" / "runtime" / "native").glob(f"{KERNEL}.*"))
    assert len(built) == 1
    # A compiler that went away leaves no library of other sources behind.
    build("editable", tmp_path / "checkout", tmp_path, CC="false")
    assert not built[0].exists()


def test_the_built_library_is_no_part_of_the_repository() -> None:
    assert f"/runtime/native/{KERNEL}.*" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def test_data_is_in_the_wheel(wheel: Path) -> None:
    present = names(wheel)
    assert "edgeinfer/py.typed" in present
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
        assert "edgeinfer = edgeinfer.cli.main:main" in archive.read(info["entry_points.txt"]).decode()


def test_installed_wheel_imports_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import edgeinfer, importlib.resources as r; "
        "from edgeinfer.cli.main import build_parser; build_parser(); "
        "import edgeinfer.quant, edgeinfer.runtime, edgeinfer.apps, edgeinfer.apps.terminal; "
        "print(edgeinfer.__file__, r.files('edgeinfer').joinpath('py.typed').is_file())"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=Path("/"),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "edgeinfer" / "__init__.py"), "True"]


@pytest.mark.parametrize("room", ROOMS)
def test_links_point_to_the_rooms(room: str) -> None:
    link = ROOT / "edgeinfer" / room
    if not link.is_symlink():
        pytest.skip("this checkout was made without symbolic links")
    assert link.readlink() == Path("..", room)


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
    subprocess.run([bash, "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    assert shlex.split(script.read_text("utf-8").splitlines()[0].removeprefix("#!")) == ["/usr/bin/env", "bash"]


def test_the_extra_asks_for_the_range_of_llama_cpp_that_is_checked() -> None:
    from edgeinfer.bundle.gguf.library import SUPPORTED

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    first, end = SUPPORTED
    assert f"llama-cpp-python>={first},<{end}" in extras["gguf"]
