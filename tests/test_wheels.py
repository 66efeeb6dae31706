"""Wheels for other systems, made on this one: what is in them loads, exports and computes what it should there.

A library is run where its system is this one or an emulator of it is installed (qemu-aarch64 with the libraries of
libc6-arm64-cross, Wine, musl's loader); of the others what their systems read before loading is checked.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from edgeinfer.runtime.native.binding import VERSION

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "runtime" / "native"
LOADER = ROOT / "tests" / "runtime" / "native" / "loader.c"
ARM_ROOT, ARM_MUSL_ROOT = Path("/usr/aarch64-linux-gnu"), Path("/usr/aarch64-linux-musl")
ARM = {"neon-i8mm", "neon-dot", "portable"}
# What the compiler has made of a system's C library, and of sources by their content; .ci/run begins without.
CACHE = ROOT / ".pytest_cache" / "zig"
TIME_LIMIT = 500
# Compiling a system's own libraries takes the time, so by default those are made that can be run.
RUN_BY_DEFAULT = ("linux-x86_64", "linux-aarch64", "windows-x86_64")
ON_DEMAND = ("musl-x86_64", "musl-aarch64", "windows-arm64", "macos-x86_64", "macos-arm64")


@pytest.fixture(scope="module")
def wheels() -> dict[str, Any]:
    """The functions of .ci/wheels.py, and setup.py's targets."""
    pytest.importorskip("setuptools.command.bdist_wheel")
    return runpy.run_path(str(ROOT / ".ci" / "wheels.py"))


@pytest.fixture(scope="module")
def made(
    wheels: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[str, Path]:
    """The wheel of the target that the test is asked for, which has passed the checks."""
    pytest.importorskip("ziglang", reason="needs the compiler of the `wheels` extra")
    pytest.importorskip("lief", reason="needs the `wheels` extra")
    name = request.param
    if name in RUN_BY_DEFAULT:
        runner(name)
    return name, build(wheels, name, tmp_path_factory.mktemp(name))[1]


def build(wheels: dict[str, Any], name: str, folder: Path, cache: Path = CACHE) -> list[Path]:
    """The sdist and a wheel."""
    with mock.patch.dict(os.environ, ZIG_LOCAL_CACHE_DIR=str(cache)):
        built: list[Path] = wheels["build_all"]([name], folder / "dist", say=lambda line: None)
    return built


def runner(name: str) -> list[str] | None:
    """What to put before a program of that system; None where nothing runs it, skips where something is missing."""
    system, machine = name.split("-")
    if system == "windows" and machine == "x86_64":
        return [required("wine")]
    if machine == "aarch64":
        sysroot = ARM_MUSL_ROOT if system == "musl" else ARM_ROOT
        if not (sysroot / "lib").is_dir():
            pytest.skip(f"needs the libraries of that system in {sysroot}")
        return [required("qemu-aarch64"), "-L", str(sysroot), "-cpu", "max"]
    if machine == "x86_64" and platform.machine() == "x86_64" and platform.system() == "Linux":
        if system == "musl":
            return [required("/lib/ld-musl-x86_64.so.1")]
        if system == "linux":
            return []
    return None


def required(tool: str) -> str:
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"needs {tool}")
    return found


