"""Ways to make a model smaller, ours and llama.cpp's, as a table's rows; knows nothing of how they are measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgeinfer.errors import UsageError
from edgeinfer.export.gguf.file_types import NEEDS_IMPORTANCE

__all__ = ["BundleSubject", "GgufSubject", "SimulatedSubject", "Subject", "budgeted", "gguf_subjects", "uniform"]

# Of edgeinfer's methods, those that look at a calibration text.
_DATA_FREE = frozenset({"rtn", "hqq"})


@dataclass(frozen=True)
class BundleSubject:
    """An export of edgeinfer's.

    Attributes:
        method: a quantizer of edgeinfer.quant.
        bits: of the layers; None where a budget decides.
        budget: mean bits per weight over everything; None where bits are given.
        group_size, symmetric, head_bits: None is the exporter's choice, for each matrix where it has a budget.
        calibrated: whether it is given the calibration text.
    """

    method: str
    bits: int | None = None
    budget: float | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    head_bits: int | None = None
    calibrated: bool = False

    @property
    def engine(self) -> str:
        """Whose it is."""
        return "edgeinfer"

    @property
    def label(self) -> str:
        """For people."""
        width = f"{self.bits} bits" if self.budget is None else f"budget {self.budget:g}"
        details = [
            *([f"block {self.group_size}"] if self.group_size else []),
            *(["symmetric"] if self.symmetric else []),
            *([f"head {self.head_bits}"] if self.head_bits else []),
            *(["calibrated"] if self.calibrated and self.method in _DATA_FREE else []),
        ]
        return ", ".join([f"{self.method} {width}", *details])

    def options(self, calibration: Sequence[str]) -> list[str]:
        """Of the export command; `calibration` are those that name the calibration text."""
        options = ["--method", self.method, "--no-kv-scales"]
        options += [] if self.symmetric is None else ["--symmetric" if self.symmetric else "--asymmetric"]
        # Every layer of a small model is small: its bits are meant.
        options += ["--bits", str(self.bits), "--no-keep-small"] if self.budget is None else []
        options += [] if self.budget is None else ["--budget-bits", str(self.budget)]
        options += [] if self.group_size is None else ["--group-size", str(self.group_size)]
        options += [] if self.head_bits is None else ["--head-bits", str(self.head_bits)]
        return options + (list(calibration) if self.calibrated else [])


@dataclass(frozen=True)
class GgufSubject:
    """A file type of llama.cpp's, with or without importance data.

    Attributes:
        chosen: the types of tensors are edgeinfer's choice, for as many bytes as the type takes.
    """

    kind: str
    importance: bool
    chosen: bool = False

    @property
    def engine(self) -> str:
        """Whose it is."""
        return "edgeinfer" if self.chosen else "llama.cpp"

    @property
    def label(self) -> str:
        """For people."""
        return self.kind + ("'s size, types chosen" if self.chosen else ", imatrix" if self.importance else "")


@dataclass(frozen=True)
class SimulatedSubject:
    """A form that no backend runs, as `edgeinfer.export.simulation` makes it.

    Attributes:
        form: "uniform" or "codebook".
        group: values of a block, or rows that share a codebook.
        method: of uniform forms; codebooks have one of their own.
    """

    form: str
    bits: int
    group: int
    method: str = ""

    @property
    def engine(self) -> str:
        """Whose it is."""
        return "simulated"

    @property
    def label(self) -> str:
        """For people."""
        unit = "rows" if self.form == "codebook" else "block"
        return ", ".join([f"{self.method or self.form} {self.bits} bits", f"{unit} {self.group}"])

    def options(self, calibration: Sequence[str]) -> list[str]:
        """Of the simulation's command; `calibration` are those that name the calibration text."""
        options = ["--form", self.form, "--bits", str(self.bits), "--group", str(self.group)]
        options += ["--method", self.method] if self.method else []
        return options + ([] if self.method in _DATA_FREE else list(calibration))

    @classmethod
    def parse(cls, text: str) -> SimulatedSubject:
        """FORM:BITS:GROUP or uniform:BITS:GROUP:METHOD.

        Raises:
            UsageError: it is neither.
        """
        form, *numbers = text.split(":")
        uniform = form == "uniform"
        whole = all(number.isdecimal() for number in numbers[:2])
        if form not in ("uniform", "codebook") or len(numbers) != 2 + uniform or not whole:
            raise UsageError(f"{text!r} is no form.", "Write it like codebook:3:16 or uniform:3:32:gptq.")
        return cls(form, int(numbers[0]), int(numbers[1]), *numbers[2:])


Subject = BundleSubject | GgufSubject | SimulatedSubject


def uniform(
    methods: Sequence[str],
    bits: Sequence[int],
    group_sizes: Sequence[int],
    signs: Sequence[bool],
    heads: Sequence[int | None],
) -> Iterator[BundleSubject]:
    """The same bits everywhere but in the head: every combination. `signs` say whether blocks are symmetric."""
    for method, width, group, symmetric, head in itertools.product(methods, bits, group_sizes, signs, heads):
        yield BundleSubject(method, width, None, group, symmetric, head, method not in _DATA_FREE)


def budgeted(methods: Sequence[str], budgets: Sequence[float]) -> Iterator[BundleSubject]:
    """Bits and blocks that the integer programme chooses by what the calibration text says."""
    for method, budget in itertools.product(methods, budgets):
        yield BundleSubject(method, None, budget, calibrated=True)


def gguf_subjects(kinds: Sequence[str]) -> Iterator[GgufSubject]:
    """Each type without importance data where llama.cpp allows that, and with it."""
    for kind in kinds:
        if kind not in NEEDS_IMPORTANCE:
            yield GgufSubject(kind, False)
        yield GgufSubject(kind, True)
