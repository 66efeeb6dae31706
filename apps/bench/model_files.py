"""Models in the formats of every engine, made on first use and kept: of a checkpoint, random, or cost-expanded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from edgeinfer.apps.bench.cost_expanded import (
    COST_EXPANDED,
    TrainedCheckpoint,
    expand_checkpoint,
    expanded_shape,
    grown,
)
from edgeinfer.apps.bench.driver import child_environment, engine_environment
from edgeinfer.apps.bench.synthetic import Shape, convert_checkpoint, write_random_checkpoint
from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.writing import digest_of
from edgeinfer.errors import BackendError

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
        """The name of the folder it is kept in."""
        sign = "sym" if self.symmetric else "asym"
        return f"edgeinfer-{self.layout}-b{self.bits}-g{self.group_size}-{sign}-h{self.head_bits or self.bits}"

    @property
    def options(self) -> list[str]:
        """The options of the export command."""
        numbers = {"--bits": self.bits, "--group-size": self.group_size, "--head-bits": self.head_bits or self.bits}
        options = [str(part) for option in numbers.items() for part in option]
        options.append("--symmetric" if self.symmetric else "--asymmetric")
        return options + ["--portable"] * (self.layout == "portable")


class ModelFiles:
    """A model in the formats of all engines. What each of them needs to be made is installed with that engine.

    Args:
        folder: where they are kept.
        name: of the model.
        rebuild: replace bundles that are already there; for work on the exporter.
    """

    def __init__(self, folder: Path, name: str, *, rebuild: bool = False) -> None:
        self._folder = folder.expanduser().resolve()
        self._name = name
        self._rebuild = rebuild

    def checkpoint(self) -> Path:
        """The Hugging Face checkpoint that all others are made of."""
        raise NotImplementedError

    def bfloat16(self) -> Path:
        """The same checkpoint in bfloat16."""
        return self._make("bfloat16", lambda path: convert_checkpoint(self.checkpoint(), path, "bfloat16"))

    def bundle(self, kind: BundleKind) -> Path:
        """A bundle exported from the checkpoint."""
        target = self._folder / kind.name
        if target.exists() and not self._rebuild:
            return target
        run_builder(
            export_command(self.checkpoint(), target, [*kind.options, "--name", self._name]), env=child_environment()
        )
        return target

    def gguf(self) -> Path:
        """A GGUF file with every matrix in Q4_0."""
        return self._make("q4_0.gguf", lambda path: write_q4_0(self.checkpoint(), path))

    def exported_gguf(self, kind: str) -> Path:
        """A GGUF file of one of llama.cpp's types, exported from the checkpoint."""

        def write(path: Path) -> None:
            options = ["--format", "gguf", "--type", kind, "--name", self._name]
            run_builder(export_command(self.checkpoint(), path, options), env=child_environment())

        return self._make(f"gguf-{kind.lower()}", write) / "model.gguf"

    def genai(self, python: str | None, bits: int = 4) -> Path:
        """An onnxruntime-genai model made by its own builder, which needs torch and transformers."""
        name = f"genai-g{GENAI_BLOCK}" if bits == 4 else f"genai-b{bits}-g{GENAI_BLOCK}"
        return self._make(name, lambda path: self._build_genai(python, path, bits))

    def openvino_genai(self, python: str | None, kind: str) -> Path:
        """The folder that OpenVINO GenAI's pipeline makes of a GGUF file."""
        source, script = self.exported_gguf(kind), Path(__file__).with_name("engines") / "pipelines.py"

        def write(path: Path) -> None:
            path.mkdir()
            run_builder([python or sys.executable, str(script), str(source), str(path)], env=engine_environment(python))

        return self._make(f"openvino-genai-{kind.lower()}", write)

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

    def _build_genai(self, python: str | None, target: Path, bits: int) -> None:
        checkpoint, cache = str(self.checkpoint()), self._folder / "genai-cache"
        command = [python or sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", checkpoint]
        command += ["-i", checkpoint, "-o", str(target), "-p", f"int{bits}", "-e", "cpu", "-c", str(cache)]
        command += ["--extra_options", f"block_size={GENAI_BLOCK}", "accuracy_level=4"]
        # Its folder must not be one whose modules could hide the builder's.
        run_builder(command, cwd=self._folder, env=engine_environment(python))
        shutil.rmtree(cache, ignore_errors=True)


def default_folder() -> Path:
    """Where model files are kept unless told otherwise."""
    return Path.home() / ".cache" / "edgeinfer" / "bench"


class Artifacts(ModelFiles):
    """Random models of one shape.

    Args:
        folder: holds a subfolder per shape; a 0.5B shape takes about 3 GB.
        shape: of the models.
        rebuild: replace bundles that are already there; for work on the exporter.
    """

    def __init__(self, folder: Path, shape: Shape, *, rebuild: bool = False) -> None:
        super().__init__(folder / shape.name, shape.name, rebuild=rebuild)
        self._shape = shape

    def checkpoint(self) -> Path:
        """A Hugging Face checkpoint in float32."""
        return self._make("checkpoint", lambda path: write_random_checkpoint(path, self._shape))


class TrainedArtifacts(Artifacts):
    """A small trained checkpoint, as it is or cost-expanded, in the formats of the engines; built once and kept.

    Args:
        folder: holds a subfolder per checkpoint, named by the hash of its weights; of the 0.5B shape each takes 3 GB.
        source: the checkpoint.
        shape: to expand it to; None leaves it as it is.
        rebuild: replace bundles that are already there.

    Raises:
        CheckpointError, UsageError: as `expand_checkpoint`.
    """

    def __init__(self, folder: Path, source: Path, shape: Shape | None, *, rebuild: bool = False) -> None:
        small = TrainedCheckpoint(source).shape
        super().__init__(folder / _digest(source), expanded_shape(small, shape) if shape else small, rebuild=rebuild)
        self._source, self._target = source, shape

    def checkpoint(self) -> Path:
        """The checkpoint itself, or the cost-expanded one in float32."""
        shape = self._target
        if shape is None:
            return self._source
        return self._make("checkpoint", lambda path: expand_checkpoint(self._source, path, shape))


def write_q4_0(checkpoint: Path, path: Path) -> None:
    """Writes a GGUF file with every matrix and the embedding in Q4_0, and no vocabulary: it is fed token ids."""
    # Not at the top of the file: they need the extra.
    from edgeinfer.export.gguf.quantize import quantize_gguf
    from edgeinfer.export.gguf.writer import write_gguf

    floats = path.with_suffix(".float")
    try:
        write_gguf(checkpoint, floats, vocabulary=False)
        # Otherwise llama.cpp gives some of them more bits.
        types = {tensor.name: "Q4_0" for tensor in read_gguf(floats).tensors if len(tensor.shape) > 1}
        # Experts that a checkpoint has in MXFP4 are in MXFP4 there too.
        quantize_gguf(floats, path, "Q4_0", tensor_types=types, requantize=True, threads=1)
    finally:
        floats.unlink(missing_ok=True)


def expanded_bundle(checkpoint: Path, factor: int, folder: Path) -> Path:
    """A bundle in 8 bits of the cost-expanded checkpoint, made once and kept."""
    digest = _digest(checkpoint)
    place = folder / f"{checkpoint.name}-{digest}-{COST_EXPANDED}-x{factor}"
    bundle = place / "bundle"
    if not bundle.is_dir():
        expand_checkpoint(checkpoint, place / "checkpoint", grown(TrainedCheckpoint(checkpoint).shape, factor))
        run_builder(export_command(place / "checkpoint", bundle, ("--bits", "8")), env=child_environment())
    return bundle


def _digest(checkpoint: Path) -> str:
    """The beginning of the hash of a checkpoint's weights."""
    return digest_of(checkpoint / "model.safetensors")[:8]


def tree_bytes(path: Path) -> int:
    """Size of a file, or of everything in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def export_command(source: Path, out: Path, options: Sequence[str]) -> list[str]:
    """The command line of an export, replacing what is at `out`.

    Applications know the exporter by its command only.
    """
    return [sys.executable, "-m", "edgeinfer.apps.cli.main", "export", str(source), str(out), "--force", *options]


def run_builder(command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Runs a program that makes a model."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
        name = command[2] if command[1] == "-m" else Path(command[1]).name
        raise BackendError(f"{name} failed: {reason}", "Install what it names, or run it alone to see more.")
