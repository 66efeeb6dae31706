"""`edgeinfer bench quality`: what making a model smaller does to its predictions and answers, against bytes.

Every form reads the same text as its reference: perplexity, divergence, and how often the most likely next token is the
same. Models that chat answer questions with one right answer.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgeinfer
from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, Progress, option
from edgeinfer.apps.bench.render import Paragraph, Section, Table, commands, run_facts
from edgeinfer.apps.bench.texts import (
    BUILTIN_STORIES,
    STORIES_FILE,
    Material,
    Prompt,
    all_stories,
    exact_prompts,
    story_ids,
)
from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.core.errors import EdgeInferError, TemplateError, UsageError
from edgeinfer.core.options import format_size, parse_size
from edgeinfer.core.options.load import KV_TYPES
from edgeinfer.nn.arithmetic import log_softmax

_BEYOND = 4  # tokens after an answer that show whether a reply says more
_AUTO, _FLOAT_BITS = "auto", 32
_BUILTIN_CACHES = ("int8", "int4")
_PIECE = 512  # tokens of a piece of text
_ROWS = 64  # rows of kept predictions at a time
_DESCRIPTION = """\
Compare smaller forms of a model with the model itself, against bytes: perplexity, Kullback-Leibler divergence, how
often the same next token is the most likely, and questions with one right answer. What was measured before Ctrl-C is
shown and written. Models that other options of "edgeinfer export" make are compared with -m.

examples:
  edgeinfer bench quality
  edgeinfer bench quality --checkpoint CHECKPOINT --text TEXT --bits auto,8,5,4,3 --types Q6_K,Q4_K_M,IQ4_XS,Q2_K
  edgeinfer bench quality --checkpoint CHECKPOINT --text TEXT --sizes 105MB,90MB --kv int8,int4
  edgeinfer bench quality -m BUNDLE-8BIT -m MODEL.gguf --reference BUNDLE-32BIT --text TEXT
