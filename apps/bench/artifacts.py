"""The model files a benchmark needs, built on first use and kept; knows nothing of how they are timed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.apps.bench.gguf_random import write_random_gguf
from edgeinfer.apps.bench.shapes import Shape, write_random_checkpoint
from edgeinfer.errors import BackendError

__all__ = ["LAYOUTS", "Artifacts", "BundleKind", "Layout", "default_folder", "export_command", "tree_bytes"]

GENAI_BLOCK = 32
Layout = Literal["native", "portable"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class BundleKind:
    """How a bundle is exported.

    Attributes:
        layout: of its weights: our own kernel's, or MatMulNBits'.
        bits, group_size: of its layers.
        head_bits: of embedding and head; None is those of the layers.
        symmetric: without zero points.
    """

    layout: Layout = "native"
    bits: int = 4
    group_size: int = 128
    head_bits: int | None = None
    symmetric: bool = True

    @property
    def name(self) -> str:
        """Of the folder it is kept in."""
        sign = "sym" if self.symmetric else "asym"
        return f"edgeinfer-{self.layout}-b{self.bits}-g{self.group_size}-{sign}-h{self.head_bits or self.bits}"

    @property
    def options(self) -> list[str]:
        """Of the export command."""
        numbers = {"--bits": self.bits, "--group-size": self.group_size, "--head-bits": self.head_bits or self.bits}
        options = [str(part) for option in numbers.items() for part in option]
        options.append("--symmetric" if self.symmetric else "--asymmetric")
        return options + ["--portable"] * (self.layout == "portable")


def default_folder() -> Path:
    """Where model files are kept unless told otherwise."""
    return Path.home() / ".cache" / "edgeinfer" / "bench"


def tree_bytes(path: Path) -> int:
    """Size of a file, or of everything in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


class Artifacts:
    """Random models of one shape in the formats of all engines.

    Args:
        folder: holds a subfolder per shape; a 0.5B shape takes about 3 GB.
        shape: of the models.
        rebuild: replace bundles that are already there; for work on the exporter.
    """

    def __init__(self, folder: Path, shape: Shape, *, rebuild: bool = False) -> None:
        self._folder = folder.expanduser().resolve() / shape.name
        self._shape = shape
        self._rebuild = rebuild

    def checkpoint(self) -> Path:
        """A Hugging Face checkpoint in float32."""
        return self._make("checkpoint", lambda path: write_random_checkpoint(path, self._shape))

    def bundle(self, kind: BundleKind) -> Path:
        """A bundle exported from the checkpoint.

        Raises:
            BackendError: the export failed.
        """
        target = self._folder / kind.name
        if target.exists() and not self._rebuild:
            return target
        command = export_command(self.checkpoint(), target, [*kind.options, "--name", self._shape.name])
        _run_builder(command, env=child_environment())
        return target

    def gguf(self) -> Path:
        """A GGUF file with every matrix in Q4_0."""
        return self._make("q4_0.gguf", lambda path: write_random_gguf(path, self._shape))

    def genai(self, python: str | None) -> Path:
        """A 4-bit onnxruntime-genai model made by its own builder, which needs torch and transformers.

        Raises:
            BackendError: the builder failed.
        """
        return self._make(f"genai-g{GENAI_BLOCK}", lambda path: self._build_genai(python or sys.executable, path))

    def openvino(self, python: str | None) -> Path:
        """A 4-bit OpenVINO model in groups of 128.

        Raises:
            BackendError: the builder failed.
        """
        return self._make("openvino-g128", lambda path: self._build_openvino(python or sys.executable, path))

    def _make(self, name: str, write: Callable[[Path], None]) -> Path:
        """Write beside the target and rename, so that an interrupted run leaves nothing to be mistaken for a model."""
        target = self._folder / name
        if target.exists():
            return target
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        if partial.is_dir():
            shutil.rmtree(partial)
        write(partial)
        partial.replace(target)
        return target

    def _build_genai(self, python: str, target: Path) -> None:
        checkpoint, cache = str(self.checkpoint()), self._folder / "genai-cache"
        command = [python, "-m", "onnxruntime_genai.models.builder", "-m", checkpoint, "-i", checkpoint]
        command += ["-o", str(target), "-p", "int4", "-e", "cpu", "-c", str(cache)]
        command += ["--extra_options", f"block_size={GENAI_BLOCK}", "accuracy_level=4"]
        # Its folder must not be one whose modules could hide the builder's.
        _run_builder(command, cwd=self._folder)
        shutil.rmtree(cache, ignore_errors=True)

    def _build_openvino(self, python: str, target: Path) -> None:
        target.mkdir()
        script, shape = str(Path(__file__).with_name("openvino_model.py")), json.dumps(asdict(self._shape))
        _run_builder([python, script, shape, str(target / "model.xml")])


def export_command(source: Path, out: Path, options: Sequence[str]) -> list[str]:
    """The command line of an export, replacing what is at `out`.

    Applications know the exporter by its command only.
    """
    return [sys.executable, "-m", "edgeinfer.cli.main", "export", str(source), str(out), "--force", *options]


def _run_builder(command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Runs a program that makes a model.

    Raises:
        BackendError: it failed; with the last line it wrote.
    """
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
        raise BackendError(f"{command[2]} failed: {reason}", "Install what it names, or run it alone to see more.")
