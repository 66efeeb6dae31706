"""`edgeinfer bench quality`: what making a model smaller does to its predictions and answers, against bytes.

Every variant reads the same stories as its reference: perplexity, divergence, and how often the most likely next token
is the same. Models that chat answer questions with one right answer.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import edgeinfer
from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, Progress, option
from edgeinfer.apps.bench.render import Chart, Paragraph, Section, Table, commands, divergence_chart, run_facts
from edgeinfer.apps.bench.texts import (
    BUILTIN_STORIES,
    STORIES_FILE,
    Material,
    Prompt,
    all_stories,
    calibration_text,
    exact_prompts,
    read_stories,
    story_ids,
)
from edgeinfer.errors import EdgeInferError, TemplateError, UsageError
from edgeinfer.options import format_size
from edgeinfer.options.load import KV_TYPES

_BEYOND = 4  # tokens after an answer that show whether a reply says more
# Bits, and whether small layers are quantized like the others.
WIDTHS = {
    **{str(bits): (bits, False) for bits in (32, 8, 4)},
    **{"4small": (4, True), "2": (2, False), "2small": (2, True)},
}
_BUILTIN_CACHES = ("int8", "int4")
# Stories at the beginning of a text to calibrate with, and the name of their file.
_CALIBRATED, _CALIBRATION = 200, "calibration.txt"
_DESCRIPTION = """\
Compare smaller forms of a model with the model itself, against bytes: perplexity, Kullback-Leibler divergence, how
often the same next token is the most likely, and questions with one right answer. Models that
other options of "edgeinfer export" make are compared with -m.

examples:
  edgeinfer bench quality
  edgeinfer bench quality --checkpoint CHECKPOINT --bits 8,4,2 --kv int8,int4 --data DATA
  edgeinfer bench quality -m BUNDLE-8BIT -m MODEL.gguf --reference BUNDLE-32BIT --text STORIES
"""


@dataclass(frozen=True)
class Variant:
    """A form of a model: `source` as it is, or a checkpoint exported with `bits` (a float is an average not to exceed).
    `scheme` names the weights, `small` quantizes small layers like the others, and `kv` is a quantized cache's type."""

    scheme: str
    source: str | None
    bits: int | float | None = None
    small: bool = False
    kv: str | None = None

    @property
    def label(self) -> str:
        """The name in tables."""
        return f"{self.scheme}, {self.kv} cache" if self.kv else self.scheme


# The name of a model, and its variants, of which the first is the reference.
Family = tuple[str, list[Variant]]


