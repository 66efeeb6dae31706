"""What making a model smaller does to its predictions and answers, against bytes.

Every variant reads the same stories side by side with its reference: perplexity, how far the distributions are apart,
how often the most likely next token is the same. Models that chat answer questions with one right answer.
"""

from __future__ import annotations

import itertools
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import edgeinfer
from edgeinfer.apps.bench.driver import child_environment
from edgeinfer.apps.bench.model_files import export_command
from edgeinfer.apps.bench.prompts import Message, Prompt
from edgeinfer.apps.bench.quality_variants import CALIBRATION, Family, Variant
from edgeinfer.apps.bench.texts import calibration_text, story_ids
from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.store import GGUF_MODEL, GGUF_SUFFIX
from edgeinfer.errors import EdgeInferError, TemplateError, UsageError
from edgeinfer.results import Result

StageProgress = Callable[[str, int, int], None]
# A reply that says more than the answer is wrong: these many tokens show that it does.
_BEYOND = 4


@dataclass(frozen=True)
class Material:
    """What models read and answer.

    Attributes:
        stories: to read; each is cut at the model's context.
        calibration: stories that quantizers may look at, others than those.
        calibration_tokens: of them, at most; None is the exporter's choice, and an error where they are fewer.
        questions: with answers.
    """

    stories: tuple[str, ...]
    calibration: tuple[str, ...] = ()
    calibration_tokens: int | None = None
    questions: tuple[Prompt, ...] = ()


@dataclass(frozen=True)
class TaskScore:
    """Replies to the questions of one kind.

    Attributes:
        right: replies that are the answer, letter for letter.
        of: questions.
        tokens_right: of the answers' tokens, those that are likeliest after the right ones before them: what a reply
            would have right had each of its mistakes been put right at once.
        tokens: of all answers.
    """

    right: int
    of: int
    tokens_right: int
    tokens: int

    def __add__(self, other: TaskScore) -> TaskScore:
        return TaskScore(
            self.right + other.right,
            self.of + other.of,
            self.tokens_right + other.tokens_right,
            self.tokens + other.tokens,
        )


@dataclass(frozen=True)
class Quality:
    """One variant.

    Attributes:
        bytes: of the weights, scales and zero points included; of a GGUF file without its metadata.
        cache_bytes: of the cache for `context` tokens.
        perplexity: over all tokens but each story's first; `perplexity_error` is its standard error.
        divergences: Kullback-Leibler divergence from the reference after each token, in nats. (S,)
        agreement: share of tokens after which the most likely next one is the reference's.
        tasks: scores by category; none of models that do not chat.
    """

    model: str
    variant: Variant
    bytes: int
    bits_per_weight: float
    context: int
    cache_bytes: int
    perplexity: float
    perplexity_error: float
    divergences: NDArray[np.float64]
    agreement: float
    tasks: Mapping[str, TaskScore]

    @property
    def divergence(self) -> tuple[float, float]:
        """Mean of the divergences and its standard error."""
        return _mean(self.divergences)

    def to_dict(self) -> dict[str, Any]:
        """All but the single divergences."""
        kept = ("model", "bytes", "bits_per_weight", "context", "cache_bytes", "perplexity", "perplexity_error")
        mean, error = self.divergence
        return {
            **{name: getattr(self, name) for name in kept},
            "variant": self.variant.label,
            "weights": self.variant.scheme,
            "cache": self.variant.kv,
            "layout": self.variant.layout,
            "divergence": mean,
            "divergence_error": error,
            "agreement": self.agreement,
            "tokens": len(self.divergences),
            "tasks": {name: asdict(score) for name, score in self.tasks.items()},
        }


@dataclass(frozen=True)
class Skipped:
    """A variant that could not be measured, and why."""

    model: str
    variant: str
    reason: str


@dataclass(frozen=True)
class Difference:
    """By how much the first of two layouts diverges more from the reference than the second, with the same weights:
    mean over all tokens, and its standard error."""

    model: str
    scheme: str
    layouts: tuple[str | None, str | None]
    mean: float
    error: float


@dataclass(frozen=True)
class QualityResults:
    """Everything that was measured, in order; of each family its reference first."""

    subjects: tuple[Quality, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    text: str = ""

    def __add__(self, other: QualityResults) -> QualityResults:
        return QualityResults(self.subjects + other.subjects, self.skipped + other.skipped, self.text or other.text)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "text": self.text,
            "subjects": [quality.to_dict() for quality in self.subjects],
            "skipped": [asdict(each) for each in self.skipped],
            "layouts": [asdict(each) for each in layout_differences(self.subjects)],
        }


@dataclass
class _Bench:
    """Models of one family, made in a folder, and what they read."""

    family: Family
    material: Material
    folder: Path
    told: Callable[[], None]
    made: dict[tuple[str | None, tuple[str, ...]], Path] = field(default_factory=dict)

    def path(self, variant: Variant) -> str | Path | None:
        """What is to be loaded; of a checkpoint the bundle, which variants with other caches share."""
        if variant.export is None:
            return variant.source
        key = (variant.source, variant.export)
        if key not in self.made:
            options = list(variant.export)
            if CALIBRATION in options:
                text = self.folder / "calibration.txt"
                text.write_text(calibration_text(self.material.calibration), "utf-8")
                options[options.index(CALIBRATION)] = str(text)
                tokens = self.material.calibration_tokens
                options += [] if tokens is None else ["--calibration-tokens", str(tokens)]
            self.made[key] = self.folder / str(len(self.made))
            _export(Path(str(variant.source)), self.made[key], options)
        return self.made[key]

    def load(self, variant: Variant) -> edgeinfer.Model:
        """Without drafts: what is measured are predictions."""
        return edgeinfer.load(self.path(variant), speculation="off", remember=False, **variant.load)

    def measure(self, variant: Variant, model: edgeinfer.Model, reference: edgeinfer.Model | None) -> Quality:
        """Reads and asks; without a reference it is one."""
        windows = [story_ids(reference or model, story) for story in self.material.stories]
        if reference is not None:
            _check_same_tokens(variant, model, reference, self.material.stories[0])
        found = edgeinfer.evaluate(model, windows, reference=reference)
        self.told()
        divergence = found.divergence
        values = np.zeros(sum(map(len, windows))) if divergence is None else divergence.values
        info, path = model.info, self.path(variant)
        stored = _tensor_bytes(path) or round(info.parameters * info.bits_per_weight / 8)
        return Quality(
            model=self.family.model,
            variant=variant,
            bytes=stored,
            bits_per_weight=8 * stored / info.parameters,
            context=model.context,
            cache_bytes=model.plan.terms.get("kv", 0),
            perplexity=found.perplexity,
            perplexity_error=found.perplexity_error,
            divergences=values,
            agreement=1.0 if divergence is None else divergence.agreement,
            tasks=score_tasks(model, self.material.questions, self.told),
        )


