"""Runs every engine on one model: checks its replies, then times it in turns with the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.driver import Worker
from edgeinfer.apps.bench.model_files import tree_bytes
from edgeinfer.apps.bench.peers_engines import PEERS, REFERENCE, PeerEngine, PeerModel, missing, text_of
from edgeinfer.apps.bench.peers_figures import EngineFigures, ModelFigures, PeersConfig
from edgeinfer.apps.bench.peers_limits import LimitedRun, can_enforce, run_limited, summary
from edgeinfer.apps.bench.timing import DECODE, PREFILL, Spread, Task, VisitTimes, rotated, visits
from edgeinfer.errors import BackendError, UsageError

StageProgress = Callable[[str, int, int], None]
# Steps and passes of a visit to c(m).
_BURST = 3
# Tokens of the replies that are checked besides the one that is timed within budgets.
_CHECKED = 16


# Of the tokens of its replies, what an engine must share with the reference for its speed to count.
LEAST_AGREEMENT = 0.8


@dataclass(frozen=True)
class Agreement:
    """Agreement of one or several replies: how many of their tokens the reference would have chosen."""

    agreeing: int = 0
    tokens: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.agreeing + other.agreeing, self.tokens + other.tokens)

    @property
    def share(self) -> float:
        """The share of the tokens that agree."""
        return self.agreeing / self.tokens if self.tokens else 0.0

    @property
    def good(self) -> bool:
        """Whether speed counts."""
        return self.share >= LEAST_AGREEMENT


class Judge:
    """The reference in a process of its own, which runs only while it is asked something new.

    At each place of a reply it is given what stands before, so that one other token does not spoil the rest.

    Args:
        kind: of worker.ENGINES; it can `judge`.
        options: of that engine.
        tolerance: how far a token may be from the likeliest and still agree, see `TransformersEngine.judge`.
        python: the interpreter that has it; None is this one.
    """

    def __init__(self, kind: str, options: Mapping[str, Any], tolerance: float, python: str | None) -> None:
        self._kind, self._options, self._python = kind, options, python
        self._tolerance = tolerance
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Agreement] = {}

    def verdicts(self, replies: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Agreement]:
        """The agreement of each pair of a prompt and a reply to it."""
        asked = [(tuple(prompt), tuple(reply)) for prompt, reply in replies]
        new = [each for each in dict.fromkeys(asked) if each not in self._known]
        if new:
            with Worker(self._kind, self._options, self._python) as worker:
                for prompt, reply in new:
                    far = worker.ask("judge", prompt=prompt, reply=reply)
                    agreeing = sum(distance <= self._tolerance for distance in far)
                    self._known[prompt, reply] = Agreement(agreeing, len(far))
        return [self._known[each] for each in asked]


@dataclass
class _Entry:
    """An engine that takes part, and what was found so far."""

    peer: PeerEngine
    python: str | None
    options: dict[str, Any]
    size: int
    version: str = ""
    verdict: Agreement | None = None
    reply: tuple[int, ...] = ()
    files: tuple[Path, ...] = ()
    peak: int = 0
    notes: list[str] = field(default_factory=list)
    limited: dict[int, list[LimitedRun]] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Whether its speed does."""
        return self.verdict is None or self.verdict.good


