"""The kernels' C drivers, compiled with the flags of setup.py: run here, under sanitizers and on an emulated ARM."""

from __future__ import annotations

import platform
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.cli import TIME_LIMIT

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "runtime" / "native"
DRIVERS = ("driver", "attention_driver", "attention_tables")
STRICT = ["-Wall", "-Wextra", "-Werror"]
# Lines without variables: following those through unrolled loops takes GCC minutes.
SANITIZERS = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
CROSS = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
LINE = re.compile(r"([\w-]+): (\d+) cases, (\d+) failures")
# What the kernel of Linux calls the features that the paths need.
FEATURES = {"avx2": "avx2", "avx_vnni": "avxvnni", "avx512_vnni": "avx512vnni"}
FEATURES |= {"asimddp": "neon-dot", "i8mm": "neon-i8mm"}


@pytest.fixture(scope="module")
def flags() -> dict[str, Any]:
    """The constants of setup.py, which is run without building anything."""
    pytest.importorskip("setuptools")
    with mock.patch("setuptools.setup"):
        return runpy.run_path(str(ROOT / "setup.py"))


def succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False, timeout=TIME_LIMIT).returncode == 0


def compiled(flags: dict[str, Any], compiler: str, machine: str, folder: Path, *extra: str) -> Path:
    """A folder with the drivers, linked with all paths of a machine; one whose flags the compiler does not know is left
    empty."""
    special = flags["VECTOR_FILES"].get(flags["MACHINES"].get(machine, machine), {})
    common = [compiler, *flags["UNIX_FLAGS"], *STRICT, *extra, f"-I{NATIVE}"]
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    objects = []
    for name in ("portable.c", "dispatch.c", "attention.c", "attention_check.c", "attention_portable.c", *special):
        own = special.get(name, ([],))[0]
        if not succeeds([compiler, *own, "-c", str(empty), "-o", str(folder / "empty.o")]):
            own = []
        objects.append(str(folder / f"{name}.o"))
        run([*common, *own, "-c", str(NATIVE / name), "-o", objects[-1]])
    for name in DRIVERS:
        run([*common, str(Path(__file__).with_name(f"{name}.c")), *objects, "-o", str(folder / name), "-lm"])
    return folder


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def paths_tested(
    drivers: Path, *emulator: str, attention_cases: int = 100, names: tuple[str, ...] = DRIVERS
) -> set[str]:
    """Names of the paths that every driver ran, each on all cases and without a failure."""
    found = []
    for name in names:
        cases, arguments = (attention_cases, [str(attention_cases)]) if name == "attention_driver" else (1001, [])
        output = run([*emulator, str(drivers / name), *arguments])
        lines = [LINE.fullmatch(line) for line in output.splitlines()]
        assert lines and all(line and int(line[2]) >= cases and line[3] == "0" for line in lines), output
        found.append({line[1] for line in lines if line})
    assert all(paths == found[0] for paths in found)
    return found[0]


def native_compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None or platform.system() == "Windows":
        pytest.skip("needs a C compiler called cc, gcc or clang")
    return found


def advertised() -> set[str]:
    """Paths that this machine should run, as Linux tells it; empty elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text("utf-8").split()) if cpuinfo.is_file() else set()
    return {path for feature, path in FEATURES.items() if feature in words}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_path_of_this_machine_under_sanitizers(flags: dict[str, Any], tmp_path: Path) -> None:
    compiler = native_compiler()
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    binary = str(tmp_path / "probe")
    if not (succeeds([compiler, *SANITIZERS, str(probe), "-o", binary]) and succeeds([binary])):
        pytest.skip("needs a C compiler with AddressSanitizer and UndefinedBehaviorSanitizer")
    drivers = compiled(flags, compiler, platform.machine().lower(), tmp_path, *SANITIZERS)
    assert paths_tested(drivers) >= {"portable", *advertised()}


@pytest.fixture(scope="module")
def emulated(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drivers for 64-bit ARM."""
    for tool in (CROSS, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    return compiled(flags, CROSS, "aarch64", tmp_path_factory.mktemp("aarch64"), "-static")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("cpu", "paths"),
    [
        ("max", {"neon-i8mm", "neon-dot", "portable"}),
        ("cortex-a76", {"neon-dot", "portable"}),
        ("cortex-a72", {"portable"}),
    ],
)
def test_emulated_arm(emulated: Path, cpu: str, paths: set[str]) -> None:
    # Older processors differ in which paths they have; what the paths compute is the same program's.
    names, cases = (DRIVERS, 20) if cpu == "max" else (("attention_driver",), 2)
    assert paths_tested(emulated, EMULATOR, "-cpu", cpu, attention_cases=cases, names=names) == paths
