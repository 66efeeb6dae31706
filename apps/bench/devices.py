"""`edgeinfer bench devices`: predictions, budget and speed on every device of a machine, in processes of their own."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import edgeinfer
from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, names, option
from edgeinfer.apps.bench.processes import child_environment, job_command, watch
from edgeinfer.apps.bench.render import Section, Table, commands, machine_facts, markdown_table
from edgeinfer.bundle.array_file import encode_header
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.options import format_size

_DESCRIPTION = """\
Run the built-in model on every device of this machine, and compare its predictions and greedy replies with the numpy
reference. A memory budget is tried where the device uses ordinary memory, and the speed is
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
    """Devices to run; none is all of this machine."""

    devices: tuple[str, ...] = option(
        "--devices LIST", default=(), type=names, help="comma-separated devices to run (default: all of this machine)"
    )
    repeats: int = option("-r", "--repetitions N", default=5, help="number of measurements per test")

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(Setting("repeats", self.repeats) + " is out of range.", "Give 1 or more.")


@dataclass(frozen=True)
class DeviceTarget:
    """A way to run the built-in model here."""

    name: str  # the device, with the instruction set of the native kernel on a CPU: "cpu:avx2"
    device: str  # as `edgeinfer.load` takes it
    files: str = "bundle"  # "bundle", "static" or "gguf"
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of the process
    hardware: str = ""  # in words; empty for the CPU


def find_targets(wanted: Sequence[str] = ()) -> list[DeviceTarget]:
    """Targets by name, or all; in the order in which "auto" looks for a device, the CPU by every path of its kernel."""
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


def _model_files(files: str, bundle: Path, folder: Path) -> Path:
    """The built-in model in a format, made in the folder on first use."""
    if files == "bundle":
        return bundle
    out, checkpoint = folder / files, folder / "checkpoint"
    if not out.exists():
        from edgeinfer.export.exporter import export_checkpoint
        from edgeinfer.export.options import ExportConfig, StaticOptions

        if not checkpoint.exists():
            write_bundle_checkpoint(open_bundle(bundle), checkpoint)
        static = ExportConfig(bits=32, static=StaticOptions(context=256))
        export_checkpoint(checkpoint, out, static if files == "static" else ExportConfig(format="gguf", bits=8))
    return next(out.glob("*.gguf")) if files == "gguf" else out


def write_bundle_checkpoint(bundle: Bundle, target: Path) -> None:
    """Write a Hugging Face checkpoint in float32 with the bundle's weights, multiplied out."""
    from edgeinfer.export.source.checkpoint import checkpoint_config, checkpoint_tensors

    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        if bundle.has(name):
            shutil.copyfile(bundle.path / name, target / name)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", **bundle.read_object("special_tokens.json")}
    for name, data in (("config.json", checkpoint_config(bundle)), ("tokenizer_config.json", tokenizer)):
        (target / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    tensors = dict(checkpoint_tensors(bundle))
    shapes = {name: ("F32", values.shape) for name, values in tensors.items()}
    with (target / "model.safetensors").open("wb") as file:
        file.write(encode_header(shapes, {"format": "pt"}))
        for values in tensors.values():
            file.write(np.ascontiguousarray(values, "<f4").data)


def _job(name: str, target: DeviceTarget, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a job; its "error" if there is nothing else."""
    env = child_environment() | dict(target.environment)
    ended = watch(job_command(name, {"device": target.device, **arguments}), env, seconds=_PATIENCE)
    if ended.late:
        return {"error": f"it was not done after {_PATIENCE:g} s"}
    if ended.returncode != 0:
        return {"error": ended.reason}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def run_target(target: DeviceTarget, model: Path, repeats: int) -> dict[str, Any]:
    """Compare and fill a context; figures of the comparison are kept if the second job fails."""
    found = _job("compare", target, {"model": str(model), "repeats": repeats})
    error, memory = found.pop("error", ""), dict[str, Any]()
    if found and found["device"] != target.device:
        error, found = f"it ran on {found['device']}: {found['note']}", {}
    if found:
        # A budget can be kept only where all memory is the process's own.
        slack = _SLACK if target.device == "cpu" else None
        memory = _job("fill", target, {"model": str(model), "slack": slack})
        error = memory.pop("error", "")
    return judged({"name": target.name, "files": target.files, "error": error, "found": found, "memory": memory})


def judged(run: dict[str, Any]) -> dict[str, Any]:
    """A run with its verdicts: predictions like the reference's, the budget kept (None without one), and all of it."""
    found, memory = run["found"], run["memory"]
    same = bool(found) and found["divergence"] <= _LARGEST_DIVERGENCE and found["agreement"] >= _LEAST_AGREEMENT
    budget = memory.get("budget")
    within = None if budget is None else memory["peak_rss_bytes"] <= budget
    passed = not run["error"] and same and within is not False
    return run | {"same_predictions": same, "within_budget": within, "passed": passed}


def _run(config: DevicesConfig, context: BenchContext) -> BenchResult:
    targets, runs = find_targets(config.devices), []
    progress = context.stage("devices")
    with tempfile.TemporaryDirectory(prefix="edgeinfer-devices-") as folder:
        bundle = context.resolve(None)
        for done, target in enumerate(targets):
            progress(done, len(targets))
            runs.append(run_target(target, _model_files(target.files, bundle, Path(folder)), config.repeats))
        progress(len(targets), len(targets))
    accelerators = list(dict.fromkeys(target.hardware for target in targets if target.hardware))
    return BenchResult({"accelerators": accelerators, "runs": runs}, passed=all(run["passed"] for run in runs))


_HEADER = ("device", "model", "predictions", "replies", "memory", "prompt, tokens/s", "reply, tokens/s")
_FILES = {"bundle": "bundle", "static": "static bundle, float32", "gguf": "GGUF, 8 bits"}


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
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
    """The devices of one machine."""
    table = Table("The built-in model on each device", _HEADER, tuple(map(_row, data["runs"])), _HEADER[2:4])
    return Section("Devices", machine_facts(data), (table,), commands(data))


def devices_table(folder: Path) -> str:
    """A Markdown table of all devices in the result files of a folder."""
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