"""


@dataclass(frozen=True)
class Variant:
    """A form of a model: `source` as it is, or a checkpoint exported with options of `ExportConfig`, with them to
    llama.cpp's `type`. `scheme` names the weights, and `kv` is a quantized cache's type."""

    scheme: str
    source: str | None
    export: Mapping[str, Any] | None = None
    type: str | None = None
    kv: str | None = None

    @property
    def is_given(self) -> bool:
        """Whether `source` is the model, not what it is made of."""
        return self.export is None

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
        help="checkpoint to export in smaller forms and to compare with its 32-bit export; can be repeated",
    )
    bits: tuple[str, ...] = option(
        "--bits LIST",
        default=(_AUTO, "8", "4"),
        help='bits of --checkpoint: "auto", or 2 to 8 on average, such as 4.5',
    )
    sizes: tuple[str, ...] = option("--sizes LIST", default=(), help="sizes for --checkpoint, such as 105MB,90MB")
    types: tuple[str, ...] = option(
        "--types LIST",
        default=(),
        help="llama.cpp's types for --checkpoint, such as Q4_K_M,IQ4_XS: GGUF files that its own quantizer makes with "
        "an importance matrix of the calibration text",
    )
    calibration: str = option(
        "--calibration FILE",
        default="default",
        rare=True,
        help='UTF-8 text to calibrate with; "default" is the one that ships, "none" none',
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
    text: Path | None = option("--text FILE", default=None, help="text to read; <|endoftext|> may separate stories")
    pieces: int = option(
        "--pieces N",
        default=12,
        help=f"number of pieces of {_PIECE} tokens, spread over the text; of stories, the last ones",
    )
    questions: int = option("--questions N", default=5, help="number of questions of each kind; 0 for none")

    def __post_init__(self) -> None:
        if self.reference and not self.models:
            raise UsageError("--reference is what models are compared with.", "Give some with -m.")
        if self.pieces < 1 or self.questions < 0:
            raise UsageError("There must be at least one piece.", "Give --pieces 1 or more, --questions 0 or more.")
        for unknown in [each for each in self.kv or () if each not in KV_TYPES]:
            raise UsageError(f"There is no cache {unknown!r}.", f"Choose of {', '.join(KV_TYPES)}.")
        for bits in self.bits:
            _average(bits)
        for size in self.sizes:
            parse_size(size)

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
        source = str(path)
        forms: dict[str, dict[str, Any]] = {f"{_FLOAT_BITS} bits": {"bits": _FLOAT_BITS}}
        forms |= {bits if bits == _AUTO else f"{bits} bits": {"bits": _average(bits)} for bits in self.bits}
        forms |= {f"within {size}": {"target_size": parse_size(size)} for size in self.sizes}
        shared = {"calibration": self.calibration}
        variants = [Variant(name, source, shared | export) for name, export in forms.items()]
        first = variants[min(1, len(variants) - 1)]
        variants += [Variant(kind, source, shared, type=kind) for kind in self.types]
        return path.name, variants + [replace(first, kv=kv) for kv in self._caches()]

    def material(self) -> Material:
        """Texts and questions."""
        questions = tuple(exact_prompts(self.data, self.questions)) if self.questions else ()
        path = self.text or (self.data / STORIES_FILE if self.data else None)
        if path is None:
            stories = tuple(story.text for story in BUILTIN_STORIES)[: self.pieces]
            return Material(stories, questions=questions, name=f"{len(stories)} built-in stories")
        stories = tuple(all_stories(path))
        if len(stories) == 1:
            return Material(stories, questions=questions, name=path.name, pieces=self.pieces)
        stories = stories[-self.pieces :]
        return Material(stories, questions=questions, name=f"{len(stories)} stories of {path.name}")


def _average(bits: str) -> float | None:
    """Bits of a weight on average; None lets the export choose."""
    if bits == _AUTO:
        return None
    try:
        found = float(bits)
    except ValueError:
        found = 0.0
    if not 2 <= found <= 8:
        raise UsageError(f"There is no width {bits!r}.", f"Choose {_AUTO}, or 2 to 8, such as 4.5.")
    return int(found) if found.is_integer() else found


class _Reference:
    """A model's predictions, which are computed once and kept in files, so that one model at a time is in memory: as
    log-probabilities in float16, whose rounding adds less than 1e-5 nats."""

    def __init__(self, model: edgeinfer.Model, windows: Sequence[Sequence[int]], folder: Path) -> None:
        self.windows, self._folder = windows, folder
        for number, ids in enumerate(windows):
            with self._path(number).open("wb") as file:
                for rows in model.logits(ids):
                    log_softmax(rows, np.float32).clip(-6e4).astype(np.float16).tofile(file)

    def _path(self, number: int) -> Path:
        return self._folder / f"reference-{number}"

    def logits(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        kept = np.memmap(self._path(self.windows.index(tokens)), np.float16, "r").reshape(len(tokens), -1)  # (S, V)
        for start in range(0, len(kept), _ROWS):
            yield kept[start : start + _ROWS].astype(np.float32)


@dataclass
class Measured:
    """What was measured so far: figures of variants, and those that failed, with the reason."""

    subjects: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)


def measure_family(family: Family, material: Material, progress: Progress, into: Measured) -> None:
    """Measures every variant; what is done is in `into` at any time."""
    name, (first, *others) = family
    with tempfile.TemporaryDirectory(prefix="edgeinfer-quality-") as temporary:
        forms = _Forms(Path(temporary))
        with forms.load(first) as model:
            windows = _windows(model, material)
            reference = _Reference(model, windows, Path(temporary))
            into.subjects.append(_figures(name, first, model, reference, material) | forms.facts(first))
        for done, variant in enumerate(others, 1):
            progress(name, done, 1 + len(others))
            try:
                with forms.load(variant) as model:
                    # llama.cpp cuts some rare texts of its own files in another way.
                    if variant.is_given and windows != _windows(model, material):
                        message = f"{variant.label} and {first.label} cut texts into other tokens."
                        hint = "Compare a model with what it was made from: give that with --reference."
                        raise UsageError(message, hint)
                    found = _figures(name, variant, model, reference, material, compared=True)
                    into.subjects.append(found | forms.facts(variant))
            except EdgeInferError as error:
                into.skipped.append({"model": name, "variant": variant.label, "reason": str(error)})


def _windows(model: edgeinfer.Model, material: Material) -> list[list[int]]:
    """Tokens of every story, or of pieces spread over a text; each after the begin token."""
    if not material.pieces:
        return [story_ids(model, story)[:_PIECE] for story in material.stories]
    begin = model.begin_ids
    ids = model.tokenize(material.stories[0], parse_special=False)
    ids = ids[len(begin) :] if ids[: len(begin)] == begin else ids
    length = min(_PIECE, model.context) - len(begin)
    count = max(min(material.pieces, len(ids) // length), 1)
    starts = np.linspace(0, max(len(ids) - length, 0), count).astype(int)
    return [begin + ids[start : start + length] for start in starts]


class _Forms:
    """The forms of a checkpoint in a folder, each made once: variants with other caches share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seconds: dict[str, float] = {}
        self._llama: _LlamaTypes | None = None

    def load(self, variant: Variant) -> edgeinfer.Model:
        """Loads a variant."""
        options: dict[str, Any] = {} if variant.kv is None else {"kv": variant.kv}
        options |= {} if variant.type is None else {"backend": "llamacpp"}
        path = variant.source if variant.is_given else self._made(variant)
        return edgeinfer.load(path, speculation="off", remember=False, **options)

    def facts(self, variant: Variant) -> dict[str, float | None]:
        """The time that making it took; of a GGUF file the bytes of its tensors, without the vocabulary."""
        facts: dict[str, float | None] = {"seconds": self._seconds.get(variant.scheme)}
        return facts if variant.type is None else facts | {"bytes": read_gguf(self._made(variant)).tensor_bytes}

    def _made(self, variant: Variant) -> Path:
        path = self._folder / variant.scheme.replace(" ", "-")
        if variant.type is not None:
            path = path.with_suffix(".gguf")
        if path.exists():
            return path
        started, source = time.perf_counter(), Path(str(variant.source))
        if variant.type is not None:
            self._llama = self._llama or _LlamaTypes(source, self._folder, **variant.export or {})
            self._llama.write(path, variant.type)
            started -= self._llama.seconds
        else:
            from edgeinfer.export.exporter import export_checkpoint
            from edgeinfer.export.options import ExportConfig

            export_checkpoint(source, path, ExportConfig(**variant.export or {}))
        self._seconds[variant.scheme] = time.perf_counter() - started
        return path


