"""Map the root folders into the edgeinfer namespace and compile the kernel; everything else lives in pyproject.toml.

The kernel is a plain shared library that is loaded by path, so one wheel serves every Python of a platform. Where no
compiler works (or `CC=false` says so) the package is built without it and runs on ONNX Runtime's own operators.

`EDGEINFER_TARGET=windows-arm64`, or another of TARGETS, makes the wheel of that system on any other, with the compiler
that `pip install ziglang` brings; `.ci/wheels.py` makes all of them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, NamedTuple

from setuptools import Command, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import customize_compiler, new_compiler
from setuptools.errors import BaseError, CCompilerError, CompileError

ROOTS = {f"edgeinfer.{name}": name for name in ("export", "quant", "runtime", "apps")}
NATIVE = Path("runtime", "native")
KERNEL = "edgeinfer_native"
SUFFIXES = {"Windows": ".dll", "Darwin": ".dylib"}
# Every path must give the same bits: no operation may be fused that is not written fused.
UNIX_FLAGS = ["-std=c11", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-fno-lto"]
MSVC_FLAGS = ["/std:c11", "/O2", "/fp:precise"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]
# Files of one instruction set, by machine: flags of GCC and Clang, flags of MSVC. Other files are for every machine.
VECTOR_FILES: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "x86_64": {
        "avx2.c": (AVX2, ["/arch:AVX2"]),
        "avxvnni.c": ([*AVX2, "-mavxvnni"], ["/arch:AVX2"]),
        "avx512vnni.c": (AVX512, ["/arch:AVX512"]),
        "attention_avx2.c": (AVX2, ["/arch:AVX2"]),
        "attention_avx512.c": (AVX512, ["/arch:AVX512"]),
    },
    "arm64": {
        "neon_dot.c": (["-march=armv8.2-a+dotprod"], []),
        "neon_i8mm.c": (["-march=armv8.2-a+dotprod+i8mm"], []),
        "attention_neon.c": (["-march=armv8.2-a+dotprod"], []),
    },
}
UNIVERSAL = "universal2"
MACHINES = {"amd64": "x86_64", "aarch64": "arm64", UNIVERSAL: platform.machine()}


class Target(NamedTuple):
    """A system that every other can compile for: zig's name of it, the wheel's tag, and what linking takes there."""

    triple: str
    tag: str
    suffix: str
    link: tuple[str, ...]

    @property
    def machine(self) -> str:
        name = self.triple.split("-")[0]
        return MACHINES.get(name, name)


def _linux(triple: str, tag: str) -> Target:
    return Target(triple, tag, ".so", ("-fPIC", "-lm"))


def _windows(triple: str, tag: str) -> Target:
    # The time of day would make every build another one.
    return Target(triple, tag, ".dll", ("-Wl,/Brepro",))


def _macos(triple: str, tag: str) -> Target:
    return Target(triple, tag, ".dylib", (f"-Wl,-install_name,@rpath/{KERNEL}.dylib",))


# glibc 2.17 and musl 1.2 are the oldest that wheels are made for; macOS 11 is the first for its own processors.
TARGETS = {
    "linux-x86_64": _linux("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64"),
    "linux-aarch64": _linux("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64"),
    "musl-x86_64": _linux("x86_64-linux-musl", "musllinux_1_2_x86_64"),
    "musl-aarch64": _linux("aarch64-linux-musl", "musllinux_1_2_aarch64"),
    "windows-x86_64": _windows("x86_64-windows-gnu", "win_amd64"),
    "windows-arm64": _windows("aarch64-windows-gnu", "win_arm64"),
    "macos-x86_64": _macos("x86_64-macos.10.15", "macosx_10_15_x86_64"),
    "macos-arm64": _macos("aarch64-macos.11.0", "macosx_11_0_arm64"),
}


def chosen_target() -> Target | None:
    """The system that EDGEINFER_TARGET names; None is this one."""
    name = os.environ.get("EDGEINFER_TARGET", "")
    if name and name not in TARGETS:
        raise SystemExit(f"EDGEINFER_TARGET={name} is not a system that is known.\nChoose one of {', '.join(TARGETS)}.")
    return TARGETS.get(name)


def own_target() -> Target | None:
    """This machine among TARGETS, where zig is installed and no other was chosen as compiler."""
    if os.environ.get("CC") or importlib.util.find_spec("ziglang") is None:
        return None
    musl = "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or "")
    system = {"Windows": "windows", "Darwin": "macos", "Linux": "musl" if musl else "linux"}.get(platform.system())
    machine = platform.machine().lower()
    same = (t for name, t in TARGETS.items() if name.split("-")[0] == system)
    return next((t for t in same if t.machine == MACHINES.get(machine, machine)), None)


class BuildNative(Command):
    """Compiles runtime/native into one shared library in the same folder."""

    command_name = "build_native"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib = self.build_temp = self.plat_name = None
        self.built = False

    def finalize_options(self) -> None:
        names = ("build_lib", "build_temp", "plat_name")
        self.set_undefined_options("build", *((name, name) for name in names))

    @property
    def target(self) -> Path:
        target = chosen_target()
        suffix = target.suffix if target else SUFFIXES.get(platform.system(), ".so")
        return (NATIVE if self.editable_mode else Path(self.build_lib, "edgeinfer", NATIVE)) / f"{KERNEL}{suffix}"

    def run(self) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.target.unlink(missing_ok=True)
        if target := chosen_target():
            self._build_with_zig(target)
        else:
            self._build_for_this_machine()
        self.built = self.target.exists()

    def _build_for_this_machine(self) -> None:
        """By the system's compiler, else by zig, else not at all."""
        try:
            try:
                self._build()
            except (BaseError, CCompilerError, OSError):
                if not (own := own_target()):
                    raise
                self._build_with_zig(own)
        except (BaseError, CCompilerError, OSError) as error:
            self.announce(str(error), level=logging.INFO)
            self.warn("no C compiler works here: the native kernel is left out, edgeinfer runs without it, more slowly")

    def _build_with_zig(self, target: Target) -> None:
        if importlib.util.find_spec("ziglang") is None:
            raise CompileError(f"Building for {target.tag} needs the compiler that `pip install ziglang` brings.")
        folder = Path(self.build_temp, target.tag)
        folder.mkdir(parents=True, exist_ok=True)
        compile_ = [sys.executable, "-m", "ziglang", "cc", "-target", target.triple, *UNIX_FLAGS]
        code = ["-fPIC"] if "-fPIC" in target.link else []

        def compiled(source: Path, special: list[str]) -> str:
            out = str(folder / f"{source.stem}.o")
            # zig names a processor and its extensions where GCC names an architecture.
            own = [flag.replace("-march=armv8.2-a+", "-mcpu=generic+") for flag in special]
            _run([*compile_, *code, *own, "-c", str(source), "-o", out])
            return out

        # One linker writes the library's name into it, and others write files of their own next to it.
        linked = folder / self.target.name
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda item: compiled(item[0], item[1][0]), self._sources(target.machine)))
        _run([*compile_, "-shared", "-s", *objects, "-o", str(linked), *target.link])
        shutil.copyfile(linked, self.target)

    def _build(self) -> None:
        compiler = new_compiler()
        customize_compiler(compiler)
        msvc = compiler.compiler_type == "msvc"
        # A Python for two processors compiles for both at once, which the flags of one processor do not allow.
        arch = ["-arch", platform.machine()] if self.plat_name.endswith(UNIVERSAL) else []
        flags = MSVC_FLAGS if msvc else [*UNIX_FLAGS, *arch]
        objects = []
        machine = self.plat_name.split("-")[-1].lower()
        for source, special in self._sources(MACHINES.get(machine, machine)):
            try:
                objects += compiler.compile([str(source)], self.build_temp, extra_postargs=flags + special[msvc])
            except CCompilerError:
                if not any(special):
                    raise
                # A compiler that does not know an instruction set leaves an empty path.
                objects += compiler.compile([str(source)], self.build_temp, extra_postargs=flags)
        libraries = [] if msvc else ["m"]
        compiler.link_shared_object(objects, str(self.target), libraries=libraries, extra_postargs=arch)

    def _sources(self, machine: str) -> list[tuple[Path, tuple[list[str], list[str]]]]:
        """Files to compile for a machine, with the flags of their own."""
        own = VECTOR_FILES.get(machine, {})
        others = {name for files in VECTOR_FILES.values() for name in files} - set(own)
        sources = sorted(path for path in NATIVE.glob("*.c") if path.name not in others)
        return [(path, own.get(path.name, ([], []))) for path in sources]

    def get_source_files(self) -> list[str]:
        return [path.as_posix() for path in sorted(NATIVE.glob("*.[ch]"))]

    def get_outputs(self) -> list[str]:
        return [str(self.target)] if self.built else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{' '.join(command)} fails:\n{done.stderr.strip()}")


class Build(build):
    """Builds the kernel too."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_native", None)]


class BdistWheel(bdist_wheel):
    """A wheel with the kernel is for one platform and every Python, one without it for all platforms."""

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not self.get_finalized_command("build_native").built
        # Installers keep what belongs to a platform apart from what does not; all of a package must go to one place.
        self.distribution.has_ext_modules = lambda: not self.root_is_pure
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform_tag = super().get_tag()
        if self.root_is_pure:
            return python, abi, platform_tag
        if target := chosen_target():
            platform_tag = target.tag
        return "py3", "none", platform_tag.replace(UNIVERSAL, platform.machine())


# The links edgeinfer/<name> serve editors and type checkers; the build must not depend on them.
links = [pattern for name in ROOTS.values() for pattern in (name, f"{name}.*")]
packages = ["edgeinfer", *(f"edgeinfer.{sub}" for sub in find_packages("edgeinfer", exclude=links))]
for dotted, folder in ROOTS.items():
    packages += [dotted, *(f"{dotted}.{sub}" for sub in find_packages(folder))]
setup(
    packages=packages,
    package_dir={"edgeinfer": "edgeinfer", **ROOTS},
    cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": BdistWheel},
)
