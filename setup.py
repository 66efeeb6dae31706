"""Map the root folders into the edgeinfer namespace and compile the kernel; everything else lives in pyproject.toml.

The kernel is a plain shared library that is loaded by path, so one wheel serves every Python of a platform. Where no
compiler works (or `CC=false` says so) the package is built without it and runs on ONNX Runtime's own operators.
"""

from __future__ import annotations

import logging
import platform
from pathlib import Path
from typing import ClassVar

from setuptools import Command, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import customize_compiler, new_compiler
from setuptools.errors import BaseError, CCompilerError

ROOTS = {f"edgeinfer.{name}": name for name in ("export", "quant", "runtime", "apps")}
NATIVE = Path("runtime", "native")
SUFFIXES = {"Windows": ".dll", "Darwin": ".dylib"}
LIBRARY = "edgeinfer_native" + SUFFIXES.get(platform.system(), ".so")
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
    },
    "arm64": {
        "neon_dot.c": (["-march=armv8.2-a+dotprod"], []),
        "neon_i8mm.c": (["-march=armv8.2-a+dotprod+i8mm"], []),
    },
}
UNIVERSAL = "universal2"
MACHINES = {"amd64": "x86_64", "aarch64": "arm64", UNIVERSAL: platform.machine()}


class BuildNative(Command):
    """Compiles runtime/native into one shared library beside its Python modules."""

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
        return (NATIVE if self.editable_mode else Path(self.build_lib, "edgeinfer", NATIVE)) / LIBRARY

    def run(self) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.target.unlink(missing_ok=True)
        try:
            self._build()
        except (BaseError, CCompilerError, OSError) as error:
            self.announce(str(error), level=logging.INFO)
            self.warn("no C compiler works here: the native kernel is left out, edgeinfer runs without it, more slowly")
        self.built = self.target.exists()

    def _build(self) -> None:
        compiler = new_compiler()
        customize_compiler(compiler)
        msvc = compiler.compiler_type == "msvc"
        # A Python for two processors compiles for both at once, which the flags of one processor do not allow.
        arch = ["-arch", platform.machine()] if self.plat_name.endswith(UNIVERSAL) else []
        flags = MSVC_FLAGS if msvc else [*UNIX_FLAGS, *arch]
        objects = []
        for source, special in self._sources():
            try:
                objects += compiler.compile([str(source)], self.build_temp, extra_postargs=flags + special[msvc])
            except CCompilerError:
                if not any(special):
                    raise
                # A compiler that does not know an instruction set leaves an empty path.
                objects += compiler.compile([str(source)], self.build_temp, extra_postargs=flags)
        libraries = [] if msvc else ["m"]
        compiler.link_shared_object(objects, str(self.target), libraries=libraries, extra_postargs=arch)

    def _sources(self) -> list[tuple[Path, tuple[list[str], list[str]]]]:
        """Files to compile on this machine, with the flags of their own."""
        machine = self.plat_name.split("-")[-1].lower()
        own = VECTOR_FILES.get(MACHINES.get(machine, machine), {})
        others = {name for files in VECTOR_FILES.values() for name in files} - set(own)
        sources = sorted(path for path in NATIVE.glob("*.c") if path.name not in others)
        return [(path, own.get(path.name, ([], []))) for path in sources]

    def get_source_files(self) -> list[str]:
        return [path.as_posix() for path in sorted(NATIVE.glob("*.[ch]"))]

    def get_outputs(self) -> list[str]:
        return [str(self.target)] if self.built else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


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
