"""`edgeinfer bench peers`: other engines on the same work."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, names, option
from edgeinfer.apps.bench.model_files import default_folder
from edgeinfer.apps.bench.peers_engines import BUILTIN, PeerModel, builtin_model, checkpoint_model, shape_model
from edgeinfer.apps.bench.peers_engines import PEERS as ENGINES
from edgeinfer.apps.bench.peers_figures import BUDGETS, PeersConfig, peers_json, peers_section
from edgeinfer.apps.bench.peers_run import PeersRun
from edgeinfer.apps.bench.render import section_markdown
from edgeinfer.config import parse_size
from edgeinfer.errors import UsageError

_DESCRIPTION = """\
The same work on edgeinfer, llama.cpp, onnxruntime-genai, OpenVINO GenAI and transformers, each in a process of its own
and, where it needs one, an environment of its own: loading, prompts (pp512), replies (tg128), passes over 1 and 4
tokens, memory, and replies inside memory limits that the system enforces. edgeinfer is told the limit; the others know
none. Engines take turns, and speed counts only where their replies are right. What is not installed is left out.

The built-in model has 8-bit weights in every engine, models of a shape random ones of 4 bits; transformers has floating
point. Where edgeinfer's default groups are larger than llama.cpp's 32, it is measured with 32 as well. Model files are
made once and kept; those of qwen2.5-0.5b take 6 GB.

examples:
  edgeinfer bench peers --quick
  edgeinfer bench peers --python genai=GENAI/bin/python --python openvino=OPENVINO/bin/python --json peers.json
  edgeinfer bench peers --engines edgeinfer,llamacpp --models qwen2.5-0.5b --budgets 300MB,400MB
"""
_MODELS = ("tales", "qwen2.5-0.5b")
_COMPARED, _TIMED = "what is compared", "what is timed"
_PROBE, _PROBE_SECONDS = "print('it runs')", 60


def _python(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UsageError(
            f"--python {text!r} does not name an engine and its interpreter.", "Write --python genai=PATH."
        )
    return name, path


def _budgets(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    return tuple(parse_size(f"{part}MB" if part.isdecimal() else part) for part in names(text))


@dataclass(frozen=True)
class PeersOptions:
    """Which engines are compared on which models, and what is timed.

    Attributes:
        models: names; None is the default ones, or none beside a checkpoint.
        pythons: names of engines and their interpreters.
        quick: whether everything is done once.
    """

    engines: tuple[str, ...] = option(
        "--engines LIST",
        default=tuple(ENGINES),
        group=_COMPARED,
        help="some of: " + ", ".join(ENGINES) + " (default: all)",
    )
    models: tuple[str, ...] | None = option(
        "--models LIST",
        default=None,
        help=f"tales, the built-in model, and names of shapes, whose weights are random (default: {','.join(_MODELS)})",
    )
    checkpoint: Path | None = option(
        "--checkpoint PATH",
        rare=True,
        default=None,
        help="trained checkpoint (Hugging Face, safetensors) in addition to --models, or instead of its default",
    )
    pythons: tuple[tuple[str, str], ...] = option(
        "--python ENGINE=PATH",
        default=(),
        action="append",
        type=_python,
        help="Python interpreter that has an engine; can be repeated",
    )
    threads: int = option("-t", "--threads N", default=1, help="number of threads for every engine")
    context: int = option("-c", "--context N", default=1024, help="context window in tokens")
    prompt: int = option("-p", "--n-prompt N", default=512, group=_TIMED, help="prompt length in tokens")
    reply: int = option("-n", "--n-gen N", default=128, help="reply length in tokens")
    budgets: tuple[int, ...] = option(
        "--budgets LIST",
        default=BUDGETS,
        type=_budgets,
        help="comma-separated memory limits, such as 250MB, or 250 in megabytes; none skips them (default: "
        "250,350,500,700,1000)",
    )
    repeats: int = option("--repeats N", default=5, help="number of starts and measurements per engine and test")
    rounds: int = option("--rounds N", rare=True, default=3, help="number of processes per engine and budget")
    patience: float = option(
        "--patience SECONDS",
        rare=True,
        default=120.0,
        help="time limit for a process within a budget",
    )
    quick: bool = option("--quick", default=False, help="measure everything once, for a rough impression")
    work: Path | None = option("--work PATH", rare=True, default=None, group="files", help="folder for model files")

    @property
    def config(self) -> PeersConfig:
        """The settings of every run; UsageError where they make no sense."""
        return PeersConfig(
            engines=self.engines,
            pythons=dict(self.pythons),
            threads=self.threads,
            context=self.context,
            prompt=self.prompt,
            reply=self.reply,
            budgets=self.budgets,
            repeats=1 if self.quick else self.repeats,
            rounds=1 if self.quick else self.rounds,
            patience=self.patience,
        )

    def peer_models(self, context: BenchContext) -> list[PeerModel]:
        """What engines are compared on."""
        work = self.work or default_folder()
        wanted = self.models if self.models is not None else () if self.checkpoint else _MODELS
        models = [
            builtin_model(work, context.resolve(None)) if name == BUILTIN else shape_model(work, name)
            for name in wanted
        ]
        if self.checkpoint:
            models.append(checkpoint_model(work, self.checkpoint))
        if not models:
            raise UsageError("There is no model to compare engines on.", f"Give --models {','.join(_MODELS)}.")
        return models


def _run(options: PeersOptions, context: BenchContext) -> BenchResult:
    config, models = options.config, options.peer_models(context)
    for _, path in options.pythons:
        _require_interpreter(path)
    runs: list[PeersRun] = []
    finished = True
    try:
        for model in models:
            runs.append(PeersRun(model, config, context.progress))
            runs[-1].run()
    except KeyboardInterrupt:
        finished = False
    return BenchResult(peers_json([run.figures() for run in runs], config), finished)


def _require_interpreter(path: str) -> None:
    """Refuses what does not run Python, before anything is made for it."""
    hint = "Give the python of an environment that has the engine."
    command = [path, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"Cannot run {path}: {getattr(error, 'strerror', None) or 'it does not end'}.", hint
        ) from error
    if done.stdout.strip() != "it runs":
        raise UsageError(f"{path} is no Python interpreter.", hint)


PEERS = Benchmark(
    "peers",
    "other engines on the same work",
    _DESCRIPTION,
    PeersOptions,
    _run,
    peers_section,
    text=lambda options, data: section_markdown(peers_section(data)),
)
