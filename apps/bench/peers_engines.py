"""The engines of `edgeinfer bench peers`, the options of the command, and models in the engines' formats."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.benchmark import BenchContext, names, option
from edgeinfer.apps.bench.devices import write_bundle_checkpoint
from edgeinfer.apps.bench.processes import (
    ENGINES_SCRIPT,
    Worker,
    child_environment,
    enclosure,
    engine_environment,
    set_limit,
    watch,
)
from edgeinfer.apps.bench.texts import builtin_prompts, tokenize_prompts
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.writing import digest_of
from edgeinfer.core.errors import BackendError, CheckpointError, Setting, UsageError
from edgeinfer.core.options import parse_size

BUILTIN = "tales"
# llama.cpp's types with as many bits as our bundles, and the values that share a scale in the others' formats.
_GGUF, _GROUP = {4: "Q4_0", 8: "Q8_0"}, 32
# Bytes of a checkpoint from which on its models get 4 bits.
_LARGE = 200e6
# Prompts of checked replies, and their tokens at most.
_PROMPTS, _PROMPT_TOKENS = 6, 128
# Tokens in the cache before a pass that is timed, and sizes of such passes.
PAST, SIZES = 128, (1, 4)
# Tokens of the prompt and of the reply that is timed inside a memory limit.
ASKED, ANSWERED = 128, 64
# Has OpenVINO GenAI convert a GGUF file; the model is saved in the file's folder.
_CONVERT = "import sys, openvino_genai as g; g.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"


class PeerModel:
    """The built-in model, or a checkpoint, in the formats of all engines; files are made once and kept."""

    def __init__(self, folder: Path, source: Path, builtin: bool) -> None:
        weights = source / ("weights.bin" if builtin else "model.safetensors")
        if not builtin and not (weights.is_file() and (source / "config.json").is_file()):
            hint = "Give a folder with config.json and model.safetensors."
            raise CheckpointError(f"{source} is no checkpoint in one file.", hint)
        self.name = BUILTIN if builtin else source.resolve().name
        self.bits = 8 if builtin or weights.stat().st_size < _LARGE else 4
        self._source, self._builtin = source, builtin
        self._folder = folder.expanduser().resolve() / f"{self.name}-{digest_of(weights)[:8]}"
        if builtin:
            self.longest = open_bundle(source).manifest.geometry.max_positions
        else:
            config = json.loads((source / "config.json").read_text("utf-8"))
            self.longest = int(config.get("max_position_embeddings", 0))

    def checkpoint(self) -> Path:
        """A Hugging Face checkpoint; of the built-in model with its weights multiplied out."""
        if not self._builtin:
            return self._source
        return self._make("checkpoint", lambda path: write_bundle_checkpoint(open_bundle(self._source), path))

    def bundle(self) -> Path:
        """edgeinfer's bundle."""
        if self._builtin:
            return self._source
        return self._export(f"bundle-{self.bits}", ["--bits", str(self.bits), "--symmetric"])

    def gguf(self) -> Path:
        """llama.cpp's file."""
        kind = _GGUF[self.bits]
        return self._export(f"gguf-{kind.lower()}", ["--format", "gguf", "--type", kind]) / "model.gguf"

    def genai(self, python: str | None) -> Path:
        """onnxruntime-genai's folder, made by its own builder, which needs torch and transformers."""

        def build(path: Path) -> None:
            checkpoint, cache = str(self.checkpoint()), self._folder / "genai-cache"
            command = [python or sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", checkpoint]
            command += ["-i", checkpoint, "-o", str(path), "-p", f"int{self.bits}", "-e", "cpu", "-c", str(cache)]
            command += ["--extra_options", f"block_size={_GROUP}", "accuracy_level=4"]
            # Run in a folder whose modules do not hide the builder's.
            _run(command, engine_environment(python), cwd=self._folder)
            shutil.rmtree(cache, ignore_errors=True)

        return self._make(f"genai-{self.bits}", build)

    def openvino(self, python: str | None) -> Path:
        """The folder that OpenVINO GenAI's pipeline makes of the GGUF file, next to a link to it."""

        def convert(path: Path) -> None:
            path.mkdir()
            link = path / "model.gguf"
            link.symlink_to(self.gguf())
            _run([python or sys.executable, "-c", _CONVERT, str(link)], engine_environment(python))
            link.unlink()

        return self._make(f"openvino-{self.bits}", convert)

    def prompts(self) -> list[list[int]]:
        """Token ids of a few short texts."""
        with edgeinfer.load(self.bundle(), speculation="off", remember=False) as model:
            tokenized = tokenize_prompts(model, builtin_prompts(2), _PROMPT_TOKENS // 2)
        return [list(each.ids)[-_PROMPT_TOKENS:] for each in tokenized[:_PROMPTS]]

    def _export(self, name: str, options: Sequence[str]) -> Path:
        command = [sys.executable, "-m", "edgeinfer", "export", str(self.checkpoint())]
        options = [*options, "--name", self.name, "--force"]
        return self._make(name, lambda path: _run([*command, str(path), *options], child_environment()))

    def _make(self, name: str, write: Callable[[Path], None]) -> Path:
        """Write under another name and rename, so that an interrupted run leaves nothing to be mistaken for a model."""
        target = self._folder / name
        if not target.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            write(partial)
            partial.replace(target)
        return target


def _run(command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> None:
    """Run a program that makes a model."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
        raise BackendError(f"{command[2]} failed: {reason}", "Install what it names, or run it alone to see more.")


@dataclass(frozen=True)
class PeerEngine:
    """An engine."""

    label: str  # its name in tables
    module: str  # the package that has to be installed
    make: Callable[[PeerModel, str | None], Path]  # its model files, given the interpreter that has the engine
    weights: Callable[[PeerModel], str]  # what these hold, in the engine's own words
    options: Mapping[str, Any] = field(default_factory=dict)  # of `engines`, besides path, threads and context
    budgeted: bool = False  # whether it takes a memory budget, by the option `memory`
    passes: tuple[int, ...] = SIZES  # sizes of passes that it can run
    note: str = ""  # shown with its figures


def _groups(model: PeerModel) -> str:
    return f"int{model.bits} g{_GROUP}"


# By the names in `engines.ENGINES`. edgeinfer decodes plainly like the others, and leaves nothing to later processes.
PEERS: dict[str, PeerEngine] = {
    "edgeinfer": PeerEngine(
        "edgeinfer",
        "edgeinfer",
        lambda model, python: model.bundle(),
        lambda model: f"int{model.bits}",
        options={"speculation": "off", "remember": False},
        budgeted=True,
    ),
    "llamacpp": PeerEngine(
        "llama.cpp", "llama_cpp", lambda model, python: model.gguf(), lambda model: _GGUF[model.bits]
    ),
    "genai": PeerEngine("onnxruntime-genai", "onnxruntime_genai", PeerModel.genai, _groups),
    "openvino": PeerEngine(
        "OpenVINO GenAI",
        "openvino_genai",
        PeerModel.openvino,
        lambda model: _GGUF[model.bits],
        passes=(),
        note="loads the model that it made of the GGUF file; its pipeline has no passes over several tokens",
    ),
    "transformers": PeerEngine(
        "transformers", "transformers", lambda model, python: model.checkpoint(), lambda model: "float32"
    ),
}
# The engine that judges the replies of the others.
REFERENCE = "transformers"


def _python(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        message = f"--python {text!r} does not name an engine and its interpreter."
        raise UsageError(message, "Write --python genai=PATH.")
    return name, path


def _budgets(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    return tuple(parse_size(f"{part}MB" if part.isdecimal() else part) for part in names(text))


@dataclass(frozen=True)
class PeersOptions:
    """Engines to compare, on which models, and what is timed."""

    engines: tuple[str, ...] = option(
        "--engines LIST",
        default=tuple(PEERS),
        group="what is compared",
        help="some of: " + ", ".join(PEERS) + " (default: all)",
    )
    models: tuple[str, ...] = option(
        "--models LIST",
        default=(BUILTIN,),
        help="tales, the built-in model, and folders of checkpoints (Hugging Face, in one safetensors file)",
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
    prompt: int = option("-p", "--n-prompt N", default=512, group="what is timed", help="prompt length in tokens")
    reply: int = option("-n", "--n-gen N", default=128, help="reply length in tokens")
    budgets: tuple[int, ...] = option(
        "--budgets LIST",
        default=tuple(size * 10**6 for size in (250, 350, 500, 700, 1000)),
        type=_budgets,
        help="comma-separated memory limits, such as 250MB, or 250 in megabytes; none skips them (default: "
        "250,350,500,700,1000)",
    )
    repeats: int = option("--repeats N", default=5, help="number of starts and measurements per engine and test")
    rounds: int = option("--rounds N", rare=True, default=3, help="number of processes per engine and budget")
    patience: float = option(
        "--patience SECONDS", rare=True, default=120.0, help="time limit for a process within a budget"
    )
    tolerance: float = option(
        "--tolerance X",
        rare=True,
        default=0.02,
        help="how far below the highest a token's logit may be, of the way to the mean, to count as the same token; "
        "random weights need 0.5",
    )
    quick: bool = option("--quick", default=False, help="measure everything once, for a rough impression")
    work: Path | None = option("--work PATH", rare=True, default=None, group="files", help="folder for model files")

    def __post_init__(self) -> None:
        if self.quick:
            object.__setattr__(self, "repeats", 1)
            object.__setattr__(self, "rounds", 1)
        for name in (*self.engines, *dict(self.pythons)):
            if name not in PEERS:
                raise UsageError(f"Unknown engine {name!r}.", f"Known engines: {', '.join(PEERS)}.")
        for name in ("threads", "prompt", "reply", "repeats", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(Setting(name, getattr(self, name)) + " is out of range.", "Give 1 or more.")
        if self.patience <= 0:
            raise UsageError(Setting("patience", self.patience) + " is out of range.", "Give more than 0 seconds.")
        if self.context < self.needed:
            message = f"A context of {self.context} tokens is too small: what is timed takes {self.needed}."
            raise UsageError(message, "Give a larger one (-c), or a shorter prompt (-p) and reply (-n).")

    @property
    def needed(self) -> int:
        """Tokens of context that what is timed takes."""
        return max(self.prompt, self.reply + 3, PAST + max(SIZES), ASKED + ANSWERED) + 1

    def python(self, name: str) -> str | None:
        """The interpreter that was named for an engine."""
        return dict(self.pythons).get(name)

    def missing(self, name: str) -> str:
        """Why an engine cannot run here; empty if it can, or if an interpreter was named for it."""
        module = PEERS[name].module
        if self.python(name) is not None or find_spec(module) is not None:
            return ""
        return f"{module} is not installed here; name an interpreter that has it: --python {name}=PATH"

    def peer_models(self, context: BenchContext) -> list[PeerModel]:
        """The models to compare on."""
        work = self.work or Path.home() / ".cache" / "edgeinfer" / "bench"
        builtin = context.resolve(None)
        return [PeerModel(work, builtin if name == BUILTIN else Path(name), name == BUILTIN) for name in self.models]


@dataclass
class Participant:
    """An engine that takes part, and its figures so far; `counts` says whether its speed does."""

    name: str
    python: str | None
    options: dict[str, Any]
    found: dict[str, Any]
    samples: dict[str, list[float]] = field(default_factory=dict)
    limited: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    reply: list[int] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    counts: bool = True

    def worker(self) -> Worker:
        """The engine in a process of its own."""
        return Worker(self.name, self.options, self.python)


def run_limited(
    name: str, options: Mapping[str, Any], python: str | None, budget: int, prompt: Sequence[int], patience: float
) -> tuple[str, dict[str, Any], int]:
    """Load an engine and have it reply, all inside a control group of so many bytes: why there is no reply (empty if
    there is one), the reply, and the peak of the process."""
    requests = [{"kind": name, **options}, {"kind": "reply", "prompt": list(prompt), "tokens": ANSWERED}]
    with enclosure() as place:
        set_limit(place.limit, budget)
        command = place.command([python or sys.executable, str(ENGINES_SCRIPT)])
        stdin = "".join(json.dumps(request) + "\n" for request in requests)
        ended = watch(command, engine_environment(python), stdin, patience)
        killed = place.killed()
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    refused = next((answer["error"] for answer in answers if "error" in answer), "")
    if ended.late:
        reason = f"over {patience:g} s"
    elif refused:
        reason = f"refused: {refused}"
    elif killed or ended.returncode < 0:
        reason = "killed"
    else:
        reason = "" if ended.returncode == 0 and len(answers) == len(requests) else f"failed: {ended.reason}"
    return reason, {} if reason else answers[-1]["answer"], ended.peak_rss
