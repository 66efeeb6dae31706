"""Measures size against divergence of every way to quantize a checkpoint, beside llama.cpp's; knows no formats.

python -m edgeinfer.apps.bench.quant_table CHECKPOINT... --text FILE [--methods rtn,gptq] [--bits 2,4,8] [--json FILE]
    [--group-sizes 32,64] [--signs asymmetric,symmetric] [--heads auto,4] [--budgets 3,4,5] [--types Q4_K_M,...]
    [--sizes Q4_K_M,...]

Calibrates on the first stories of the text and reads the last ones with every result, each beside the checkpoint in
float32: Kullback-Leibler divergence after every token. llama.cpp gets the same stories, as token ids, and importance
data from the same calibration tokens. Its computing is its own, so a figure holds what its kernels round as well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import edgeinfer
from edgeinfer.apps.bench.artifacts import export_command
from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.apps.bench.environment import script_json
from edgeinfer.apps.bench.gguf_candidates import GgufCandidates, tensor_sizes
from edgeinfer.apps.bench.gguf_model import GgufModel
from edgeinfer.apps.bench.quant_report import Failure, Figure, markdown, to_dict
from edgeinfer.apps.bench.quant_subjects import (
    BundleSubject,
    GgufSubject,
    SimulatedSubject,
    Subject,
    budgeted,
    gguf_subjects,
    uniform,
)
from edgeinfer.apps.bench.stories import SEPARATOR, all_stories, calibration_text, story_ids
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.export.gguf.file_types import FILE_TYPES

__all__ = ["Texts", "main", "measure"]

_TYPES = "Q2_K,Q3_K_S,Q3_K_M,IQ2_M,IQ3_XXS,IQ3_S,IQ4_XS,Q4_0,Q4_K_M,Q5_K_M,Q6_K,Q8_0"
_SIMULATED = "uniform:3:32:rtn,uniform:3:32:gptq,codebook:3:16,codebook:4:16"
_CALIBRATION = "calibration.txt"
_SIGNS = {"asymmetric": False, "symmetric": True}


@dataclass(frozen=True)
class Texts:
    """What is read, and what quantizers may look at; disjoint.

    Attributes:
        tokens: of the calibration stories at most.
    """

    read: tuple[str, ...]
    calibration: tuple[str, ...]
    tokens: int

    @classmethod
    def of(cls, path: Path, read: int, calibration: int, tokens: int) -> Texts:
        """The last stories of a file to be read, the first for calibration.

        Raises:
            UsageError: the file has too few.
        """
        stories = all_stories(path)
        if min(read, calibration) < 1 or len(stories) < read + calibration:
            message = f"{path} has {len(stories)} stories, not {read} to read and {calibration} to calibrate by."
            raise UsageError(message, "Ask for fewer, or give a longer text.")
        return cls(tuple(stories[-read:]), tuple(stories[:calibration]), tokens)


class _Bench:
    """One checkpoint: its float32 bundle, loaded, and what is made of it in a folder."""

    def __init__(self, checkpoint: Path, texts: Texts, folder: Path, opened: ExitStack) -> None:
        self._checkpoint, self._texts, self._folder = checkpoint, texts, folder
        self._export(folder / "float32", ["--bits", "32", "--no-kv-scales"])
        self._reference = opened.enter_context(edgeinfer.load(folder / "float32", speculation="off", remember=False))
        self.windows = [story_ids(self._reference, story) for story in texts.read]
        (folder / _CALIBRATION).write_text(calibration_text(texts.calibration), "utf-8")
        self._candidates: GgufCandidates | None = None

    def figure(self, subject: Subject) -> Figure:
        """Makes what the subject says and reads the stories with it."""
        if isinstance(subject, GgufSubject):
            return self._gguf(subject)
        return self._bundle(subject) if isinstance(subject, BundleSubject) else self._simulated(subject)

    @property
    def _calibration(self) -> list[str]:
        """Options that name the calibration text."""
        return ["--calibration", str(self._folder / _CALIBRATION), "--calibration-tokens", str(self._texts.tokens)]

    def _bundle(self, subject: BundleSubject) -> Figure:
        out, started = self._folder / "candidate", time.perf_counter()
        self._export(out, subject.options(self._calibration))
        seconds = time.perf_counter() - started
        found = edgeinfer.evaluate(out, self.windows, reference=self._reference, context=self._reference.context)
        assert found.weight_bytes is not None and found.bits_per_weight is not None
        return self._of(subject, found, found.weight_bytes, found.bits_per_weight, seconds)

    def _simulated(self, subject: SimulatedSubject) -> Figure:
        out, started = self._folder / "simulated", time.perf_counter()
        command = [sys.executable, "-m", "edgeinfer.export.simulation", str(self._folder / "float32"), str(out)]
        size = int(json.loads(_run([*command, *subject.options(self._calibration)]))["weight_bytes"])
        seconds = time.perf_counter() - started
        found = edgeinfer.evaluate(out, self.windows, reference=self._reference, context=self._reference.context)
        return self._of(subject, found, size, 8 * size / self._reference.info.parameters, seconds)

    def _gguf(self, subject: GgufSubject) -> Figure:
        if self._candidates is None:
            self._candidates = GgufCandidates(self._checkpoint, self._folder, list(self._calibration_ids()))
        started = time.perf_counter()
        out = self._candidates.make(subject.kind, subject.importance, subject.chosen)
        seconds = time.perf_counter() - started
        weights, size, _ = tensor_sizes(out)
        with GgufModel(out, self._reference.context) as model:
            found = edgeinfer.evaluate(model, self.windows, reference=self._reference)
        return self._of(subject, found, size, 8 * size / weights, seconds)

    def _calibration_ids(self) -> Iterator[list[int]]:
        """As many tokens as edgeinfer's quantizers are given."""
        left = self._texts.tokens
        for story in self._texts.calibration:
            ids = story_ids(self._reference, story)[:left]
            yield ids
            left -= len(ids)
            if left <= 0:
                return

    def _export(self, out: Path, options: Sequence[str]) -> None:
        _run(export_command(self._checkpoint, out, options))

    def _of(
        self, subject: Subject, found: edgeinfer.Evaluation, size: int, bits_per_weight: float, seconds: float
    ) -> Figure:
        assert found.divergence is not None
        figures = found.divergence.to_dict()
        return Figure(
            model=self._checkpoint.name,
            subject=subject,
            weight_bytes=size,
            bits_per_weight=bits_per_weight,
            divergence=found.divergence.mean,
            error=found.divergence.error,
            p99=figures["p99"],
            agreement=found.divergence.agreement,
            perplexity=found.perplexity,
            seconds=round(seconds, 3),
        )


