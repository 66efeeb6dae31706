"""`edgeinfer bench compute`: its options, its material, and the section and chart that show what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, option
from edgeinfer.apps.bench.compute_measure import LEVELS, QUICK, ComputeMaterial, measure_compute
from edgeinfer.apps.bench.model_files import default_folder, expanded_bundle
from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.apps.bench.prompts import exact_prompts
from edgeinfer.apps.bench.render import Paragraph, Section, Table, commands, run_facts
from edgeinfer.apps.bench.texts import BUILTIN_STORIES, all_stories
from edgeinfer.errors import UsageError

_TEXT = "tinystories/tinystories_train_part0.txt"
_READ, _EXPANDED = "texts and questions (default: a few that are built in)", "cost-expanded models"
_DESCRIPTION = """\
Take less compute by every policy at several levels, and measure how far predictions diverge from the whole model's, how
many answers are still right, and how much faster replies are. Entropy is compared with random turns at the same share
of the large model, calibrated sets of blocks with evenly spaced layers, and floors are tried on texts of their own.

examples:
  edgeinfer bench compute --data DATA --quick
  edgeinfer bench compute -m BUNDLE --draft-model SMALL-BUNDLE --data DATA --json compute.json
  edgeinfer bench compute --checkpoint LARGE --draft-checkpoint SMALL --expand 4 --data DATA --quick

With --expand speeds are those of cost-expanded models: small trained checkpoints at the sizes of larger ones.
"""


@dataclass(frozen=True)
class ComputeBenchOptions:
    """What is read and asked, and of which models.

    Attributes:
        expand: factor by which both checkpoints are cost-expanded.
        work: where expanded models are kept; None is the usual folder.
    """

    data: Path | None = option(
        "--data PATH", default=None, group=_READ, help=f"folder with {_TEXT} to read and tales_dialogues/ to answer"
    )
    stories: int = option("--stories N", rare=True, default=24, help="number of stories to read")
    questions: int = option("--questions N", rare=True, default=6, help="number of questions of each kind")
    quick: bool = option("--quick", default=False, help="use a third of the stories and questions, and fewer levels")
    checkpoint: Path | None = option(
        "--checkpoint PATH",
        default=None,
        group=_EXPANDED,
        help="small Llama checkpoint (Hugging Face, safetensors) to use instead of -m",
    )
    draft_checkpoint: Path | None = option(
        "--draft-checkpoint PATH", rare=True, default=None, help="checkpoint to use instead of --draft-model"
    )
    expand: int | None = option(
        "--expand FACTOR", default=None, help="factor by which the checkpoint is widened; it also gets twice as deep"
    )
    work: Path | None = option("--work PATH", rare=True, default=None, help="folder for these files")

    def __post_init__(self) -> None:
        if min(self.stories, self.questions) < 1:
            message = "There must be something to read and to answer."
            raise UsageError(message, "Give --stories and --questions from 1 on.")
        if (self.expand is None) != (self.checkpoint is None) or (self.draft_checkpoint and not self.checkpoint):
            message = "--expand needs a checkpoint, and checkpoints are for --expand alone."
            raise UsageError(message, "Give --checkpoint and --expand, or -m.")

    def expanded(self, checkpoint: Path) -> str:
        """The cost-expanded bundle of a checkpoint."""
        assert self.expand is not None, "checkpoints come with --expand"
        return str(expanded_bundle(checkpoint.resolve(), self.expand, self.work or default_folder()))

    def material(self) -> ComputeMaterial:
        """What models read and answer."""
        part = 3 if self.quick else 1
        stories, questions = max(2, self.stories // part), max(1, self.questions // part)
        asked = tuple(exact_prompts(self.data, questions))
        if self.data is None:
            texts = tuple(story.text for story in BUILTIN_STORIES)
            half = len(texts) // 2
            return ComputeMaterial(texts[half:][:stories], texts[:half], asked, "built-in stories")
        found = all_stories(self.data / _TEXT)
        if len(found) < stories + 8:
            raise UsageError(f"{self.data / _TEXT} has too few stories.", "Read fewer (--stories).")
        text = f"{stories} stories of {Path(_TEXT).name}"
        return ComputeMaterial(tuple(found[-stories:]), tuple(found[:8]), asked, text)


def _run(options: ComputeBenchOptions, context: BenchContext) -> BenchResult:
    load, model_name = {"remember": False} | context.load, context.model
    if options.checkpoint and (model_name or "draft_model" in load):
        raise UsageError("A bundle cannot be expanded.", "Give checkpoints, and neither -m nor --draft-model.")
    material, small = options.material(), options.draft_checkpoint
    if options.checkpoint:
        load |= {"draft_model": options.expanded(small)} if small else {}
        model_name = options.expanded(options.checkpoint)
    # Layers that cost expansion added compute nothing: skipped alone, they would be saved for nothing.
    limits: dict[str, Any] = {"granularity": 2, "evaluations": 60} if options.expand else {}
    limits |= {"evaluations": 60 if options.expand else 250, "repeats": 1} if options.quick else {}
    drafter = load.get("draft_model")
    with context.open_model(model_name, load) as model:
        own = "its own drafter" if "draft_model" in model.plan.terms else None
        name = Path(drafter).name if drafter else own
        levels = QUICK if options.quick else LEVELS
        results = measure_compute(model, material, levels, drafter=name, progress=context.progress, **limits)
    data = results.to_dict() | {"expanded": options.expand}
    if options.checkpoint:
        grown = f"x{options.expand}"
        data |= {"model": f"{options.checkpoint.name} {grown}", "drafter": small and f"{small.name} {grown}"}
    return BenchResult(data)


HEADER = (
    "policy", "level", "nats", "perplexity", "large share", "skipped", "predicted", "ms/token", "faster", "right"
)  # fmt: skip
# Columns of what is compared with what.
_COMPARED = {"entropy": ("share", "entropy", "random"), "calibrated": ("speedup", "unified", "calibrated")}
# What tells the levels of a policy apart, and how it is written.
_LEVELS = {"compute_share": "share {:.2f}", "compute_speedup": "{:.2f}x", "exit_confidence": "p {:.2f}"}


def _comparisons(data: Mapping[str, Any]) -> list[Table]:
    """Each comparison with what a policy has to beat."""
    found = []
    for name, columns in _COMPARED.items():
        pairs = data["dominance"][name]
        better = sum(dominates(name, pair) for pair in pairs)
        rows = [(f"{pair[columns[0]]:.2f}", *(f"{pair[column]:.4f}" for column in columns[1:])) for pair in pairs]
        if pairs:
            title = f"{name}: less divergence at {better} of {len(pairs)} levels"
            found.append(Table(title, columns, tuple(rows)))
    return found


def _floors(floors: Sequence[Mapping[str, Any]]) -> Table:
    """How the floors of policies were kept."""
    rows = [
        (
            each["policy"],
            _level(each["options"]),
            f"{each['floor']:g}",
            f"{each['divergence']:.4f}",
            f"{each['worst']:.4f}",
            f"{each['above']} of {each['stories']}",
            f"{each['reduced']:.0%}",
        )
        for each in floors
    ]
    header = ("policy", "level", "floor", "nats", "worst story", "above the floor", "still reduced")
    return Table("Floors, on texts that nothing was calibrated with", header, tuple(rows))


def dominates(name: str, pair: Mapping[str, float]) -> bool:
    """Whether a policy diverges less than what it is compared with."""
    return pair[name] < pair["random" if name == "entropy" else "unified"]


def point_rows(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each point of the JSON."""
    return [
        (
            each["policy"],
            _level(each["options"]),
            f"{each['divergence']:.4f}",
            f"{each['perplexity']:.3f}",
            f"{1 - each['reduced']:.0%}",
            f"{each['skipped']:.0%}",
            _times(each["predicted_speedup"]),
            "" if each["per_token_ms"] is None else f"{each['per_token_ms']:.3f}",
            _times(each["speedup"]),
            f"{each['right']}/{each['questions']}" if each["questions"] else "",
        )
        for each in points
    ]


