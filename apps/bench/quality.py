"""`edgeinfer bench quality`: its options, and the section and chart that show what fewer bits cost against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, names, numbers, option
from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.apps.bench.prompts import exact_prompts
from edgeinfer.apps.bench.quality_measure import Material, QualityResults, measure_family
from edgeinfer.apps.bench.quality_variants import (
    DATA_FREE,
    Family,
    builtin_family,
    checkpoint_family,
    given_family,
)
from edgeinfer.apps.bench.render import Paragraph, Section, Table, commands, run_facts, section_markdown
from edgeinfer.apps.bench.texts import BUILTIN_STORIES, all_stories, read_stories
from edgeinfer.config import format_size
from edgeinfer.errors import UsageError

_TEXT = "tinystories/tinystories_train_part0.txt"
_MODELS = "models (default: the built-in one with quantized caches)"
_READ = "texts and questions (default: a few that are built in)"
_DESCRIPTION = """\
Compare smaller forms of a model with the model itself, against bytes: perplexity, Kullback-Leibler divergence, how
often the same next token is likeliest, and questions with one right answer. The table is Markdown.

examples:
  edgeinfer bench quality
  edgeinfer bench quality --checkpoint CHECKPOINT --bits 8,4,2 --kv int8,int4 --data DATA
  edgeinfer bench quality -m BUNDLE-8BIT -m MODEL.gguf --reference BUNDLE-32BIT --text STORIES
"""


def _budgets(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


@dataclass(frozen=True)
class QualityOptions:
    """What is compared, and by which texts and questions.

    Attributes:
        models: that are loaded as they are; empty for those that are made of checkpoints.
        kv: types of caches; None is the default of each kind of model.
        methods, group_sizes, layouts: None among them is the exporter's choice.
    """

    models: tuple[str, ...] = option(
        "-m",
        "--model MODEL",
        default=(),
        group=_MODELS,
        action="append",
        help="bundle directory, .gguf file or hub id; can be repeated",
    )
    reference: str | None = option(
        "--reference MODEL", default=None, help="model to compare with (default: the first one)"
    )
    checkpoints: tuple[Path, ...] = option(
        "--checkpoint PATH",
        default=(),
        action="append",
        type=Path,
        help="checkpoint to export with fewer bits and to compare with its 32-bit export; can be repeated",
    )
    bits: tuple[str, ...] = option(
        "--bits LIST",
        default=("8", "4"),
        help="bits for --checkpoint: 8, 4 or 2, or 4small or 2small to quantize small layers like the others",
    )
    budgets: tuple[float, ...] = option(
        "--budget-bits LIST",
        rare=True,
        default=(),
        type=_budgets,
        help="average bits per weight, allocated by integer programming with a calibration text; needs --text "
        "or --data",
    )
    methods: tuple[str | None, ...] = option(
        "--methods LIST",
        default=(None,),
        type=names,
        help="quantization methods for --bits: rtn, or with --text or --data awq, gptq (default: the "
        "exporter's choice)",
    )
    types: tuple[str, ...] = option(
        "--types LIST",
        default=(),
        help="llama.cpp types, such as Q4_0,Q4_K_M, with an importance matrix from a calibration text; needs "
        "--text or --data",
    )
    kv: tuple[str, ...] | None = option(
        "--kv LIST",
        default=None,
        help="KV cache data types to measure with the first of --bits (default: none, for the built-in model "
        "int8,int4)",
    )
    group_sizes: tuple[int | None, ...] = option(
        "--group-sizes LIST",
        rare=True,
        default=(None,),
        type=numbers,
        help="group sizes for --checkpoint: 32, 64, 128 (default: the exporter's choice)",
    )
    layouts: tuple[str | None, ...] = option(
        "--layouts LIST",
        rare=True,
        default=(None,),
        type=names,
        help="layouts for --checkpoint: native, portable (default: the best available)",
    )
    data: Path | None = option(
        "--data PATH", default=None, group=_READ, help=f"folder with {_TEXT} to read and tales_dialogues/ to answer"
    )
    text: Path | None = option("--text FILE", default=None, help="text to read, with <|endoftext|> between stories")
    stories: int = option("--stories N", default=40, help="number of stories, counted from the end")
    skip: int = option("--skip N", rare=True, default=0, help="number of stories to skip at the end")
    calibration: int = option(
        "--calibration N", default=200, help="number of stories at the beginning to calibrate with"
    )
    calibration_tokens: int | None = option(
        "--calibration-tokens N", rare=True, default=None, help="number of calibration tokens (default: 16384)"
    )
    questions: int = option("--questions N", default=5, help="number of questions of each kind; 0 for none")

    def __post_init__(self) -> None:
        if self.reference and not self.models:
            raise UsageError("--reference is what models are compared with.", "Give some with -m.")
        if self.stories < 1 or min(self.skip, self.questions, self.calibration) < 0:
            raise UsageError("There must be at least one story.", "Give --stories 1 or more, other numbers 0 or more.")

    @property
    def calibrated(self) -> str:
        """The option that calibrates by a text; empty where none does."""
        if self.budgets:
            return "--budget-bits"
        return "--types" if self.types else "--methods" if {*self.methods} - {None, *DATA_FREE} else ""

    def families(self) -> list[Family]:
        """What is compared with what."""
        families = [
            checkpoint_family(
                path.resolve(),
                self.bits,
                budgets=self.budgets,
                methods=self.methods,
                types=self.types,
                caches=self.kv or (),
                group_sizes=self.group_sizes,
                layouts=self.layouts,
            )
            for path in self.checkpoints
        ]
        families += [given_family(self.models, self.reference, self.kv or ())] if self.models else []
        return families or [builtin_family(*([self.kv] if self.kv else []))]

    def material(self) -> tuple[Material, str]:
        """What is read and asked, and the name of what is read."""
        questions = tuple(exact_prompts(self.data, self.questions)) if self.questions else ()
        path = self.text or (self.data / _TEXT if self.data else None)
        if path is None:
            if self.calibrated:
                raise UsageError(f"{self.calibrated} calibrates by a text.", "Give --text or --data.")
            stories = tuple(story.text for story in BUILTIN_STORIES)[: self.stories]
            return Material(stories, questions=questions), f"{len(stories)} built-in stories"
        stories = tuple(read_stories(path, self.stories, self.skip))
        calibration = tuple(all_stories(path)[: self.calibration]) if self.calibrated else ()
        if set(calibration) & set(stories):
            raise UsageError(f"{path} is too short to read and to calibrate by.", "Ask for fewer --stories.")
        material = Material(stories, calibration, self.calibration_tokens, questions)
        return material, f"{len(stories)} stories of {path.name}"


def _run(options: QualityOptions, context: BenchContext) -> BenchResult:
    families, (material, text) = options.families(), options.material()
    results = QualityResults(text=text)
    for family in families:
        results += measure_family(family, material, context.progress)
    return BenchResult(results.to_dict())


def _header(subjects: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the columns; those of tasks come last."""
    fixed = ("model", "variant", "weights", "bits", "cache", "perplexity", "KL divergence, nats", "same next token")
    return (*fixed, *(name.removeprefix("tales/") for name in _tasks(subjects)))