def _run(command: Sequence[str]) -> str:
    """What a command prints.

    Raises:
        UsageError: it failed; with the last line it wrote.
    """
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UsageError(f"{command[2]} failed: {reason.removeprefix('error: ')}", "Run it alone to see more.")
    return done.stdout


def measure(
    checkpoint: Path, texts: Texts, subjects: Sequence[Subject], told: Callable[[Figure | Failure], None]
) -> tuple[list[Figure], list[Failure], int]:
    """Figures of every subject, those that failed, and the number of tokens that were read.

    Args:
        told: called with each as soon as it is there.

    Raises:
        UsageError: the checkpoint cannot be exported.
    """
    figures: list[Figure] = []
    failures: list[Failure] = []
    with ExitStack() as opened:
        bench = _Bench(checkpoint, texts, Path(opened.enter_context(tempfile.TemporaryDirectory())), opened)
        for subject in subjects:
            try:
                figures.append(bench.figure(subject))
                told(figures[-1])
            except EdgeInferError as error:
                failures.append(Failure(checkpoint.name, subject, str(error)))
                told(failures[-1])
        return figures, failures, sum(map(len, bench.windows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m edgeinfer.apps.bench.quant_table", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--text", type=Path, required=True, help=f"stories separated by {SEPARATOR}")
    parser.add_argument("--stories", type=int, default=40, help="read, from the end (default: 40)")
    parser.add_argument("--calibration", type=int, default=200, help="stories to calibrate by (default: 200)")
    parser.add_argument("--calibration-tokens", type=int, default=16384, help="of them at most (default: 16384)")
    parser.add_argument("--methods", default="rtn,hqq,awq,gptq", help="for the same bits everywhere; may be empty")
    parser.add_argument("--bits", default="2,4,8", help="default: %(default)s")
    parser.add_argument("--group-sizes", default="32,64", help="default: %(default)s")
    parser.add_argument("--signs", default="asymmetric", help=f"of {', '.join(_SIGNS)} (default: %(default)s)")
    parser.add_argument("--heads", default="auto", help="bits of the head, auto is the exporter's choice")
    parser.add_argument("--budgets", default="", help="bits per weight for the integer programme (default: none)")
    parser.add_argument("--budget-methods", default="gptq", help="default: %(default)s")
    parser.add_argument("--types", default=_TYPES, help="of llama.cpp's; may be empty (default: %(default)s)")
    text = "choose the types of tensors, too, for the bytes that each of these types takes (default: none)"
    parser.add_argument("--sizes", default="", metavar="TYPE,...", help=text)
    text = "forms without a backend, as codebook:BITS:ROWS or uniform:BITS:BLOCK:METHOD (default: %(default)s)"
    parser.add_argument("--simulate", default=_SIMULATED, metavar="FORM,...", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    return parser


def _subjects(args: argparse.Namespace) -> list[Subject]:
    signs, types, sizes = _listed(args.signs), _listed(args.types), _listed(args.sizes)
    for name, chosen, known in (("sign", signs, [*_SIGNS]), ("file type", [*types, *sizes], [*FILE_TYPES])):
        for unknown in set(chosen) - set(known):
            raise UsageError(f"There is no {name} {unknown!r}.", f"Choose of {', '.join(known)}.")
    try:
        bits, groups = ([int(each) for each in _listed(text)] for text in (args.bits, args.group_sizes))
        heads = [None if each == "auto" else int(each) for each in _listed(args.heads)]
        budgets = [float(each) for each in _listed(args.budgets)]
    except ValueError as error:
        raise UsageError(f"A list holds no number: {error}.", "Write numbers with commas between them.") from error
    return [
        *gguf_subjects(types),
        *(GgufSubject(kind, True, chosen=True) for kind in sizes),
        *uniform(_listed(args.methods), bits, groups, [_SIGNS[sign] for sign in signs], heads),
        *budgeted(_listed(args.budget_methods), budgets),
        *map(SimulatedSubject.parse, _listed(args.simulate)),
    ]


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _tell(found: Figure | Failure) -> None:
    name = f"{found.model}: {found.subject.engine} {found.subject.label}"
    said = (
        f"{found.bits_per_weight:.3f} bits, {found.divergence:.6f} nats" if isinstance(found, Figure) else found.reason
    )
    sys.stderr.write(f"{name}: {said}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    args = _parser().parse_args(argv)
    every: list[Figure] = []
    failed: list[Failure] = []

    def keep(found: Figure | Failure) -> None:
        # After each, as the next may take long and be interrupted.
        if isinstance(found, Figure):
            every.append(found)
        else:
            failed.append(found)
        _tell(found)
        if args.json is not None:
            args.json.write_text(script_json("quant_table", to_dict(every, failed)), "utf-8")

    try:
        subjects = _subjects(args)
        texts = Texts.of(args.text, args.stories, args.calibration, args.calibration_tokens)
        for checkpoint in args.checkpoints:
            figures, failures, tokens = measure(checkpoint.resolve(), texts, subjects, keep)
            sys.stdout.write(markdown(checkpoint.resolve().name, figures, failures, tokens) + "\n")
    except EdgeInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