def _level(options: Mapping[str, Any]) -> str:
    return ", ".join(text.format(options[name]) for name, text in _LEVELS.items() if name in options)


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}x"


def compute_chart(data: Mapping[str, Any]) -> Chart:
    """Divergence against speed, a line for each policy."""
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for each in data["points"]:
        # The whole model's own divergence, nothing, has no place on a logarithmic axis.
        if each["divergence"] > 0 and each["speedup"] is not None:
            lines.setdefault(each["policy"], []).append((each["speedup"], each["divergence"], _level(each["options"])))
    drawn = []
    for name, points in lines.items():
        ordered = sorted(points)
        drawn.append(Line(name, tuple(point[:2] for point in ordered), tuple(point[2] for point in ordered)))
    y = "KL divergence, nats per token"
    return Chart(f"{data['model']}: less compute", "times faster", y, tuple(drawn), logarithmic=True)


def compute_section(data: Any) -> Section:
    """Quality against speed where less than the whole model is computed."""
    points = Table("Every policy at several levels", HEADER, tuple(point_rows(data["points"])))
    tables = [*_comparisons(data), *([_floors(data["floors"])] if data["floors"] else [])]
    notes = [Paragraph(f"{policy}: skipped: {reason}") for policy, reason in data["skipped"].items()]
    if data.get("expanded"):
        notes.append(Paragraph("Speeds are those of cost-expanded models: small ones at the sizes of larger ones."))
    drafter = (("Draft model", data["drafter"]),) if data["drafter"] else ()
    facts = (("Model", data["model"]), *drafter, ("Text", data["text"]), *run_facts(data))
    return Section("What less compute costs", facts, (compute_chart(data), points, *tables, *notes), commands(data))


COMPUTE = Benchmark(
    "compute",
    "quality against speed where less is computed",
    _DESCRIPTION,
    ComputeBenchOptions,
    _run,
    compute_section,
    loads=True,
    chart=compute_chart,
)
