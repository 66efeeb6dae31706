"""`edgeinfer bench devices`: parity, budget and speed on every device of a machine, and the table of where it was run.

Each device runs in processes of its own, as a driver that fails may end them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, names, option
from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.apps.bench.peers_engines import write_bundle_checkpoint
from edgeinfer.apps.bench.render import Section, Table, commands, machine_facts, markdown_table
from edgeinfer.apps.bench.watch import watch
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.config import format_size
from edgeinfer.errors import Setting, UsageError

_DESCRIPTION = """\
Run the built-in model on every device of this machine, and compare what it says with the numpy reference: its
predictions and greedy replies. A memory budget is tried where the device uses ordinary memory, and the speed is
measured. Devices that take only fixed shapes get a static bundle in float32; llama.cpp, where it is installed, gets
a GGUF file. The table of what was run is made from the files that --json writes, in docs/results/devices.

example:
  edgeinfer bench devices --json my-laptop.json
"""
# Nats per token. Half precision and activations of 8 bits stay well below; another text is far above.
_LARGEST_DIVERGENCE = 0.005
_LEAST_AGREEMENT = 0.95
# A budget, as a multiple of the smallest that would do.
_SLACK = 1.2
# Seconds for a driver to compile, run, or hang.
_PATIENCE = 900.0
# Files for what a device runs.
_FILES_OF = {"all": "bundle", "static": "static", "gguf": "gguf"}


@dataclass(frozen=True)
class DevicesConfig:
    """What is run.

    Attributes:
        devices: names of targets; empty for all that are here.
        repeats: timed visits to each test; one more warms up.
    """

    devices: tuple[str, ...] = option(
        "--devices LIST", default=(), type=names, help="comma-separated devices to run (default: all that are here)"
    )
    repeats: int = option("-r", "--repetitions N", default=5, help="number of measurements per test")

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(Setting("repeats", self.repeats) + " is out of range.", "Give 1 or more.")


@dataclass(frozen=True)
class DeviceTarget:
    """A way to run the built-in model here.

    Attributes:
        name: the device's, or of the CPU also the instruction set of the native kernel: "cpu:avx2".
        device: as `edgeinfer.load` takes it.
        files: "bundle", "static" or "gguf".
        environment: of the process.
        hardware: in words; empty where none are known, and of the CPU.
    """

    name: str
    device: str
    files: str = "bundle"
    environment: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""

    @property
    def in_ordinary_memory(self) -> bool:
        """Whether all that it takes is memory of the process, so that a budget can be kept."""
        return self.device == "cpu"


@dataclass(frozen=True)
class DeviceRun:
    """What became of a target.

    Attributes:
        error: why figures are missing; empty where none are.
        found: of the comparison with the reference: device, kernel, divergence, agreement, tokens per second.
        memory: of a context that was filled: bytes of budget, plan and peak.
    """

    name: str
    files: str
    error: str = ""
    found: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)

    @property
    def same_predictions(self) -> bool:
        """Whether the device predicts what the reference does."""
        if not self.found:
            return False
        divergence, agreement = self.found["divergence"], self.found["agreement"]
        return bool(divergence <= _LARGEST_DIVERGENCE and agreement >= _LEAST_AGREEMENT)

    @property
    def within_budget(self) -> bool | None:
        """Whether the budget was kept; None where there was none."""
        budget = self.memory.get("budget")
        return None if budget is None else bool(self.memory["peak_rss_bytes"] <= budget)

    @property
    def passed(self) -> bool:
        """Whether all that was checked is so."""
        return not self.error and self.same_predictions and self.within_budget is not False

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types, with the verdicts."""
        verdicts = {"same_predictions": self.same_predictions, "within_budget": self.within_budget}
        return asdict(self) | verdicts | {"passed": self.passed}


def find_targets(wanted: Sequence[str] = ()) -> list[DeviceTarget]:
    """What can be run here, in the order in which "auto" looks for a device; the CPU by every path of its kernel.

    Args:
        wanted: their names; empty for all.
    """
    found = list(_targets())
    known = [target.name for target in found]
    for name in wanted:
        if name not in known:
            raise UsageError(f"There is no device {name!r} here.", f"Choose of {', '.join(known)}.")
    return [target for target in found if not wanted or target.name in wanted]


def _targets() -> Iterator[DeviceTarget]:
    for facts in edgeinfer.tools.list_devices(check=False):
        if facts.name == "cpu":
            yield from (
                DeviceTarget(f"cpu:{isa}", "cpu", environment={"EDGEINFER_NATIVE_ISA": isa}) for isa in facts.kernels
            )
            yield DeviceTarget("cpu:onnxruntime", "cpu", environment={"EDGEINFER_NATIVE": "0"})
        elif facts.installed and facts.hardware:
            yield DeviceTarget(facts.name, facts.name, _FILES_OF[facts.bundles], hardware=facts.description)
    if find_spec("llama_cpp") is not None:
        yield DeviceTarget("llama.cpp", "cpu", "gguf")


