"""Ways to make a model smaller that are compared with it: weights, caches, layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.model_files import LAYOUTS
from edgeinfer.config import KV_TYPES
from edgeinfer.errors import UsageError

# Names for people and options of the export command.
WIDTHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "32": ("32 bits", ("--bits", "32")),
    "8": ("8 bits", ("--bits", "8", "--asymmetric")),
    "4": ("4 bits", ("--bits", "4", "--asymmetric")),
    "4small": ("4 bits, small layers too", ("--bits", "4", "--asymmetric", "--no-keep-small")),
    "2": ("2 bits", ("--bits", "2", "--asymmetric")),
    "2small": ("2 bits, small layers too", ("--bits", "2", "--asymmetric", "--no-keep-small")),
}
_LAYOUTS = {"native": "native kernel", "portable": "onnxruntime's operators"}
# Stands for the calibration text's file in options of the export command.
CALIBRATION = "{calibration}"
_CALIBRATED = ("--calibration", CALIBRATION)
# Methods that look at no text.
DATA_FREE = frozenset({"rtn"})
_FLOAT_CACHE = "float32"
# What a built-in model can be compared in without a checkpoint.
_BUILTIN_CACHES = ("int8", "int4")


@dataclass(frozen=True)
class Variant:
    """One way to have a model.

    Attributes:
        scheme: its weights, for people; the same for variants that differ in `layout` or `kv` alone.
        source: bundle, GGUF file or hub id, None for the built-in model; with `export`, a checkpoint.
        export: options of the export command; None where `source` is loaded as it is.
        layout: of the weights; None is the best there is.
        kv: numbers of the cache; None is floats.
    """

    scheme: str
    source: str | None
    export: tuple[str, ...] | None = None
    layout: str | None = None
    kv: str | None = None

    @property
    def label(self) -> str:
        """For people."""
        layout = [_LAYOUTS[self.layout]] if self.layout else []
        return ", ".join([self.scheme, *layout, *([f"{self.kv} cache"] if self.kv else [])])

    @property
    def load(self) -> dict[str, Any]:
        """Options of `edgeinfer.load`."""
        kv = {} if self.kv is None else {"kv": self.kv}
        return kv if self.layout is None else kv | {"native": self.layout == "native"}


@dataclass(frozen=True)
class Family:
    """Variants that are compared with one reference.

    Attributes:
        reference: of floats where there are such; None is compared with nothing.
    """

    model: str
    reference: Variant
    variants: tuple[Variant, ...]


def builtin_family(caches: Sequence[str] = _BUILTIN_CACHES) -> Family:
    """The built-in model as it is, with quantized caches, and on onnxruntime's own operators."""
    scheme = "as built in"
    others = [Variant(scheme, None, kv=kv) for kv in _known_caches(caches)]
    others.append(Variant(scheme, None, layout="portable"))
    return Family("tales", Variant(scheme, None), tuple(others))


def given_family(models: Sequence[str], reference: str | None, caches: Sequence[str]) -> Family:
    """Models as they are, compared with a reference, which is the first of them if none is given."""
    named = {model: Path(model).name or model for model in [*models, *([reference] if reference else [])]}
    if len(set(named.values())) < len(named):
        named = {model: model for model in named}
    first = reference or models[0]
    plain = [Variant(named[model], model) for model in models if model != first]
    quantized = [Variant(named[m], m, kv=kv) for m, kv in itertools.product(models, _known_caches(caches))]
    return Family(named[first], Variant(named[first], first), (*plain, *quantized))


def checkpoint_family(
    checkpoint: Path,
    widths: Sequence[str],
    *,
    budgets: Sequence[float] = (),
    methods: Sequence[str | None] = (None,),
    types: Sequence[str] = (),
    caches: Sequence[str] = (),
    group_sizes: Sequence[int | None] = (None,),
    layouts: Sequence[str | None] = (None,),
) -> Family:
    """A checkpoint in float32, which the others are compared with, and in fewer bits.

    Args:
        budgets: mean bits per weight, which an integer programme spends by a calibration text.
        methods: of quantizing each width; None is the exporter's choice.
    """
    for name, chosen, known in (("width", widths, [*WIDTHS]), ("layout", layouts, [*LAYOUTS, None])):
        for unknown in [each for each in chosen if each not in known]:
            raise UsageError(f"There is no {name} {unknown!r}.", f"Choose of {', '.join(str(k) for k in known if k)}.")
    path = str(checkpoint)
    exported = [
        *_of_widths(path, widths, methods, group_sizes, layouts),
        *_of_budgets(path, budgets, layouts),
        *(Variant(kind, path, ("--format", "gguf", "--type", kind, *_CALIBRATED)) for kind in types),
    ]
    first = exported[0] if exported else _float32(path)
    quantized = [Variant(first.scheme, path, first.export, first.layout, kv) for kv in _known_caches(caches)]
    return Family(checkpoint.name, _float32(path), (*exported, *quantized))


def _float32(checkpoint: str) -> Variant:
    scheme, options = WIDTHS["32"]
    return Variant(scheme, checkpoint, options)


def _of_widths(
    checkpoint: str,
    widths: Sequence[str],
    methods: Sequence[str | None],
    group_sizes: Sequence[int | None],
    layouts: Sequence[str | None],
) -> Iterator[Variant]:
    for width, method, group, layout in itertools.product(widths, methods, group_sizes, layouts):
        scheme, options = WIDTHS[width]
        if width == "32":
            continue  # the reference
        if method:
            calibrated = () if method in DATA_FREE else _CALIBRATED
            scheme, options = f"{scheme}, {method}", (*options, "--method", method, *calibrated)
        if group:
            scheme, options = f"{scheme}, groups of {group}", (*options, "--group-size", str(group))
        yield Variant(scheme, checkpoint, (*options, *_portable(layout)), layout)


def _of_budgets(checkpoint: str, budgets: Sequence[float], layouts: Sequence[str | None]) -> Iterator[Variant]:
    for budget, layout in itertools.product(budgets, layouts):
        options = ("--budget-bits", f"{budget:g}", *_CALIBRATED)
        yield Variant(f"budget of {budget:g} bits", checkpoint, (*options, *_portable(layout)), layout)


def _portable(layout: str | None) -> tuple[str, ...]:
    return ("--portable",) if layout == "portable" else ()


def _known_caches(caches: Sequence[str]) -> list[str]:
    for unknown in [each for each in caches if each not in KV_TYPES]:
        raise UsageError(f"There is no cache {unknown!r}.", f"Choose of {', '.join(KV_TYPES)}.")
    return [kv for kv in caches if kv != _FLOAT_CACHE]
