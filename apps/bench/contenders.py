"""What a comparison pits against each other: its settings, and for each engine the files and options it is given.

Knows nothing of how engines are started or timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.artifacts import LAYOUTS, Artifacts, BundleKind, Layout
from edgeinfer.apps.bench.shapes import Shape
from edgeinfer.apps.bench.timing import DECODE, PREFILL, Task
from edgeinfer.errors import BackendError, UsageError

__all__ = ["BITS", "ENGINES", "GROUP_SIZES", "CompareConfig", "Entry", "entries"]

ENGINES = ("edgeinfer", "llamacpp", "openvino", "genai")
BITS = (2, 4, 8)
GROUP_SIZES = (32, 64, 128)
LARGEST_PASS = 64
# What runs a layout.
_FAMILIES: dict[Layout, str] = {"native": "edgeinfer native", "portable": "edgeinfer MatMulNBits"}


@dataclass(frozen=True)
class CompareConfig:
    """What is compared.

    Attributes:
        shape: the models' sizes.
        threads: of every engine.
        past: tokens in the cache before each pass.
        repeats: visits to every engine and pass size.
        burst: timed passes per visit.
        decode_tokens: greedy steps per visit.
        sizes: new tokens per pass; 1 is always among them, as the ratios' base.
        prefill: tokens of a prompt that is taken in whole; 0 leaves that out.
        prefill_chunk: tokens per pass of edgeinfer's prompts; the other engines have their own.
        engines: which of `ENGINES`.
        layouts, bits, group_sizes: a bundle of each combination is timed. The GGUF file has 4 bits and groups of 32.
        exact: edgeinfer's exact mode on, off, or one after the other.
        symmetric: bundles without zero points, as Q4_0.
        head_bits: of edgeinfer's embedding and head; None is those of the layers. The GGUF file has 4.
    """

    shape: Shape
    threads: int = 1
    past: int = 128
    repeats: int = 7
    burst: int = 3
    decode_tokens: int = 8
    sizes: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 32)
    prefill: int = 512
    prefill_chunk: int = 64
    engines: tuple[str, ...] = ENGINES
    layouts: tuple[Layout, ...] = LAYOUTS
    bits: tuple[int, ...] = (4,)
    group_sizes: tuple[int, ...] = (128,)
    exact: tuple[bool, ...] = (True,)
    symmetric: bool = True
    head_bits: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(sorted({1, *self.sizes})))
        for name in ("threads", "past", "repeats", "burst", "decode_tokens", "prefill_chunk"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}.")
        within = self.sizes[0] >= 1 and self.sizes[-1] <= LARGEST_PASS
        _require(within, f"Pass sizes must lie between 1 and {LARGEST_PASS}.")
        _require(self.prefill >= 0, f"prefill must be 0 or more, not {self.prefill}.")
        for name, known in (("engines", ENGINES), ("layouts", LAYOUTS), ("bits", BITS), ("group_sizes", GROUP_SIZES)):
            chosen = getattr(self, name)
            _require(bool(chosen) and set(chosen) <= set(known), f"{name} are {', '.join(map(str, known))}.")
        _require(
            self.context <= self.shape.max_position,
            f"{self.shape.name} holds no more than {self.shape.max_position} tokens.",
        )

    @property
    def context(self) -> int:
        """Tokens of cache every engine is given: the longest visit, rounded up to llama.cpp's multiple of 256."""
        needed = max(self.past + max(*self.sizes, self.decode_tokens + 1), self.prefill)
        return -(-needed // 256) * 256

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What each repeat times, in the order of the report."""
        return (DECODE, *self.sizes, *((PREFILL,) if self.prefill else ()))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message, "See --help.")


@dataclass(frozen=True)
class Entry:
    """An engine to start.

    Attributes:
        label: its name in the report.
        family: what runs it, which several entries may share.
        engine: a key of worker.ENGINES.
        path: what it loads.
        options: arguments of that engine beside the path.
        python: the interpreter that has it; None is this one.
    """

    label: str
    family: str
    engine: str
    path: Path
    options: dict[str, Any] = field(default_factory=dict)
    python: str | None = None


def entries(
    config: CompareConfig, artifacts: Artifacts, pythons: Mapping[str, str], skipped: dict[str, str]
) -> Iterator[Entry]:
    """The engines to start, with their model files built; those that cannot be are put in `skipped` with the reason.

    Args:
        pythons: interpreters by the engine they have; other engines are looked for in this one.
        skipped: reasons by family; a family that is in it already is left out.
    """
    if "edgeinfer" in config.engines:
        for kind in _kinds(config):
            if _FAMILIES[kind.layout] not in skipped:
                yield from _edgeinfer(config, artifacts, kind)
    if "llamacpp" in config.engines:
        missing = [name for name in ("llama_cpp", "gguf") if find_spec(name) is None]
        if missing:
            skipped["llamacpp"] = f"{' and '.join(missing)} not installed (extra: edgeinfer[gguf])"
        else:
            yield Entry("llama.cpp Q4_0", "llama.cpp", "llamacpp", artifacts.gguf())
    foreign = (
        ("openvino", "openvino", "OpenVINO int4 g128", artifacts.openvino),
        ("genai", "onnxruntime_genai", "genai int4 g32", artifacts.genai),
    )
    for engine, module, label, make in foreign:
        if engine not in config.engines:
            continue
        if engine not in pythons and find_spec(module) is None:
            skipped[engine] = f"{module} not installed here; name its interpreter with --{engine}-python"
            continue
        try:
            path = make(pythons.get(engine))
        except BackendError as error:
            skipped[engine] = error.message
            continue
        yield Entry(label, engine, engine, path, python=pythons.get(engine))


def _kinds(config: CompareConfig) -> Iterator[BundleKind]:
    for bits in config.bits:
        for group_size in config.group_sizes:
            for layout in config.layouts:
                yield BundleKind(layout, bits, group_size, config.head_bits, config.symmetric)


def _edgeinfer(config: CompareConfig, artifacts: Artifacts, kind: BundleKind) -> Iterator[Entry]:
    """A bundle once per mode."""
    path, family = artifacts.bundle(kind), _FAMILIES[kind.layout]
    bits = "" if config.bits == (4,) else f"{kind.bits}-bit "
    for exact in config.exact:
        label = f"{family} {bits}g{kind.group_size} {'exact' if exact else 'fast'}"
        options = {"native": kind.layout == "native", "exact": exact, "prefill_chunk": config.prefill_chunk}
        yield Entry(label, family, "edgeinfer", path, options)