def run(command: list[str], **environment: str) -> str:
    variables = os.environ | {"ZIG_LOCAL_CACHE_DIR": str(CACHE)} | environment
    # Python looks where it is started before it looks where PYTHONPATH says.
    done = subprocess.run(
        command, cwd="/", env=variables, capture_output=True, text=True, check=False, timeout=TIME_LIMIT
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def each(*names: str) -> pytest.MarkDecorator:
    on_demand = [pytest.param(name, marks=pytest.mark.exhaustive) for name in names if name in ON_DEMAND]
    return pytest.mark.parametrize("made", [*(n for n in names if n in RUN_BY_DEFAULT), *on_demand], indirect=True)


@pytest.mark.slow
@pytest.mark.every_case
# A system's C library is compiled for its first program.
@pytest.mark.timeout(600)
@each(*RUN_BY_DEFAULT, *ON_DEMAND)
def test_a_wheel_holds_a_kernel_that_its_system_runs(
    made: tuple[str, Path], wheels: dict[str, Any], tmp_path: Path
) -> None:
    name, wheel = made
    target = wheels["TARGETS"][name]
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract(f"edgeinfer/runtime/native/edgeinfer_native{target.suffix}", tmp_path)
    before = runner(name)
    if before is None:
        return  # The wheel was checked as it was built, and nothing here runs its programs.
    program = tmp_path / ("loader.exe" if name.startswith("windows") else "loader")
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", target.triple, "-std=gnu11", "-O1", "-w"]
    folders = [f"-I{NATIVE}", f"-I{LOADER.parent}"]
    if name.startswith("musl"):
        compiler.append("-dynamic")  # A program that is whole by itself loads nothing.
    run([*compiler, *folders, str(LOADER), "-o", str(program), *(["-lm", "-ldl"] if target.suffix == ".so" else [])])
    told = run([*before, str(program), library], WINEDEBUG="-all", WINEPREFIX=str(tmp_path / "wine")).splitlines()
    assert told[0] == f"version {VERSION}"
    assert all(line.endswith(": 204 cases, 0 failures") for line in told[1:]), told
    paths = [line.split(":")[0] for line in told[1:]]
    assert paths[-1] == "portable"
    assert set(paths) == ARM if target.machine == "arm64" else len(paths) > 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@each("linux-x86_64")
def test_a_wheel_tells_a_story_without_a_compiler(made: tuple[str, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(made[1]) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "import edgeinfer; from edgeinfer.runtime.native.library import native_kernel; print(native_kernel().path);"
        "print(edgeinfer.load(threads=1).generate('Once upon a time', max_tokens=8, temperature=0).text)"
    )
    path, *story = run([sys.executable, "-c", code], PATH="", PYTHONPATH=str(tmp_path / "installed")).splitlines()
    assert Path(path).is_relative_to(tmp_path / "installed")
    assert "".join(story).strip()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@each("linux-x86_64")
def test_the_same_sources_make_the_same_files(made: tuple[str, Path], wheels: dict[str, Any], tmp_path: Path) -> None:
    _, first = made
    for path in build(wheels, made[0], tmp_path, tmp_path / "cache"):
        assert path.read_bytes() == (first.parent / path.name).read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.timeout(600)
@each("linux-x86_64")
def test_a_wheel_that_its_system_would_not_load_is_refused(
    made: tuple[str, Path], wheels: dict[str, Any], tmp_path: Path
) -> None:
    """Tags that promise more than the library keeps, and a library that is not the wheel's."""
    name, wheel = made
    assert wheels["faults"](wheel, name) == []
    found = wheels["faults"](wheel, "linux-aarch64")
    assert any("tagged manylinux_2_17_aarch64" in line for line in found)
    assert any("is for ['X86_64'] instead of ['AARCH64']" in line for line in found)
    older = wheels["TARGETS"][name]._replace(tag="manylinux_2_5_x86_64")
    renamed = tmp_path / wheel.name.replace("2_17", "2_5")
    shutil.copy(wheel, renamed)
    with mock.patch.dict(wheels["TARGETS"], {name: older}):
        assert any("it needs GLIBC_2.14" in line for line in wheels["faults"](renamed, name))
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("edgeinfer-0.1.0.dist-info/WHEEL", "")
    assert wheels["faults"](empty, name) == ["libraries in the wheel: []"]


def test_an_unknown_target_is_refused(wheels: dict[str, Any]) -> None:
    """A misspelt system must not become a wheel of this one."""
    with mock.patch.dict(os.environ, EDGEINFER_TARGET="windows"), mock.patch("setuptools.setup"):
        constants = runpy.run_path(str(ROOT / "setup.py"))
        with pytest.raises(SystemExit, match="EDGEINFER_TARGET=windows is not a system that is known") as refused:
            constants["chosen_target"]()
    assert "windows-arm64" in str(refused.value)
