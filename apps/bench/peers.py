"""`edgeinfer bench peers`: other engines on the same work, checked and then timed in turns."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, Progress, rotated
from edgeinfer.apps.bench.peers_engines import (
    ANSWERED,
    ASKED,
    PAST,
    PEERS,
    REFERENCE,
    SIZES,
    Participant,
    PeerModel,
    PeersOptions,
    run_limited,
)
from edgeinfer.apps.bench.processes import Worker, drop_cached, enclosure, files_in
from edgeinfer.apps.bench.render import Paragraph, Section, Table, commands, run_facts
from edgeinfer.core.errors import BackendError, UsageError
from edgeinfer.core.options import format_size

# The share of an engine's tokens that must agree with the reference for its speed to count.
LEAST_AGREEMENT = 0.8
# Tokens of checked replies, and passes of one size in a visit.
_CHECKED, _BURST = 16, 3
_MB = 10**6
_NO_GROUPS = "no control group can be made here, which takes Linux and the right to make one below one's own"
_DESCRIPTION = """\
The same work on edgeinfer, llama.cpp, onnxruntime-genai, OpenVINO GenAI and transformers, each in a process of its own
and, where it needs one, an environment of its own: loading, prompts (pp512), replies (tg128), passes over 1 and 4
tokens, memory, and replies inside memory limits that the system enforces. edgeinfer is given the limit; the others know
none. Engines take turns, and speed counts only where their replies are right. Small models have 8-bit weights, larger
ones 4-bit weights; transformers has floating point. Model files are made once and kept.

examples:
  edgeinfer bench peers --quick
  edgeinfer bench peers --python genai=GENAI/bin/python --python openvino=OPENVINO/bin/python --json peers.json
  edgeinfer bench peers --engines edgeinfer,llamacpp --models CHECKPOINT --budgets 300MB,400MB
