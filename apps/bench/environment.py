"""The machine, the versions, the date and the command that figures depend on."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import edgeinfer

# What takes part in computing, here or in a peer.
_LIBRARIES = (
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-openvino",
    "tokenizers",
    "llama-cpp-python",
    "onnxruntime-genai",
    "openvino",
    "torch",
    "transformers",
)


@dataclass(frozen=True)
class Environment:
    """Where figures were made.

    Attributes:
        cores, threads: of the processor: physical ones, and those the system sees.
        memory_bytes: of the machine.
        libraries: versions of those that are installed.
    """

    processor: str
    cores: int
    threads: int
    memory_bytes: int
    system: str
    python: str
    libraries: Mapping[str, str]

    @property
    def summary(self) -> str:
        """One line for the foot of a table."""
        libraries = ", ".join(f"{name} {number}" for name, number in self.libraries.items())
        return f"{self.processor}; {self.system}; python {self.python}, edgeinfer {edgeinfer.__version__}, {libraries}"


def current_environment() -> Environment:
    """The environment of this process."""
    threads = psutil.cpu_count() or 1
    return Environment(
        processor=machine_name(),
        cores=psutil.cpu_count(logical=False) or threads,
        threads=threads,
        memory_bytes=psutil.virtual_memory().total,
        system=system_name(),
        python=platform.python_version(),
        libraries={name: found for name in _LIBRARIES if (found := _version(name))},
    )


def run_header(benchmark: str, command: str) -> dict[str, Any]:
    """What every result file begins with.

    Args:
        command: that gives such figures again; empty where there is none.
    """
    return {
        "benchmark": benchmark,
        "command": command,
        "test_time": timestamp(),
        "edgeinfer": edgeinfer.__version__,
        "environment": asdict(current_environment()),
    }


def script_json(name: str, data: Mapping[str, Any]) -> str:
    """Figures of the running script as a result file."""
    command = shlex.join(["python", "-m", f"edgeinfer.apps.bench.{name}", *sys.argv[1:]])
    return json.dumps({**run_header(name, command), **data}, indent=1) + "\n"


def timestamp() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def system_name() -> str:
    """The system and its version, as far as figures depend on it."""
    release = ".".join(platform.release().split(".")[:2])
    return " ".join(filter(None, (platform.system(), release, platform.machine(), *platform.libc_ver())))


def machine_name() -> str:
    """The processor as the system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    if sys.platform == "linux" and cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
