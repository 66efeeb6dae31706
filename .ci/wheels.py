"""Builds the sdist and the wheels of every system on this one, and refuses a wheel that its system would not load.

    pip install -e ".[wheels]" && python .ci/wheels.py --out dist [linux-x86_64 windows-arm64 ...]

The same sources make the same files, byte by byte, whoever builds them.
"""

from __future__ import annotations

import argparse
import gzip
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "edgeinfer/runtime/native/"
BUILD = "import sys; from setuptools import build_meta; print(build_meta.{}(sys.argv[1]))"
# The C functions that runtime/native/binding.py calls, and the one that onnxruntime does.
EXPORTS = {f"edgeinfer_{name}" for name in ("version", "isa_name", "isa_usable", "select", "multiply", "row", "attend")}
EXPORTS |= {"edgeinfer_activate", "edgeinfer_probe_dots", "edgeinfer_probe_read", "edgeinfer_drop_behind"}
EXPORTS |= {"edgeinfer_pack", "edgeinfer_unpack", "edgeinfer_dequantize", "RegisterCustomOps"}
# The loader finds variables that each thread has its own of; every glibc has it (PEP 600 names it as well).
GLIBC = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
# Also marked as exported by zig's linker.
LINKERS_OWN = {"_mh_dylib_header", "__dso_handle"}


def setup_constants() -> dict[str, Any]:
    """The constants of setup.py, which is run without building anything."""
    with mock.patch("setuptools.setup"):
        return runpy.run_path(str(ROOT / "setup.py"))


TARGETS = setup_constants()["TARGETS"]


# ---- building ----


def build_all(names: Iterable[str], out: Path, say: Callable[[str], None] = print) -> list[Path]:
    """The sdist, and a wheel for each named target made from it, all checked.

    Raises:
        SystemExit: a wheel does not build, or its system would not load it.
    """
    out.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)
    epoch = _epoch()
    with tempfile.TemporaryDirectory() as work:
        made = [make_sdist(out, epoch)]
        say(made[0].name)
        for name in names:
            folder = Path(work, name)
            shutil.unpack_archive(made[0], folder, filter="data")
            (source,) = folder.iterdir()
            wheel = out / _hook("build_wheel", source, out, EDGEINFER_TARGET=name, SOURCE_DATE_EPOCH=str(epoch))
            if found := faults(wheel, name):
                raise SystemExit("\n".join([f"{wheel.name} is not fit for {name}:", *found]))
            say(f"{wheel.name}  {wheel.stat().st_size / 1e6:.1f} MB")
            made.append(wheel)
    return made


def make_sdist(out: Path, epoch: int) -> Path:
    """A source archive without timestamps or user names."""
    with tempfile.TemporaryDirectory() as work:
        first = Path(work, _hook("build_sdist", ROOT, Path(work)))
        target = out / first.name
        with (
            tarfile.open(first) as given,
            target.open("wb") as raw,
            gzip.GzipFile("", "wb", mtime=epoch, fileobj=raw) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as taken,
        ):
            for member in sorted(given.getmembers(), key=lambda member: member.name):
                member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                taken.addfile(member, given.extractfile(member) if member.isfile() else None)
    return target


def _hook(name: str, source: Path, out: Path, **environment: str) -> str:
    """Runs a build hook of setuptools as an installer without build isolation does; returns the file's name."""
    command = [sys.executable, "-c", BUILD.format(name), str(out.resolve())]
    done = subprocess.run(command, cwd=source, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} fails:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout.split()[-1]