"""


class PeersRun:
    """One model on all engines; `figures` can be called when the run is interrupted."""

    def __init__(self, model: PeerModel, config: PeersOptions, progress: Progress) -> None:
        self._model, self._config, self._progress = model, config, progress
        self._context = min(config.context, model.longest)
        if self._context < config.needed:
            message = f"{model.name} holds {model.longest} tokens, and what is timed takes {config.needed}."
            raise UsageError(message, "Give a shorter prompt (-p) and reply (-n), or another model.")
        self._prompts: list[list[int]] = []
        self._entries: dict[str, Participant] = {}
        self._skipped: dict[str, str] = {}
        self._unchecked = self._limits = ""

    def run(self) -> None:
        """Make files, check replies, then time loading, tasks, and replies inside memory limits."""
        self._prompts = self._model.prompts()
        for done, name in enumerate(self._config.engines):
            self._progress(f"{self._model.name}: model files", done, len(self._config.engines))
            self._prepare(name)
        self._unchecked = self._config.missing(REFERENCE)
        self._check()
        self._time_loading()
        self._time_tasks()
        self._time_budgets()

    def _options(self, name: str, path: Path) -> dict[str, Any]:
        sizes = {"threads": self._config.threads, "context": self._context}
        return {"path": str(path), **sizes, **PEERS[name].options}

    def _prepare(self, name: str) -> None:
        peer, python = PEERS[name], self._config.python(name)
        reason = self._config.missing(name)
        try:
            if not reason:
                path = peer.make(self._model, python)
                found = {"bytes": sum(file.stat().st_size for file in files_in(path)), "note": peer.note}
                self._entries[name] = Participant(name, python, self._options(name, path), found)
        except BackendError as error:
            reason = error.message
        if reason:
            self._skipped[name] = reason

    @contextlib.contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        """An engine that stops is left out from here on, with its reason."""
        try:
            yield
        except BackendError as error:
            del self._entries[name]
            self._skipped[name] = error.message

    def _text(self, tokens: int) -> list[int]:
        """The prompts, one after the other, again and again."""
        return list(islice(cycle([token for prompt in self._prompts for token in prompt]), tokens))

    def _check(self) -> None:
        """Have every engine reply, and the reference read the replies."""
        asked = [(prompt, _CHECKED) for prompt in self._prompts] + [(self._text(ASKED), ANSWERED)]
        replies: dict[str, list[list[int]]] = {}
        for done, (name, entry) in enumerate(list(self._entries.items())):
            self._progress(f"{self._model.name}: replies", done, len(self._entries) + 1)
            with self._leaving_out(name), entry.worker() as worker:
                entry.found["version"] = worker.version
                ask = worker.ask
                replies[name] = [ask("reply", prompt=prompt, tokens=tokens)["token_ids"] for prompt, tokens in asked]
                entry.reply = replies[name][-1]
                entry.files = [*worker.mapped_files(), *files_in(Path(entry.options["path"]))]
        pairs = [(prompt, reply) for each in replies.values() for (prompt, _), reply in zip(asked, each, strict=True)]
        verdicts = self._verdicts(pairs)
        for place, name in enumerate(replies if verdicts else ()):
            mine = verdicts[place * len(asked) : (place + 1) * len(asked)]
            agreeing, tokens = (sum(each) for each in zip(*mine, strict=True))
            entry = self._entries[name]
            entry.counts = agreeing >= LEAST_AGREEMENT * tokens
            entry.found |= {"agreement": agreeing / tokens, "checked_tokens": tokens, "same_tokens": entry.counts}

    def _verdicts(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[int, int]]:
        """How many tokens of each reply agree with the reference, and their number; none without a reference. The
        reference is given what the engine said before each token, so that one other token does not spoil the rest."""
        if self._unchecked or not pairs:
            return []
        try:
            options = self._options(REFERENCE, self._model.checkpoint())
            with Worker(REFERENCE, options, self._config.python(REFERENCE)) as worker:
                far = [worker.ask("judge", prompt=prompt, reply=reply) for prompt, reply in pairs]
        except BackendError as error:
            self._unchecked = error.message
            return []
        return [(sum(distance <= self._config.tolerance for distance in each), len(each)) for each in far]

    def _counting(self) -> list[str]:
        return [name for name, entry in self._entries.items() if entry.counts]

    def _time_loading(self) -> None:
        """Start every engine several times; its files are in the system's cache since its replies."""
        names, repeats = self._counting(), self._config.repeats
        turns = [name for repeat in range(repeats) for name in rotated(names, repeat)]
        for done, name in enumerate(turns):
            self._progress(f"{self._model.name}: loading", done, len(turns))
            if name in self._entries:
                with self._leaving_out(name), self._entries[name].worker() as worker:
                    self._entries[name].samples.setdefault("load_ms", []).append(worker.load_ms)

    def _time_tasks(self) -> None:
        """Visit every engine for every task in turns; the first visits warm up and are not counted."""
        config, names = self._config, self._counting()
        tasks = (f"pp{config.prompt}", f"tg{config.reply}", *(f"c({size})" for size in SIZES))
        with contextlib.ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for name in names:
                with self._leaving_out(name):
                    workers[name] = stack.enter_context(self._entries[name].worker())
            turns = [
                (repeat, name, task)
                for repeat in range(config.repeats + 1)
                for turn, task in enumerate(rotated(tasks, repeat))
                for name in rotated(names, repeat + turn)
                if task[:2] != "c(" or PEERS[name].passes
            ]
            for done, (repeat, name, task) in enumerate(turns):
                self._progress(f"{self._model.name}: timing", done, len(turns))
                if name in self._entries:
                    entry = self._entries[name]
                    with self._leaving_out(name):
                        figures = self._visit(workers[name], task)
                        entry.samples.setdefault(task, []).extend(figures if repeat else [])
                        entry.found["peak_rss_bytes"] = workers[name].peak_bytes()

    def _visit(self, worker: Worker, task: str) -> list[float]:
        """Tokens per second of a prompt or a reply, or milliseconds of passes."""
        config = self._config
        if task.startswith("pp"):
            return [1e3 * config.prompt / sum(worker.ask("prefill_times", prompt=self._text(config.prompt)))]
        if task.startswith("tg"):
            return [1e3 * config.reply / sum(worker.ask("decode_times", tokens=config.reply, past=self._text(1)))]
        past, size = self._text(PAST), int(task[2:-1])
        tokens = self._text(PAST + size)[PAST:]
        return [float(each) for each in worker.ask("pass_times", tokens=tokens, past=past, count=_BURST)]

    def _time_budgets(self) -> None:
        """A reply of every engine inside every limit, in turns; what failed once is not tried again."""
        config = self._config
        turns = [(budget, name) for budget in config.budgets for name in self._counting()]
        with enclosure() as place:
            self._limits = _NO_GROUPS if turns and place.kind != "cgroup" else ""
        if self._limits:
            return
        total = config.rounds * len(turns)
        for done, turn in enumerate(turn for round_ in range(config.rounds) for turn in rotated(turns, round_)):
            self._progress(f"{self._model.name}: budgets", done, total)
            budget, name = turn
            runs = self._entries[name].limited.setdefault(budget, [])
            if not any(run["reason"] for run in runs):
                runs.append(self._limited(self._entries[name], budget))

    def _limited(self, entry: Participant, budget: int) -> dict[str, Any]:
        """A reply inside a limit."""
        prompt, patience = self._text(ASKED), self._config.patience
        options = entry.options | ({"memory": budget} if PEERS[entry.name].budgeted else {})
        drop_cached(entry.files)
        reason, reply, peak = run_limited(entry.name, options, entry.python, budget, prompt, patience)
        run = {"tokens_per_second": None, "reason": reason, "peak_rss_bytes": peak}
        if reason:
            return run
        ids = reply["token_ids"]
        for agreeing, tokens in self._verdicts([(prompt, ids)] if ids != entry.reply else []):
            if agreeing < LEAST_AGREEMENT * tokens:
                return run | {"reason": f"wrong: {agreeing} of {tokens} tokens agree with the reference"}
        return run | {"tokens_per_second": (ANSWERED - 1) / reply["later_ms"] * 1e3}

    def figures(self) -> dict[str, Any]:
        """Everything so far, as JSON."""
        config = self._config
        tokens = len(self._prompts) * _CHECKED + ANSWERED
        check = (
            f"Greedy replies of {tokens} tokens to {len(self._prompts) + 1} prompts, read by transformers in float32: "
            f"a token agrees if its logit is at most {config.tolerance:.0%} of the way from the highest to the mean; "
            f"below {LEAST_AGREEMENT:.0%} an engine's speed does not count."
        )
        return {
            "model": self._model.name,
            "context": self._context,
            "check": f"Replies were not checked: {self._unchecked}." if self._unchecked else check,
            "limits": self._limits,
            "tests": [f"pp{config.prompt}", f"tg{config.reply}"],
            "engines": [self._engine(name) for name in config.engines if name in (*self._entries, *self._skipped)],
        }

    def _engine(self, name: str) -> dict[str, Any]:
        facts: dict[str, Any] = {"engine": PEERS[name].label, "weights": PEERS[name].weights(self._model)}
        facts |= {"skipped": self._skipped.get(name), "budgets": {}, "agreement": None, "same_tokens": None, "note": ""}
        if name in self._skipped:
            return facts
        entry = self._entries[name]
        medians = {task: statistics.median(times) for task, times in entry.samples.items() if times}
        passes = {task[2:-1]: medians.pop(task) for task in list(medians) if task.startswith("c(")}
        budgets = {str(budget): _summary(runs) for budget, runs in entry.limited.items() if runs}
        return {**facts, **entry.found, **medians, "c": passes, "budgets": budgets, "samples": entry.samples}


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of an engine's runs inside a limit; one that gave no reply speaks for all."""
    for run in runs:
        if run["reason"]:
            return run
    rate = statistics.median(run["tokens_per_second"] for run in runs)
    peak = max(run["peak_rss_bytes"] for run in runs)
    return {"tokens_per_second": rate, "reason": "", "peak_rss_bytes": peak}


