"""Every run that the README's figures come from: its words, its command, what it needs; knows nothing of running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.apps.bench.artifacts import Artifacts, BundleKind
from edgeinfer.apps.bench.shapes import find_shape

__all__ = ["RUNS", "Places", "Run", "find_runs"]

SHAPE = "qwen2.5-0.5b"
_TEXT = "tinystories/tinystories_train_part0.txt"


@dataclass(frozen=True)
class Places:
    """What runs are given.

    Attributes:
        checkpoints: trained ones, the built-in model's first.
        data: folder of data sets; None where there is none.
        work: where model files are kept.
        pythons: interpreters of other engines, as ENGINE=PATH.
        quick: so little of each that the figures tell nothing but that it runs.
    """

    checkpoints: tuple[Path, ...]
    data: Path | None
    work: Path
    pythons: tuple[str, ...] = ()
    quick: bool = False

    def bundle(self) -> Path:
        """A bundle of random weights at the sizes of a 0.5B, made where it is missing.

        Raises:
            BackendError: it could not be made.
        """
        return Artifacts(self.work, find_shape(SHAPE)).bundle(BundleKind())

    def text(self) -> Path:
        """Stories to read."""
        assert self.data is not None, "who asks needs data"
        return self.data / _TEXT


@dataclass(frozen=True)
class Run:
    """One result file.

    Attributes:
        name: of the file, and of its tables in the README.
        words: what is measured.
        minutes: that it takes, about.
        arguments: of `edgeinfer`, less the output's.
        output: options before the file's name; none of a command that prints JSON.
        needs: of Places: "checkpoints" or "data", or both.
    """

    name: str
    words: str
    minutes: float
    arguments: Callable[[Places], list[str]]
    output: tuple[str, ...] = ("--json",)
    needs: tuple[str, ...] = ()

    def missing(self, places: Places) -> str:
        """Why it cannot be run; empty where it can."""
        lacks = [f"--{name.removesuffix('s')}" for name in self.needs if not getattr(places, name)]
        return f"needs {' and '.join(lacks)}" if lacks else ""


def _speed(places: Places) -> list[str]:
    return ["bench", "speed", "-t", "1", "-pg", "512,128", "-d", "0,256", *(["-r", "1"] if places.quick else [])]


def _peers(places: Places) -> list[str]:
    pythons = [part for python in places.pythons for part in ("--python", python)]
    sizes = ["--engines", "edgeinfer,llamacpp,genai,openvino,transformers"]
    sizes += ["--repeats", "3", "--rounds", "2", "--patience", "45"]
    if places.quick:
        sizes = ["--quick", "--models", "tales", "--budgets", "250"]
    return ["bench", "peers", *sizes, *pythons, "--work", str(places.work)]


def _curve(places: Places) -> list[str]:
    return ["bench", "curve", "-m", str(places.bundle()), "-t", "1", *(["-r", "1"] if places.quick else [])]


def _spec(places: Places) -> list[str]:
    expanded = ["--checkpoint", str(places.checkpoints[0]), "--expand", "--work", str(places.work), "-t", "1"]
    prompts = ["--data", str(places.data), "--categories", "tales"]
    if places.quick:
        return ["bench", "spec", *expanded, *prompts, "--per-category", "1", "-n", "16", "--repeats", "1"]
    sizes = ["--per-category", "2", "--warm-up", "6"]
    return ["bench", "spec", *expanded, *prompts, *sizes, "--modes", "auto", "--control"]


def _plans(places: Places) -> list[str]:
    sizes = ["--runs", "3", "--shapes", "tiny"] if places.quick else ["--runs", "30", "--seed", "1"]
    return ["bench", "memory", "plans", *sizes, "--work", str(places.work)]


def _smallest(places: Places) -> list[str]:
    sizes = ["-c", "2048", "--steps", "6", "--rounds", "1", "--halvings", "2"]
    if places.quick:
        sizes = ["-c", "512", "--steps", "2", "--rounds", "1", "--halvings", "0"]
    return ["bench", "memory", "smallest", "-m", str(places.bundle()), "-t", "1", "--spec", "off", *sizes]


def _quality(places: Places) -> list[str]:
    models = [part for path in places.checkpoints for part in ("--checkpoint", str(path))]
    widths = ["--bits", "8,4small,2small", "--kv", "int8,int4", "--budget-bits", "4"]
    sizes = ["--stories", "100", "--questions", "10"]
    if places.quick:
        widths, sizes = ["--bits", "8", "--kv", "int8"], ["--stories", "2", "--questions", "1"]
    return ["bench", "quality", *models, *widths, "--data", str(places.data), *sizes]


def _kv(places: Places) -> list[str]:
    return ["bench", "memory", "kv", "--text", str(places.text()), "--stories", "2" if places.quick else "40"]


def _tune(places: Places) -> list[str]:
    return ["tune", "--json", *(["--quick", "--evaluations", "8"] if places.quick else [])]


RUNS = (
    Run("speed", "the built-in model's prompts and replies", 1, _speed, ("-o", "json", "--out")),
    Run("peers", "other engines on the same work, and inside the same budgets", 14, _peers),
    Run("curve", "a pass over several tokens, at the shape of a 0.5B", 1, _curve),
    Run("spec", "drafting ahead, on a cost-expanded model", 5, _spec, needs=("checkpoints", "data")),
    Run("memory-plans", "random plans, each inside an enforced limit", 5, _plans),
    Run("memory-smallest", "speed against budget, at the shape of a 0.5B", 6, _smallest),
    Run("quality", "what fewer bits cost", 8, _quality, needs=("checkpoints", "data")),
    Run("kv", "caches in fewer bits", 1, _kv, needs=("data",)),
    Run("tune", "what tuning the built-in model gains", 3, _tune, ()),
)


def find_runs(names: Sequence[str] | None) -> list[Run]:
    """Runs of these names, or all, in their own order.

    Raises:
        KeyError: with an unknown name.
    """
    known = {run.name: run for run in RUNS}
    for name in names or ():
        known[name]  # so that an unknown one is named
    return [run for run in RUNS if names is None or run.name in names]
