"""What `edgeinfer bench peers` is told and finds: its settings, its figures as JSON, and their section of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from edgeinfer.apps.bench.peers_engines import PEERS
from edgeinfer.apps.bench.plots import Chart, Line
from edgeinfer.apps.bench.render import Paragraph, Section, Table, commands, run_facts
from edgeinfer.apps.bench.timing import Spread
from edgeinfer.config import format_size
from edgeinfer.errors import Setting, UsageError

MB = 10**6
Row = Mapping[str, Any]
BUDGETS = tuple(size * MB for size in (250, 350, 500, 700, 1000))
# Tokens whose reply within a budget is timed, and tokens of that reply.
_ASKED, _ANSWERED = 128, 64
# Tokens in the cache before a pass that is timed, and sizes of such passes.
_PAST, _SIZES = 128, (1, 4)


@dataclass(frozen=True)
class PeersConfig:
    """Settings of a run.

    Attributes:
        engines: names of `peers_engines.PEERS`.
        pythons: interpreters of engines that are not installed here.
        threads: of every engine.
        context: tokens of cache, where an engine is told; less where the model holds less.
        prompt, reply: tokens of the prompt and of the steps that are timed.
        budgets: bytes; none leaves them out.
        repeats: visits to every engine and task, and starts of it.
        rounds: processes for every engine and budget.
        patience: seconds after which a process within a budget is ended.
    """

    engines: tuple[str, ...] = tuple(PEERS)
    pythons: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    context: int = 1024
    prompt: int = 512
    reply: int = 128
    budgets: tuple[int, ...] = BUDGETS
    repeats: int = 5
    rounds: int = 3
    patience: float = 120.0

    def __post_init__(self) -> None:
        for name in (*self.engines, *self.pythons):
            if name not in PEERS:
                raise UsageError(f"Unknown engine {name!r}.", f"Known engines: {', '.join(PEERS)}.")
        if not self.engines:
            raise UsageError("There is no engine to measure.", f"Known engines: {', '.join(PEERS)}.")
        for name in ("threads", "prompt", "reply", "repeats", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(Setting(name, getattr(self, name)) + " is out of range.", "Give 1 or more.")
        if min(self.budgets, default=1) < 1:
            raise UsageError("A budget must be at least one byte.", "Give sizes such as 250MB.")
        if self.patience <= 0:
            raise UsageError(Setting("patience", self.patience) + " is out of range.", "Give more than 0 seconds.")
        if self.context < self.needed:
            message = f"A context of {self.context} tokens is too small: what is timed takes {self.needed}."
            raise UsageError(message, "Give a larger one (-c), or a shorter prompt (-p) and reply (-n).")

    @property
    def needed(self) -> int:
        """Tokens of context that what is timed takes."""
        return max(self.prompt, 1 + self.reply + 2, self.past + max(self.sizes), self.asked + self.answered) + 1

    @property
    def asked(self) -> int:
        """Tokens of the prompt whose reply is timed within a budget."""
        return _ASKED

    @property
    def answered(self) -> int:
        """Tokens of that reply."""
        return _ANSWERED

    @property
    def past(self) -> int:
        """Tokens in the cache before a pass that is timed."""
        return _PAST

    @property
    def sizes(self) -> tuple[int, ...]:
        """New tokens of such passes."""
        return _SIZES


@dataclass(frozen=True)
class BudgetFigures:
    """A reply inside an enforced limit.

    Attributes:
        tokens_per_second: after its first token, the median of its processes; None where there is no such figure.
        reason: why not.
        peak_rss_bytes: of the process; the system charges its limit for pages that it was the first to touch, so this
            may be more than the limit.
    """

    tokens_per_second: float | None
    reason: str = ""
    peak_rss_bytes: int = 0


@dataclass(frozen=True)
class EngineFigures:
    """One engine on one model.

    Attributes:
        engine: its label.
        weights: what it loads.
        size: of that on disk, in bytes.
        skipped: why nothing was measured; empty where something was.
        load_ms: from the start of its process until it could be asked.
        rates: tokens per second, by "pp512" and "tg128".
        passes: milliseconds of a pass over so many new tokens.
        peak_rss_bytes: of a process that did all of that.
        agreement: share of its replies' tokens that the reference would have chosen, too; None where it was not asked.
        checked: number of these tokens.
        same_tokens: whether that is enough; speeds are left out where it is not.
        budgets: replies within limits, by bytes.
        note: what readers of these figures should know.
    """

    engine: str
    version: str = ""
    weights: str = ""
    size: int = 0
    skipped: str = ""
    load_ms: Spread | None = None
    rates: Mapping[str, Spread] = field(default_factory=dict)
    passes: Mapping[int, Spread] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    agreement: float | None = None
    checked: int = 0
    same_tokens: bool | None = None
    budgets: Mapping[int, BudgetFigures] = field(default_factory=dict)
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types; medians stand under the names of what they are of."""
        spreads = {"load_ms": self.load_ms, **self.rates, **{f"c({m})": each for m, each in self.passes.items()}}
        return {
            "engine": self.engine,
            "version": self.version,
            "weights": self.weights,
            "bytes": self.size,
            "skipped": self.skipped or None,
            "load_ms": self.load_ms.median if self.load_ms else None,
            **{name: rate.median for name, rate in self.rates.items()},
            "c": {str(size): each.median for size, each in self.passes.items()},
            "peak_rss_bytes": self.peak_rss_bytes or None,
            "same_tokens": self.same_tokens,
            "agreement": self.agreement,
            "checked_tokens": self.checked,
            "budgets": {str(budget): asdict(figures) for budget, figures in self.budgets.items()},
            "note": self.note,
            "spreads": {name: asdict(each) for name, each in spreads.items() if each},
        }