def _run(options: PeersOptions, context: BenchContext) -> BenchResult:
    runs: list[PeersRun] = []
    finished = True
    try:
        for model in options.peer_models(context):
            runs.append(PeersRun(model, options, context.progress))
            runs[-1].run()
    except KeyboardInterrupt:
        finished = False
    settings = {name: getattr(options, name) for name in ("threads", "repeats", "rounds")}
    settings |= {"past": PAST, "budget_prompt": ASKED, "budget_reply": ANSWERED}
    return BenchResult(settings | {"models": [run.figures() for run in runs]}, finished)


def peers_section(data: Any) -> Section:
    """The engines on every model, and how fast they are in how little memory."""
    visits = f"{data['repeats']} to each test, {data['rounds']} processes at each budget"
    facts = (*run_facts(data), ("Threads", str(data["threads"])), ("Visits", visits))
    parts = tuple(part for model in data["models"] for part in _model_parts(model, data))
    return Section("Other engines", facts, parts, commands(data))


def _model_parts(model: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[Table | Paragraph]:
    timed = [engine for engine in model["engines"] if not engine["skipped"]]
    yield _speed_table(model, timed)
    if budgets := sorted({int(budget) for engine in timed for budget in engine["budgets"]}):
        rows = [(each["engine"], *(_cell(each["budgets"].get(str(b))) for b in budgets)) for each in timed]
        asked = f"a reply of {data['budget_reply']} tokens to {data['budget_prompt']}, all inside an enforced limit"
        yield Table(f"{model['model']}: tokens per second of {asked}", ("engine", *map(format_size, budgets)), rows)
    yield from map(Paragraph, _notes(model, timed, data))


def _speed_table(model: Mapping[str, Any], timed: Sequence[Mapping[str, Any]]) -> Table:
    sizes = sorted({int(size) for engine in timed for size in engine["c"]})
    figures = (*(f"{test} t/s" for test in model["tests"]), *(f"c({size}) ms" for size in sizes))
    rows = [
        (
            engine["engine"],
            engine["weights"],
            format_size(engine["bytes"]),
            _number(engine.get("load_ms"), 0),
            *(_number(engine.get(test), 1) for test in model["tests"]),
            *(_number(engine["c"].get(str(size)), 2) for size in sizes),
            _number(engine["peak_rss_bytes"] / _MB if "peak_rss_bytes" in engine else None, 0),
            "" if engine["agreement"] is None else f"{engine['agreement']:.0%}",
        )
        for engine in timed
    ]
    header = ("engine", "weights", "on disk", "load ms", *figures, "peak MB", "same tokens")
    return Table(f"{model['model']}, context of {model['context']} tokens", header, rows)


def _notes(model: Mapping[str, Any], timed: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> Iterator[str]:
    yield f"t/s: tokens per second. c(m): a pass over m new tokens after {data['past']}. Peak: resident memory."
    yield model["check"]
    versions = ", ".join(f"{engine['engine']} {engine['version']}" for engine in timed)
    yield f"Versions: {versions}."
    if model["limits"]:
        yield f"Speed within budgets was not measured: {model['limits']}."
    for engine in model["engines"]:
        name = engine["engine"]
        if engine["skipped"]:
            yield f"{name}: skipped: {engine['skipped'].rstrip('.')}."
            continue
        if engine["note"]:
            yield f"{name}: {engine['note']}."
        if engine["same_tokens"] is False:
            yield f"{name}: wrong, its speed does not count."
        reasons = {budget: found["reason"] for budget, found in engine["budgets"].items() if ":" in found["reason"]}
        yield from (f"{name} at {format_size(int(budget))}: {reason}." for budget, reason in reasons.items())


def _cell(figures: Mapping[str, Any] | None) -> str:
    """The rate, or in a word why there is none."""
    if figures is None:
        return ""
    rate = figures["tokens_per_second"]
    return str(figures["reason"]).partition(":")[0] if rate is None else f"{rate:.1f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


PEERS_BENCHMARK = Benchmark("peers", "other engines on the same work", _DESCRIPTION, PeersOptions, _run, peers_section)