def _epoch() -> int:
    """The time that all files get: that of the last change, which is the same for everyone."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


# ---- checking ----


def faults(wheel: Path, name: str) -> list[str]:
    """Why a system would not load the kernel of its wheel; empty where it would."""
    import lief

    target = TARGETS[name]
    with zipfile.ZipFile(wheel) as archive:
        inside = [entry for entry in archive.namelist() if entry.startswith(f"{FOLDER}edgeinfer_native")]
        info = next(entry for entry in archive.namelist() if entry.endswith(".dist-info/WHEEL"))
        marks = archive.read(info).decode().splitlines()
        data = archive.read(inside[0]) if inside else b""
    found = []
    if inside != [f"{FOLDER}edgeinfer_native{target.suffix}"]:
        return [f"libraries in the wheel: {inside}"]
    if f"Tag: py3-none-{target.tag}" not in marks or not wheel.name.endswith(f"-py3-none-{target.tag}.whl"):
        found.append(f"it is not tagged {target.tag}")
    if "Root-Is-Purelib: false" not in marks:
        found.append("it says that it belongs to no platform")
    library: Any = lief.parse(list(data))
    kinds = {
        lief.ELF.Binary: ("linux", "musl"),
        lief.PE.Binary: ("windows",),
        lief.MachO.Binary: ("macos",),
    }
    if name.split("-")[0] not in kinds.get(type(library), ()):
        return [*found, f"the library is {type(library).__name__}, not of {name}"]
    look = {".so": _elf_faults, ".dll": _pe_faults, ".dylib": _macho_faults}[target.suffix]
    return found + look(library, target)


def _elf_faults(library: Any, target: Any) -> list[str]:
    musl = target.tag.startswith("musllinux")
    found = _differences("exports", {s.name for s in library.exported_symbols}, EXPORTS)
    found += _differences("is for", {library.header.machine_type.name}, {_machine(target, "X86_64", "AARCH64")})
    if extra := set(library.libraries) - ({"libc.so"} if musl else GLIBC):
        found.append(f"it needs {', '.join(sorted(extra))}")
    versions = {
        auxiliary.name for needed in library.symbols_version_requirement for auxiliary in needed.get_auxiliary_symbols()
    }
    newest = (0, 0) if musl else tuple(map(int, target.tag.split("_")[1:3]))
    for version in sorted(versions):
        if tuple(map(int, version.removeprefix("GLIBC_").split(".")[:2])) > newest:
            found.append(f"it needs {version}")
    return found


def _pe_faults(library: Any, target: Any) -> list[str]:
    found = _differences("exports", {entry.name for entry in library.get_export().entries}, EXPORTS)
    found += _differences("is for", {library.header.machine.name}, {_machine(target, "AMD64", "ARM64")})
    # The C library of Windows 10 and later comes in such parts.
    ours = ("kernel32.dll", "api-ms-win-crt-")
    return found + [f"it needs {name}" for name in library.libraries if not name.lower().startswith(ours)]


def _macho_faults(library: Any, target: Any) -> list[str]:
    exported = {symbol.name.removeprefix("_") for symbol in library.exported_symbols}
    found = _differences("exports", exported - LINKERS_OWN, EXPORTS)
    found += _differences("is for", {library.header.cpu_type.name}, {_machine(target, "X86_64", "ARM64")})
    own, *needed = (command.name for command in library.libraries)
    if not own.startswith("@rpath/"):
        found.append(f"its own name is a path of the machine that built it: {own}")
    found += [f"it needs {name}" for name in needed if name != "/usr/lib/libSystem.B.dylib"]
    oldest = tuple(map(int, target.tag.split("_")[1:3]))
    if tuple(library.build_version.minos[:2]) > oldest:
        found.append(f"it needs macOS {library.build_version.minos}")
    if target.machine == "arm64" and not library.has_code_signature:
        found.append("it has no signature, without which that processor runs nothing")
    return found


def _machine(target: Any, x86: str, arm: str) -> str:
    return x86 if target.machine == "x86_64" else arm


def _differences(what: str, got: set[str], wanted: set[str]) -> list[str]:
    return [] if got == wanted else [f"it {what} {sorted(got)} instead of {sorted(wanted)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the sdist and the wheels of every system.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"all by default: {', '.join(TARGETS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files (dist)")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; choose of {', '.join(TARGETS)}")
    build_all(given.targets or TARGETS, given.out)


if __name__ == "__main__":
    main()