def _tensor_bytes(path: str | Path | None) -> int | None:
    """Bytes of the tensors of a GGUF file or bundle; None of others.

    Such a file also holds the vocabulary, which in a small model would count for a quarter of a bit per weight.
    """
    if path is None:
        return None
    file = Path(path)
    file = file / GGUF_MODEL if file.is_dir() else file
    return read_gguf(file).tensor_bytes if file.suffix == GGUF_SUFFIX and file.is_file() else None


def measure_family(family: Family, material: Material, told: StageProgress | None = None) -> QualityResults:
    """The reference and every variant; those that fail are skipped with the reason.

    Args:
        told: called with the name of what is measured, and with readings and replies done and to do.
    """
    total = (1 + len(family.variants)) * (1 + len(material.questions))
    steps = itertools.count(1)

    def step() -> None:
        if told is not None:
            told(family.model, next(steps), total)

    subjects: list[Quality] = []
    skipped: list[Skipped] = []
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="edgeinfer-quality-")))
        bench = _Bench(family, material, folder, step)
        reference = opened.enter_context(bench.load(family.reference))
        subjects.append(bench.measure(family.reference, reference, None))
        for variant in family.variants:
            try:
                with bench.load(variant) as model:
                    subjects.append(bench.measure(variant, model, reference))
            except EdgeInferError as error:
                skipped.append(Skipped(family.model, variant.label, str(error)))
    return QualityResults(tuple(subjects), tuple(skipped))


def layout_differences(results: Sequence[Quality]) -> list[Difference]:
    """The difference of each two results that differ in their layout alone."""
    differences = []
    for first, second in itertools.combinations(results, 2):
        one, other = first.variant, second.variant
        same = (first.model, one.scheme, one.kv) == (second.model, other.scheme, other.kv)
        if same and None not in (one.layout, other.layout):
            mean, error = _mean(first.divergences - second.divergences)
            differences.append(Difference(first.model, one.scheme, (one.layout, other.layout), mean, error))
    return differences


def _mean(values: NDArray[np.float64]) -> tuple[float, float]:  # (S,)
    return float(values.mean()), float(values.std() / np.sqrt(len(values)))


def _export(checkpoint: Path, out: Path, options: Sequence[str]) -> None:
    command = export_command(checkpoint, out, options)
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
        raise UsageError(f"{checkpoint.name} cannot be exported: {reason}", "Export it alone to see more.")


def _check_same_tokens(variant: Variant, model: edgeinfer.Model, reference: edgeinfer.Model, text: str) -> None:
    if model.tokenize(text, parse_special=False) != reference.tokenize(text, parse_special=False):
        message = f"{variant.label} and {reference.info.name} cut texts into other tokens."
        raise UsageError(message, "Compare a model with what it was made from: give that with --reference.")


class AnsweringModel(Protocol):
    """The part of a model that answers."""

    @property
    def context(self) -> int:
        """Tokens of prompt plus reply."""

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of a text."""

    def tokenize_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation; TemplateError where the model has no chat template."""

    def generate(self, prompt: Sequence[int], *, max_tokens: int) -> Result:
        """The likeliest continuation."""

    def logits(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Arrays of a few rows each, which the next may overwrite: (R, V)."""


def score_tasks(model: AnsweringModel, prompts: Sequence[Prompt], told: Callable[[], None]) -> dict[str, TaskScore]:
    """Scores by category; none of a model without a chat template, which was not made to answer.

    A question that the context has no room for, answer included, counts as answered wrongly.

    Args:
        told: called with every reply.
    """
    scores: dict[str, TaskScore] = {}
    for prompt in prompts:
        assert prompt.answer is not None, "only prompts with answers are tasks"
        try:
            ids = model.tokenize_chat(prompt.messages)
        except TemplateError:
            return {}
        score = _score(model, ids, prompt.answer.strip())
        scores[prompt.category] = scores.get(prompt.category, TaskScore(0, 0, 0, 0)) + score
        told()
    return scores


def _score(model: AnsweringModel, ids: Sequence[int], answer: str) -> TaskScore:
    wanted = model.tokenize(answer, parse_special=False)
    if len(ids) + len(wanted) + _BEYOND > model.context:
        return TaskScore(0, 1, 0, len(wanted))
    reply = model.generate(ids, max_tokens=len(wanted) + _BEYOND).text
    likeliest = np.concatenate([rows.argmax(axis=1) for rows in model.logits([*ids, *wanted])])
    foreseen = likeliest[len(ids) - 1 : -1] == np.array(wanted)
    return TaskScore(int(reply.strip() == answer), 1, int(foreseen.sum()), len(wanted))