class PeersRun:
    """One model on all engines. What was done when it is interrupted can be had by `figures`.

    Args:
        told: stage, number done and number to do.

    Raises:
        UsageError: the model does not hold as many tokens as are timed.
    """

    def __init__(self, model: PeerModel, config: PeersConfig, told: StageProgress) -> None:
        self._model, self._config, self._told = model, config, told
        self._context = min(config.context, model.longest)
        if self._context < config.needed:
            message = f"{model.name} holds {model.longest} tokens, and what is timed takes {config.needed}."
            raise UsageError(message, "Give a shorter prompt (-p) and reply (-n), or another model.")
        self._prompts: list[list[int]] = []
        self._entries: dict[str, _Entry] = {}
        self._skipped: dict[str, str] = {}
        self._loads, self._samples = VisitTimes(), VisitTimes()
        self._judge: Judge | None = None
        self._unchecked = ""
        self._limits = ""

    def run(self) -> None:
        """Everything, in order."""
        self._prepare()
        self._check()
        self._time_loading()
        self._time_tasks()
        self._time_budgets()

    def _prepare(self) -> None:
        """Makes the model files of all engines that are there, and of the reference."""
        self._prompts = self._model.prompts()
        for done, name in enumerate(self._config.engines):
            self._told(f"{self._model.name}: model files", done, len(self._config.engines))
            peer, python = PEERS[name], self._python(name)
            reason = missing(peer, python, name)
            if not reason:
                try:
                    path = peer.make(self._model, python)
                except BackendError as error:
                    reason = error.message
            if reason:
                self._skipped[name] = reason
                continue
            self._entries[name] = _Entry(peer, python, self._options(peer, path), tree_bytes(path))
        python = self._python("transformers")
        self._unchecked = missing(REFERENCE, python, "transformers")
        if not self._unchecked:
            options = self._options(REFERENCE, self._model.files.checkpoint())
            self._judge = Judge(REFERENCE.kind, options, self._model.tolerance, python)

    def _python(self, name: str) -> str | None:
        """An interpreter that was named, for this engine or for all of its kind."""
        pythons = self._config.pythons
        return pythons.get(name) or pythons.get(name.partition("-")[0])

    def _options(self, peer: PeerEngine, path: Path) -> dict[str, Any]:
        return {"path": str(path), "threads": self._config.threads, "context": self._context, **peer.options}

    def _check(self) -> None:
        """Has every engine reply, and the reference read what it says."""
        asked = [(prompt, _CHECKED) for prompt in self._prompts]
        asked.append((self._text(self._config.asked), self._config.answered))
        replies: dict[str, list[tuple[Sequence[int], Sequence[int]]]] = {}
        for done, (name, entry) in enumerate(list(self._entries.items())):
            self._told(f"{self._model.name}: replies", done, len(self._entries) + 1)
            with self._leaving_out(name), Worker(entry.peer.kind, entry.options, entry.python) as worker:
                entry.version = worker.version
                said = [worker.ask("reply", prompt=prompt, tokens=tokens)["token_ids"] for prompt, tokens in asked]
                entry.files = (*worker.mapped_files(), *_files(Path(entry.options["path"])))
                entry.reply = tuple(said[-1])
                replies[name] = [(prompt, reply) for (prompt, _), reply in zip(asked, said, strict=True)]
        self._told(f"{self._model.name}: replies", len(self._entries), len(self._entries) + 1)
        verdicts = self._verdicts([pair for pairs in replies.values() for pair in pairs])
        if verdicts:
            for place, name in enumerate(replies):
                mine = verdicts[place * len(asked) : (place + 1) * len(asked)]
                self._entries[name].verdict = sum(mine, Agreement())

    def _verdicts(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Agreement]:
        """The agreement of prompts and replies; none where there is no reference."""
        if self._judge is None:
            return []
        try:
            return self._judge.verdicts(pairs)
        except BackendError as error:
            self._judge, self._unchecked = None, error.message
            return []

    def _text(self, tokens: int) -> list[int]:
        return text_of(self._prompts, tokens)

    @contextlib.contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        """An engine that stops is left out from here on, with its reason."""
        try:
            yield
        except BackendError as error:
            del self._entries[name]
            self._skipped[name] = error.message

    def _time_loading(self) -> None:
        """Starts every engine several times, in turns; its files are in the system's cache since its replies."""
        names = self._counting()
        turns = [name for repeat in range(self._config.repeats) for name in rotated(names, repeat)] if names else []
        for done, name in enumerate(turns):
            self._told(f"{self._model.name}: loading", done, len(turns))
            if name in self._entries:
                entry = self._entries[name]
                with self._leaving_out(name), Worker(entry.peer.kind, entry.options, entry.python) as worker:
                    self._loads.add(name, PREFILL, [worker.load_ms])

    def _time_tasks(self) -> None:
        """Visits every engine for every task in turns; the first visits warm up and are not counted."""
        config, names = self._config, self._counting()
        tasks: tuple[Task, ...] = (PREFILL, DECODE, *config.sizes)
        with contextlib.ExitStack() as stack:
            workers: dict[tuple[str, Task], Worker] = {}
            for name in names:
                with self._leaving_out(name):
                    self._start(stack, name, tasks, workers)
            names = [name for name in names if name in self._entries]
            order = list(visits(names, tasks, config.repeats + 1)) if names else []
            for done, (name, task) in enumerate(order):
                self._told(f"{self._model.name}: timing", done, len(order))
                if name not in self._entries:
                    continue
                with self._leaving_out(name):
                    times = self._visit(workers[name, task], task)
                    if done >= len(names) * len(tasks):
                        self._samples.add(name, task, times)
                    # The process of single passes is not the engine's own, where it has none.
                    self._entries[name].peak = workers[name, PREFILL].peak_bytes()

    def _start(
        self, stack: contextlib.ExitStack, name: str, tasks: Sequence[Task], workers: dict[tuple[str, Task], Worker]
    ) -> None:
        entry = self._entries[name]
        own = stack.enter_context(Worker(entry.peer.kind, entry.options, entry.python))
        passes = own
        if entry.peer.passes:
            passes = stack.enter_context(Worker(entry.peer.passes, entry.options, entry.python))
        workers |= {(name, task): own if isinstance(task, str) else passes for task in tasks}

    def _visit(self, worker: Worker, task: Task) -> list[float]:
        config = self._config
        if task == PREFILL:
            return [float(each) for each in worker.ask("prefill_times", prompt=self._text(config.prompt))]
        if task == DECODE:
            times = worker.ask("decode_times", tokens=config.reply, past=self._text(1))
            return [float(each) for each in times]
        past, tokens = self._text(config.past), self._text(config.past + int(task))[config.past :]
        return [float(each) for each in worker.ask("pass_times", tokens=tokens, past=past, count=_BURST)]

    def _counting(self) -> list[str]:
        return [name for name, entry in self._entries.items() if entry.counts]

    def _time_budgets(self) -> None:
        """A reply of every engine within every budget, in turns; what failed once is not tried again."""
        config, names = self._config, self._counting()
        if not config.budgets or not names:
            return
        self._limits = can_enforce()
        if self._limits:
            return
        turns = [(budget, name) for budget in config.budgets for name in names]
        total = config.rounds * len(turns)
        for turn in range(config.rounds):
            for place, (budget, name) in enumerate(rotated(turns, turn)):
                self._told(f"{self._model.name}: budgets", turn * len(turns) + place, total)
                runs = self._entries[name].limited.setdefault(budget, [])
                if not any(run.reason for run in runs):
                    runs.append(self._limited(self._entries[name], budget))

    def _limited(self, entry: _Entry, budget: int) -> LimitedRun:
        config = self._config
        options = {**entry.options, **({entry.peer.budget: budget} if entry.peer.budget else {})}
        prompt = self._text(config.asked)
        run = run_limited(
            entry.peer.kind,
            options,
            entry.python,
            budget=budget,
            prompt=prompt,
            tokens=config.answered,
            patience=config.patience,
            files=entry.files,
        )
        if run.reason or run.token_ids == entry.reply:
            return run
        for verdict in self._verdicts([(prompt, run.token_ids)]):
            if not verdict.good:
                return LimitedRun(f"wrong: {verdict.agreeing} of {verdict.tokens} tokens agree with the reference")
        return run

    def figures(self) -> ModelFigures:
        """All of it so far."""
        config = self._config
        engines = [self._engine_figures(name) for name in config.engines if name in (*self._entries, *self._skipped)]
        return ModelFigures(
            model=self._model.name,
            context=self._context,
            check=self._check_words(),
            limits=self._limits,
            tests=(f"pp{config.prompt}", f"tg{config.reply}"),
            sizes=config.sizes,
            budgets=config.budgets,
            engines=tuple(engines),
        )

    def _check_words(self) -> str:
        if self._unchecked:
            return f"Replies were not checked: {self._unchecked}."
        tokens = len(self._prompts) * _CHECKED + self._config.answered
        return (
            f"Greedy replies of {tokens} tokens to {len(self._prompts) + 1} prompts, read by transformers in float32: "
            f"a token agrees if its logit is no further below the highest than {self._model.tolerance:.0%} of the way "
            f"to the mean; below {LEAST_AGREEMENT:.0%} an engine's speed does not count."
        )

    def _engine_figures(self, name: str) -> EngineFigures:
        peer, weights = PEERS[name], PEERS[name].weights(self._model)
        if name in self._skipped:
            return EngineFigures(peer.label, weights=weights, skipped=self._skipped[name])
        entry, verdict, config = self._entries[name], self._entries[name].verdict, self._config
        tests: dict[str, tuple[Task, int]] = {
            f"pp{config.prompt}": (PREFILL, config.prompt),
            f"tg{config.reply}": (DECODE, config.reply),
        }
        return EngineFigures(
            engine=peer.label,
            version=entry.version,
            weights=weights,
            size=entry.size,
            load_ms=_spread(self._loads, name, PREFILL),
            rates={label: rate for label, (task, n) in tests.items() if (rate := _rate(self._samples, name, task, n))},
            passes={m: spread for m in config.sizes if (spread := _spread(self._samples, name, m))},
            peak_rss_bytes=entry.peak,
            agreement=verdict.share if verdict else None,
            checked=verdict.tokens if verdict else 0,
            same_tokens=verdict.good if verdict else None,
            budgets={budget: summary(runs) for budget, runs in entry.limited.items() if runs},
            note=peer.note,
        )


def _rate(samples: VisitTimes, name: str, task: Task, tokens: int) -> Spread | None:
    """Tokens per second of an engine's visits, each of so many tokens."""
    bursts = samples.bursts.get((name, task), [])
    return Spread.of([tokens / sum(burst) * 1e3 for burst in bursts]) if bursts else None


def _spread(samples: VisitTimes, name: str, task: Task) -> Spread | None:
    return samples.spread(name, task) if (name, task) in samples.bursts else None


def _files(path: Path) -> list[Path]:
    """A file, or all files in a folder."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