class _Files:
    """The built-in model in the formats of all targets, made in a folder on first use."""

    def __init__(self, bundle: Path, folder: Path) -> None:
        self._bundle, self._folder = bundle, folder

    def path(self, files: str) -> Path:
        """Where it lies."""
        if files == "bundle":
            return self._bundle
        out = self._folder / files
        if not out.exists():
            self._export(files, out)
        return next(out.glob("*.gguf")) if files == "gguf" else out

    def _export(self, files: str, out: Path) -> None:
        from edgeinfer.export.exporter import export_checkpoint
        from edgeinfer.export.options import ExportConfig, StaticOptions

        checkpoint = self._folder / "checkpoint"
        if not checkpoint.exists():
            write_bundle_checkpoint(open_bundle(self._bundle), checkpoint)
        static = ExportConfig(bits=32, static=StaticOptions(context=256))
        export_checkpoint(checkpoint, out, static if files == "static" else ExportConfig(format="gguf", bits=8))


def _job(name: str, target: DeviceTarget, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a job of device_jobs finds; its "error" where there is nothing else."""
    command = [sys.executable, "-m", "edgeinfer.apps.bench.device_jobs", name, json.dumps(arguments)]
    ended = watch(command, child_environment() | dict(target.environment), seconds=_PATIENCE)
    if ended.late:
        return {"error": f"it was not done after {_PATIENCE:g} s"}
    if ended.returncode != 0 or ended.watched is None:
        return {"error": ended.reason}
    found: dict[str, Any] = json.loads(ended.watched.stdout.splitlines()[-1])
    return found


def run_target(target: DeviceTarget, model: Path, repeats: int) -> DeviceRun:
    """Both jobs on a target; what was found of the first is kept where the second fails."""
    where = {"model": str(model), "device": target.device}
    found = _job("compare", target, {**where, "reference": None, "repeats": repeats})
    if "error" in found:
        return DeviceRun(target.name, target.files, found["error"])
    if found["device"] != target.device:
        return DeviceRun(target.name, target.files, f"it ran on {found['device']}: {found['note']}")
    memory = _job("fill", target, {**where, "slack": _SLACK if target.in_ordinary_memory else None})
    return DeviceRun(target.name, target.files, memory.pop("error", ""), found, memory)


def _run(config: DevicesConfig, context: BenchContext) -> BenchResult:
    targets, runs = find_targets(config.devices), []
    told = context.stage("devices")
    with tempfile.TemporaryDirectory(prefix="edgeinfer-devices-") as folder:
        files = _Files(context.resolve(None), Path(folder))
        for done, target in enumerate(targets):
            told(done, len(targets))
            runs.append(run_target(target, files.path(target.files), config.repeats))
        told(len(targets), len(targets))
    accelerators = list(dict.fromkeys(target.hardware for target in targets if target.hardware))
    found = {"accelerators": accelerators, "runs": [run.to_dict() for run in runs]}
    return BenchResult(found, passed=all(run.passed for run in runs))


_HEADER = ("device", "model", "predictions", "replies", "memory", "prompt, tokens/s", "reply, tokens/s")
_FILES = {"bundle": "bundle", "static": "static bundle, float32", "gguf": "GGUF, 8 bits"}


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    """A line of the table, of the JSON."""
    name, files, found = run["name"], _FILES[run["files"]], run["found"]
    if not found:
        return (name, files, f"failed: {run['error']}", "", "", "", "")
    verdict = "same" if run["same_predictions"] else "DIFFERENT"
    replies = f"{found['replied_same']} of {found['replied']} tokens"
    return (
        name,
        files,
        f"{verdict}, {found['agreement']:.1%}",
        replies,
        _memory(run),
        *(f"{found[key]:.0f}" for key in _SPEEDS),
    )


_SPEEDS = ("prompt_per_second", "reply_per_second")


def _memory(run: Mapping[str, Any]) -> str:
    memory = run["memory"]
    if not memory:
        return f"failed: {run['error']}"
    peak = format_size(memory["peak_rss_bytes"])
    if memory["budget"] is None:
        return peak
    kept = "of" if run["within_budget"] else "OVER"
    return f"{peak} {kept} {format_size(memory['budget'])}"


def devices_section(data: Any) -> Section:
    """Every device of one machine."""
    table = Table("What the built-in model does on each device", _HEADER, tuple(map(_row, data["runs"])), _HEADER[2:4])
    return Section("Devices", machine_facts(data), (table,), commands(data))


def devices_table(folder: Path) -> str:
    """Where edgeinfer was run, as Markdown: a line for each device in each file of a folder, by file and device."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        environment = data["environment"]
        hardware = (environment["processor"], *data.get("accelerators", ()), environment["system"].partition(" ")[0])
        machine = ", ".join(hardware)
        rows += [(row[0], machine, *row[1:5]) for row in map(_row, data["runs"])]
    return markdown_table(("device", "machine", *_HEADER[1:5]), rows, left=range(6))


DEVICES = Benchmark(
    "devices", "every device of this machine, for the table of what was run", _DESCRIPTION, DevicesConfig, _run,
    devices_section,
)  # fmt: skip