class _LlamaTypes:
    """A checkpoint's float file and importance matrix, which files of all types are made of; `seconds` were needed."""

    def __init__(self, checkpoint: Path, folder: Path, calibration: str) -> None:
        from edgeinfer.export.gguf.route import write_float_file  # needs the gguf extra

        started = time.perf_counter()
        self._file = folder / "float.gguf"
        self._importance = write_float_file(checkpoint, self._file, calibration)
        self.seconds = time.perf_counter() - started

    def write(self, path: Path, kind: str) -> None:
        from edgeinfer.export.gguf.quantize import quantize_gguf

        quantize_gguf(self._file, path, kind, importance=self._importance)


def _figures(
    name: str,
    variant: Variant,
    model: edgeinfer.Model,
    reference: _Reference,
    material: Material,
    *,
    compared: bool = False,
) -> dict[str, Any]:
    """What reading shows, and answers; a model that is not compared is the reference."""
    pair = (model, reference) if compared else (reference, None)
    found = edgeinfer.evaluate(pair[0], reference.windows, reference=pair[1])
    values = np.zeros(1) if found.divergence is None else found.divergence.values  # (S,)
    parameters, bits = model.info.parameters, model.info.bits_per_weight
    return {
        "model": name,
        "variant": variant.label,
        "weights": variant.scheme,
        "cache": variant.kv,
        "bytes": round(parameters * bits / 8),
        "parameters": parameters,
        "cache_bytes": model.plan.terms.get("kv", 0),
        "perplexity": found.perplexity,
        "perplexity_error": found.perplexity_error,
        "divergence": float(values.mean()),
        "divergence_error": float(values.std() / np.sqrt(len(values))),
        "agreement": 1.0 if found.divergence is None else found.divergence.agreement,
        "tokens": len(found.logprobs),
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
    families, material, measured = options.families(), options.material(), Measured()
    finished = True
    try:
        for family in families:
            measure_family(family, material, context.progress, measured)
    except KeyboardInterrupt:
        if not measured.subjects:
            raise
        finished = False
    data = {"text": material.name, "subjects": measured.subjects, "skipped": measured.skipped}
    return BenchResult(data, finished=finished)


def quality_section(data: Any) -> Section:
    """Predictions and answers against bytes."""
    subjects = data["subjects"]
    tasks = list(dict.fromkeys(name for each in subjects for name in each["tasks"]))
    with_caches = any(each["cache"] for each in subjects)
    rows = tuple(
        (
            each["model"],
            each["variant"],
            format_size(each["bytes"]),
            f"{8 * each['bytes'] / each['parameters']:.2f}",
            *((format_size(each["cache_bytes"]),) if with_caches else ()),
            f"{each['perplexity']:.3f} ± {each['perplexity_error']:.3f}",
            f"{each['divergence']:.6f} ± {each['divergence_error']:.6f}" if each["divergence"] else "0",
            f"{each['agreement']:.2%}",
            "" if each["seconds"] is None else f"{each['seconds']:.0f} s",
            *(_score(each["tasks"].get(name)) for name in tasks),
        )
        for each in subjects
    )
    fixed = ("model", "variant", "weights", "bits", *(("cache",) if with_caches else ()))
    fixed += ("perplexity", "KL divergence, nats", "same next token", "made in")
    header = (*fixed, *(name.removeprefix("tales/") for name in tasks))
    table = Table("Compared with the reference of each model, its first row", header, rows)
    answers = "Answers: replies that are right letter for letter; in brackets the share of their tokens that are"
    notes = [Paragraph(f"{answers} the most likely after the right ones.")] if tasks else []
    notes += [Paragraph(f"{each['model']}, {each['variant']}: skipped: {each['reason']}") for each in data["skipped"]]
    facts = (("Text", data["text"]), ("Tokens", str(subjects[0]["tokens"])), *run_facts(data))
    return Section("What fewer bits cost", facts, (table, *notes), commands(data))


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
)