def _rows(subjects: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each subject of the JSON."""
    rows = []
    for each in subjects:
        cells = (
            each["model"],
            each["variant"],
            format_size(each["bytes"]),
            f"{each['bits_per_weight']:.2f}",
            format_size(each["cache_bytes"]),
            f"{each['perplexity']:.3f} ± {each['perplexity_error']:.3f}",
            f"{each['divergence']:.6f} ± {each['divergence_error']:.6f}" if each["divergence"] else "0",
            f"{each['agreement']:.2%}",
        )
        rows.append((*cells, *(_score(each["tasks"].get(name)) for name in _tasks(subjects))))
    return rows


def quality_section(data: Any) -> Section:
    """Predictions and answers against bytes."""
    subjects = data["subjects"]
    table = Table(
        "Beside the reference of each model, its first row",
        _header(subjects),
        tuple(_rows(subjects)),
    )
    answers = "Of answers, replies that are right letter for letter; in brackets the share of their tokens that are "
    notes = [Paragraph(answers + "likeliest after the right ones.")] if any(each["tasks"] for each in subjects) else []
    for each in data["layouts"]:
        one, other = each["layouts"]
        difference = f"{one} - {other} = {each['mean']:+.6f} ± {each['error']:.6f} nats"
        notes.append(Paragraph(f"{each['model']}, {each['scheme']}: {difference}"))
    notes += [Paragraph(f"{each['model']}, {each['variant']}: skipped: {each['reason']}") for each in data["skipped"]]
    facts = (("Text", data["text"]), ("Tokens", str(subjects[0]["tokens"])), *run_facts(data))
    return Section("What fewer bits cost", facts, (quality_chart(subjects), table, *notes), commands(data))


def quality_chart(subjects: Sequence[Mapping[str, Any]]) -> Chart:
    """Divergence against bytes, for each model one line over its weights and one over its caches."""
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for each in subjects:
        # The reference's own divergence, nothing, has no place on a logarithmic axis.
        if each["divergence"] > 0:
            kind = "caches" if each["cache"] else "weights"
            size = (each["bytes"] + each["cache_bytes"]) / 1e6
            label = each["cache"] or each["weights"].removesuffix(", small layers too")
            lines.setdefault(f"{each['model']}, {kind}", []).append((size, each["divergence"], label))
    drawn = []
    for name, points in lines.items():
        ordered = sorted(points)
        drawn.append(Line(name, tuple(point[:2] for point in ordered), tuple(point[2] for point in ordered)))
    title, y = "What fewer bytes cost", "KL divergence, nats per token"
    return Chart(title, "weights and cache, MB", y, tuple(drawn), logarithmic=True)


def _tasks(subjects: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for each in subjects for name in each["tasks"]))


def _score(score: Mapping[str, int] | None) -> str:
    if score is None:
        return ""
    return f"{score['right']}/{score['of']} ({score['tokens_right'] / score['tokens']:.1%})"


QUALITY = Benchmark(
    "quality",
    "what fewer bits cost in predictions and answers",
    _DESCRIPTION,
    QualityOptions,
    _run,
    quality_section,
    chart=lambda data: quality_chart(data["subjects"]),
    text=lambda options, data: section_markdown(quality_section(data)),
)