@dataclass(frozen=True)
class QualityOptions:
    """Models to compare, and texts and questions to compare them by."""

    models: tuple[str, ...] = option(
        "-m",
        "--model MODEL",
        default=(),
        group="models (default: the built-in one with quantized caches)",
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
    budget: float | None = option(
        "--budget-bits X",
        rare=True,
        default=None,
        help="average bits per weight, allocated by integer programming with a calibration text (--text, --data)",
    )
    kv: tuple[str, ...] | None = option(
        "--kv LIST",
        default=None,
        help="KV cache data types to measure with the first of --bits (default: none, for the built-in model "
        "int8,int4)",
    )
    data: Path | None = option(
        "--data PATH",
        default=None,
        group="texts and questions (default: a few that are built in)",
        help=f"folder with {STORIES_FILE} to read and tales_dialogues/ to answer",
    )
    text: Path | None = option("--text FILE", default=None, help="text to read, with <|endoftext|> between stories")
    stories: int = option("--stories N", default=40, help="number of stories, counted from the end")
    questions: int = option("--questions N", default=5, help="number of questions of each kind; 0 for none")

    def __post_init__(self) -> None:
        if self.reference and not self.models:
            raise UsageError("--reference is what models are compared with.", "Give some with -m.")
        if self.stories < 1 or self.questions < 0:
            raise UsageError("There must be at least one story.", "Give --stories 1 or more, --questions 0 or more.")
        for name, chosen, known in (("width", self.bits, WIDTHS), ("cache", self.kv or (), KV_TYPES)):
            for unknown in [each for each in chosen if each not in known]:
                raise UsageError(f"There is no {name} {unknown!r}.", f"Choose of {', '.join(known)}.")

    def families(self) -> list[Family]:
        """Models with their variants."""
        families = [self._checkpoint_family(path.resolve()) for path in self.checkpoints]
        families += [self._given_family()] if self.models else []
        builtin = [Variant("as built in", None, kv=kv) for kv in (None, *self._caches(_BUILTIN_CACHES))]
        return families or [("tales", builtin)]

    def _caches(self, default: Sequence[str] = ()) -> list[str]:
        return [kv for kv in (default if self.kv is None else self.kv) if kv != "float32"]

    def _given_family(self) -> Family:
        given = dict.fromkeys([self.reference or self.models[0], *self.models])
        named = {model: Path(model).name or model for model in given}
        if len(set(named.values())) < len(named):
            named = {model: model for model in named}
        plain = [Variant(name, model) for model, name in named.items()]
        quantized = [Variant(named[m], m, kv=kv) for m, kv in itertools.product(self.models, self._caches())]
        return plain[0].scheme, [*plain, *quantized]

    def _checkpoint_family(self, path: Path) -> Family:
        variants = []
        for bits, small in dict.fromkeys(WIDTHS[width] for width in ("32", *self.bits)):
            variants.append(Variant(f"{bits} bits{', small layers too' if small else ''}", str(path), bits, small))
        variants += [Variant(f"budget of {self.budget:g} bits", str(path), self.budget)] if self.budget else []
        first = variants[min(1, len(variants) - 1)]
        return path.name, variants + [replace(first, kv=kv) for kv in self._caches()]

    def material(self) -> Material:
        """Texts and questions."""
        questions = tuple(exact_prompts(self.data, self.questions)) if self.questions else ()
        path = self.text or (self.data / STORIES_FILE if self.data else None)
        if path is None:
            if self.budget:
                raise UsageError("--budget-bits calibrates by a text.", "Give --text or --data.")
            stories = tuple(story.text for story in BUILTIN_STORIES)[: self.stories]
            return Material(stories, questions=questions, name=f"{len(stories)} built-in stories")
        stories = tuple(read_stories(path, self.stories))
        calibration = tuple(all_stories(path)[:_CALIBRATED]) if self.budget else ()
        if set(calibration) & set(stories):
            raise UsageError(f"{path} is too short to read and to calibrate by.", "Ask for fewer --stories.")
        return Material(stories, calibration, questions, f"{len(stories)} stories of {path.name}")


def measure_family(
    family: Family, material: Material, progress: Progress
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Figures of every variant, and the variants that fail, with the reason."""
    name, (first, *others) = family
    skipped: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="edgeinfer-quality-") as temporary:
        folder = Path(temporary)
        (folder / _CALIBRATION).write_text(calibration_text(material.calibration), "utf-8")
        with _load(first, folder) as reference:
            subjects = [_measured(name, first, reference, None, material)]
            for done, variant in enumerate(others, 1):
                progress(name, done, 1 + len(others))
                try:
                    with _load(variant, folder) as model:
                        subjects.append(_measured(name, variant, model, reference, material))
                except EdgeInferError as error:
                    skipped.append({"model": name, "variant": variant.label, "reason": str(error)})
    return subjects, skipped


def _load(variant: Variant, folder: Path) -> edgeinfer.Model:
    """Load a variant; the bundle of an exported checkpoint is shared by variants with other caches."""
    path: str | Path | None = variant.source
    if variant.bits is not None:
        from edgeinfer.export.exporter import export_checkpoint  # needs the export extra
        from edgeinfer.export.options import ExportConfig

        path = folder / variant.scheme
        if not path.exists():
            config = ExportConfig(bits=variant.bits, calibration=folder / _CALIBRATION)
            if isinstance(variant.bits, int):
                config = ExportConfig(variant.bits, calibration="none", keep_small=not variant.small)
            export_checkpoint(Path(str(variant.source)), path, config)
    options: dict[str, Any] = {} if variant.kv is None else {"kv": variant.kv}
    return edgeinfer.load(path, speculation="off", remember=False, **options)


def _measured(
    name: str, variant: Variant, model: edgeinfer.Model, reference: edgeinfer.Model | None, material: Material
) -> dict[str, Any]:
    """Read and answer; a model without a reference is one."""
    windows = [story_ids(reference or model, story) for story in material.stories]
    if reference is not None and windows != [story_ids(model, story) for story in material.stories]:
        message = f"{variant.label} and {reference.info.name} cut texts into other tokens."
        raise UsageError(message, "Compare a model with what it was made from: give that with --reference.")
    found = edgeinfer.evaluate(model, windows, reference=reference)
    values = np.zeros(sum(map(len, windows))) if found.divergence is None else found.divergence.values  # (S,)
    bits = found.bits_per_weight or model.info.bits_per_weight
    return {
        "model": name,
        "variant": variant.label,
        "weights": variant.scheme,
        "cache": variant.kv,
        "bytes": found.weight_bytes or round(model.info.parameters * bits / 8),
        "bits_per_weight": bits,
        "cache_bytes": model.plan.terms.get("kv", 0),
        "perplexity": found.perplexity,
        "perplexity_error": found.perplexity_error,
        "divergence": float(values.mean()),
        "divergence_error": float(values.std() / np.sqrt(len(values))),
        "agreement": 1.0 if found.divergence is None else found.divergence.agreement,
        "tokens": len(values),
        "tasks": score_tasks(model, material.questions),
    }


def score_tasks(model: edgeinfer.Model, prompts: Sequence[Prompt]) -> dict[str, dict[str, int]]:
    """Scores by category; none of a model without a chat template. `right` of `of` replies are the answer, letter for
    letter; `tokens_right` of the answers' `tokens` are the most likely after the right ones before them. A question
    that does not fit the context counts as answered wrongly."""
    scores: dict[str, dict[str, int]] = {}
    for prompt in prompts:
        assert prompt.answer is not None, "only prompts with answers are tasks"
        try:
            ids = model.tokenize_chat(prompt.messages)
        except TemplateError:
            return {}
        answer = prompt.answer.strip()
        wanted = model.tokenize(answer, parse_special=False)
        score = scores.setdefault(prompt.category, dict.fromkeys(("right", "of", "tokens_right", "tokens"), 0))
        score["of"] += 1
        score["tokens"] += len(wanted)
        if len(ids) + len(wanted) + _BEYOND <= model.context:
            reply = model.generate(ids, max_tokens=len(wanted) + _BEYOND, temperature=0).text
            likeliest = np.concatenate([rows.argmax(axis=1) for rows in model.logits([*ids, *wanted])])
            score["right"] += reply.strip() == answer
            score["tokens_right"] += int((likeliest[len(ids) - 1 : -1] == np.array(wanted)).sum())
    return scores


def _run(options: QualityOptions, context: BenchContext) -> BenchResult:
    families, material = options.families(), options.material()
    measured = [measure_family(family, material, context.progress) for family in families]
    subjects, skipped = (list(itertools.chain(*each)) for each in zip(*measured, strict=True))
    return BenchResult({"text": material.name, "subjects": subjects, "skipped": skipped})


def quality_section(data: Any) -> Section:
    """Predictions and answers against bytes."""
    subjects = data["subjects"]
    tasks = list(dict.fromkeys(name for each in subjects for name in each["tasks"]))
    rows = tuple(
        (
            each["model"],
            each["variant"],
            format_size(each["bytes"]),
            f"{each['bits_per_weight']:.2f}",
            format_size(each["cache_bytes"]),
            f"{each['perplexity']:.3f} ± {each['perplexity_error']:.3f}",
            f"{each['divergence']:.6f} ± {each['divergence_error']:.6f}" if each["divergence"] else "0",
            f"{each['agreement']:.2%}",
            *(_score(each["tasks"].get(name)) for name in tasks),
        )
        for each in subjects
    )
    fixed = ("model", "variant", "weights", "bits", "cache", "perplexity", "KL divergence, nats", "same next token")
    header = (*fixed, *(name.removeprefix("tales/") for name in tasks))
    table = Table("Compared with the reference of each model, its first row", header, rows)
    answers = "Answers: replies that are right letter for letter; in brackets the share of their tokens that are"
    notes = [Paragraph(f"{answers} the most likely after the right ones.")] if tasks else []
    notes += [Paragraph(f"{each['model']}, {each['variant']}: skipped: {each['reason']}") for each in data["skipped"]]
    facts = (("Text", data["text"]), ("Tokens", str(subjects[0]["tokens"])), *run_facts(data))
    return Section("What fewer bits cost", facts, (quality_chart(subjects), table, *notes), commands(data))


def quality_chart(subjects: Sequence[Mapping[str, Any]]) -> Chart:
    """Divergence against bytes: for each model one line over its weights and one over its caches."""
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for each in subjects:
        # The reference diverges by nothing, which a logarithmic axis cannot show.
        if each["divergence"] > 0:
            kind = "caches" if each["cache"] else "weights"
            size = (each["bytes"] + each["cache_bytes"]) / 1e6
            label = each["cache"] or each["weights"].removesuffix(", small layers too")
            lines.setdefault(f"{each['model']}, {kind}", []).append((size, each["divergence"], label))
    return divergence_chart("What fewer bytes cost", "weights and cache, MB", lines)


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
)