@dataclass(frozen=True)
class ModelFigures:
    """All engines on one model.

    Attributes:
        check: how replies were checked, in words.
        limits: why no limit was enforced; empty where they were, or where there were no budgets.
        tests: names of the rates.
    """

    model: str
    context: int
    check: str
    limits: str
    tests: tuple[str, ...]
    sizes: tuple[int, ...]
    budgets: tuple[int, ...]
    engines: tuple[EngineFigures, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types."""
        return {
            "model": self.model,
            "context": self.context,
            "check": self.check,
            "limits": self.limits,
            "tests": list(self.tests),
            "engines": [each.to_dict() for each in self.engines],
        }


def peers_json(figures: Sequence[ModelFigures], config: PeersConfig) -> dict[str, Any]:
    """As JSON's types, less what every result file begins with."""
    return {
        "threads": config.threads,
        "repeats": config.repeats,
        "rounds": config.rounds,
        "past": config.past,
        "budget_prompt": config.asked,
        "budget_reply": config.answered,
        "models": [each.to_dict() for each in figures],
    }


def peers_section(data: Any) -> Section:
    """Every model's engines side by side, and how fast they are in how little memory."""
    facts = (
        *run_facts(data),
        ("Threads", str(data["threads"])),
        ("Visits", f"{data['repeats']} to each test, {data['rounds']} processes at each budget"),
    )
    parts = tuple(part for model in data["models"] for part in _model_parts(model, data))
    return Section("Beside other engines", facts, parts, commands(data))


def _model_parts(model: Row, data: Row) -> Iterator[Table | Chart | Paragraph]:
    timed = [engine for engine in model["engines"] if not engine["skipped"]]
    yield _speed_table(model, timed)
    budgets = sorted({int(budget) for engine in timed for budget in engine["budgets"]})
    if budgets:
        asked = f"reply of {data['budget_reply']} tokens to {data['budget_prompt']}"
        yield _budget_table(model, timed, budgets, asked)
        lines = tuple(line for engine in timed if (line := _budget_line(engine)).points)
        if lines:
            yield Chart(f"{model['model']}: speed within a memory limit", "limit, MB", "tokens per second", lines)
    yield from map(Paragraph, _notes(model, timed, data))


def _speed_table(model: Row, timed: Sequence[Row]) -> Table:
    tests = model["tests"]
    sizes = sorted({int(size) for engine in timed for size in engine["c"]})
    figures = (*(f"{test} t/s" for test in tests), *(f"c({size}) ms" for size in sizes))
    header = ("engine", "weights", "on disk", "load ms", *figures, "peak MB", "same tokens")
    rows = tuple(
        (
            engine["engine"],
            engine["weights"],
            format_size(engine["bytes"]),
            _number(engine["load_ms"], 0),
            *(_number(engine.get(test), 1) for test in tests),
            *(_number(engine["c"].get(str(size)), 2) for size in sizes),
            _number(engine["peak_rss_bytes"] and engine["peak_rss_bytes"] / MB, 0),
            "" if engine["agreement"] is None else f"{engine['agreement']:.0%}",
        )
        for engine in timed
    )
    caption = f"{model['model']}, context of {model['context']} tokens"
    return Table(caption, header, rows)


def _budget_table(model: Row, timed: Sequence[Row], budgets: Sequence[int], asked: str) -> Table:
    rows = tuple((engine["engine"], *(_cell(engine["budgets"].get(str(b))) for b in budgets)) for engine in timed)
    caption = f"{model['model']}: tokens per second of a {asked}, the whole process inside an enforced limit"
    return Table(caption, ("engine", *map(format_size, budgets)), rows)


def _budget_line(engine: Row) -> Line:
    found = sorted((int(budget), figures["tokens_per_second"]) for budget, figures in engine["budgets"].items())
    return Line(engine["engine"], tuple((budget / MB, rate) for budget, rate in found if rate is not None))


def _notes(model: Row, timed: Sequence[Row], data: Row) -> Iterator[str]:
    yield f"t/s: tokens per second. c(m): a pass over m new tokens behind {data['past']}. Peak: resident memory."
    yield model["check"]
    versions = ", ".join(f"{engine['engine']} {engine['version']}" for engine in timed)
    yield f"Versions: {versions}."
    if model["limits"]:
        yield f"Speed within budgets was not measured: {model['limits']}."
    for engine in timed:
        if engine["note"]:
            yield f"{engine['engine']}: {engine['note']}."
        if engine["same_tokens"] is False:
            yield f"{engine['engine']}: wrong, its speed does not count."
        for budget, figures in engine["budgets"].items():
            if ":" in figures["reason"]:
                yield f"{engine['engine']} at {format_size(int(budget))}: {figures['reason']}."
    for engine in model["engines"]:
        if engine["skipped"]:
            yield f"{engine['engine']}: skipped: {engine['skipped'].rstrip('.')}."


def _cell(figures: Row | None) -> str:
    """The rate, or in a word why there is none."""
    if figures is None:
        return ""
    rate = figures["tokens_per_second"]
    return str(figures["reason"]).partition(":")[0] if rate is None else f"{rate:.1f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
