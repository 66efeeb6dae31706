"""What ways to quantize experts cost a mixture-of-experts checkpoint at equal bytes.

python -m tests.tools.research.expert_comparison CHECKPOINT --text FILE [--bits 2.125,2.375,...]
    [--tokens N] [--methods rtn,gptq] [--shared-space DIRECTIONS] [--json OUT]

One scheme for all experts, the best that fits; a scheme for each, as the integer programme of `edgeinfer export`
chooses; and experts as a shared basis with factors of their own (spectral.py). All else stays float32, and the whole
checkpoint lies in memory. Prints a table of the bytes that experts take, the divergence from the float model
on text that was not calibrated with, and the processor's seconds of quantizing. With --shared-space the float model is
the checkpoint whose experts read and write a space of so many directions only: what the shared basis is made for.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.arithmetic import log_softmax, rms_norm
from edgeinfer.errors import BudgetError, EdgeInferError, StorageError, UsageError
from edgeinfer.export.source.calibration_text import LENGTH, read_calibration_text
from edgeinfer.quant.calibration_layers import LayerWalk
from edgeinfer.quant.methods import METHODS
from edgeinfer.quant.policy import QuantScheme
from tests.tools.research.expert_forms import ExpertModel, Forms, Made
from tests.tools.research.spectral import Heterogeneity

_log = logging.getLogger("edgeinfer")
# Rows of logits at a time.
_ROWS = 512

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ComparisonSettings:
    """What is compared.

    Attributes:
        bits: stored bits per expert weight that are allowed, scales and zero points included.
        tokens: to calibrate with, and as many others to measure on.
        methods: quantizers of edgeinfer.quant, by name, for the forms that bundles can hold.
        shared_space: directions of the space that a layer's experts read and write, and nothing beside it; None leaves
            them as they are.
    """

    bits: tuple[float, ...] = (2.125, 2.375, 2.5, 2.75, 3.0)
    tokens: int = 8192
    methods: tuple[str, ...] = ("rtn", "gptq")
    shared_space: int | None = None

    def __post_init__(self) -> None:
        # Scales that are folded into the layers before would change what is no expert's.
        known = [name for name, method in METHODS.items() if not method.folds]
        if not self.methods or not set(self.methods) <= set(known):
            raise UsageError(f"No comparison is made by {', '.join(self.methods)}.", f"Choose of {', '.join(known)}.")
        if not self.bits or not all(math.isfinite(bits) and bits > 0 for bits in self.bits) or self.tokens < 2:
            raise UsageError("There is nothing to compare.", "Ask for more than 0 bits and at least 2 tokens.")
        if self.shared_space is not None and self.shared_space < 1:
            raise UsageError("A shared space has no direction.", "Ask for at least 1.")


@dataclass(frozen=True)
class ComparisonRow:
    """What one way to quantize the experts came to.

    Attributes:
        allowed_bits: per expert weight.
        form: "uniform", "per expert", "spectral" or "spectral weighted", which knows of the inputs.
        method: a quantizer; None of spectral forms, which have one of their own.
        scheme: of a uniform form.
        stored_bits: per expert weight, all that belongs to them included.
        kl: divergence from the float model in nats per token, the mean over tokens.
        kl_error: its standard error.
        same_next: percent of tokens after which the same one is likeliest.
        allocation_seconds: of a processor, for probing and the integer programme; None of spectral forms, which solve
            one while rounding. A uniform form allocates nothing; its scheme is the best in hindsight.
        rounding_seconds: of a processor, for running the calibration text, where it is needed, and for rounding.
    """

    allowed_bits: float
    form: str
    method: str | None
    scheme: QuantScheme | None
    stored_bits: float
    kl: float
    kl_error: float
    same_next: float
    allocation_seconds: float | None
    rounding_seconds: float


@dataclass(frozen=True)
class Group:
    """One projection of a layer's experts, and how much they differ."""

    name: str
    differs: Heterogeneity


@dataclass(frozen=True)
class ExpertComparison:
    """All that was measured.

    Attributes:
        expert_weights: number of them.
        tokens: calibrated with, and measured on.
        probing_seconds: spent once; part of every allocation's.
    """

    checkpoint: str
    expert_weights: int
    tokens: tuple[int, int]
    probing_seconds: float
    groups: tuple[Group, ...]
    outcomes: tuple[ComparisonRow, ...]


def compare(checkpoint: Path, text: Path, settings: ComparisonSettings | None = None) -> ExpertComparison:
    """Quantizes the experts of a checkpoint in every form and measures each on text that it was not calibrated with.

    Args:
        text: UTF-8. Every other piece of it is calibrated with; the rest is measured on.

    Raises:
        UsageError: the checkpoint has no experts that can be quantized, or the text is too short.
        BudgetError: not even the smallest schemes fit.
        CheckpointError, ModelError: the checkpoint cannot be read.
    """
    settings = settings or ComparisonSettings()
    model = ExpertModel.read(checkpoint)
    if settings.shared_space is not None:
        model.share_space(settings.shared_space)
    for bits in settings.bits:
        model.check(bits)
    tokenizer = _read_bytes(checkpoint / "tokenizer.json")
    # As many texts for one part as for the other, and of one length.
    count = math.ceil(settings.tokens / min(model.spec.max_positions, LENGTH))
    length = math.ceil(settings.tokens / count)
    texts = read_calibration_text(text, tokenizer, 2 * settings.tokens, length).texts
    seen, validation = texts[::2], texts[1::2]
    forms = Forms(model, seen)
    bench = _Bench(forms, _Judge(model, validation))
    outcomes = tuple(outcome for bits in settings.bits for outcome in bench.outcomes(bits, settings.methods))
    groups = tuple(Group(name, forms.differs(members)) for name, members in model.groups.items())
    tokens = sum(map(len, seen)), sum(map(len, validation))
    return ExpertComparison(str(checkpoint), model.weights, tokens, forms.costs[1], groups, outcomes)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", "Give a whole checkpoint.") from error


class _Judge:
    """The float model on held-out text, and how far others are from it."""

    def __init__(self, model: ExpertModel, texts: Sequence[Ints]) -> None:
        self._model, self._texts = model, texts
        self._head = model.tensor("embed" if model.spec.tied else "head")
        self._reference = self._final({})

    def divergence(self, weights: Mapping[str, Floats]) -> tuple[NDArray[np.float64], float]:
        """The divergence after each token with some weights replaced, (T,), and the share with the same next one."""
        final, parts, same = self._final(weights), [], 0
        for start in range(0, len(final), _ROWS):
            rows = slice(start, start + _ROWS)
            wanted, got = (log_softmax(x[rows] @ self._head.T, np.float32) for x in (self._reference, final))
            parts.append((np.exp(wanted) * (wanted - got)).sum(axis=1, dtype=np.float64))
            same += int((wanted.argmax(axis=1) == got.argmax(axis=1)).sum())
        return np.concatenate(parts), same / len(final)

    def _final(self, weights: Mapping[str, Floats]) -> Floats:  # (T, D)
        """Normed hidden states after the last layer."""
        spec, original = self._model.spec, self._model.tensor

        def tensor(name: str) -> Floats:
            return weights[name] if name in weights else original(name)

        lengths = [len(text) for text in self._texts]
        walk = LayerWalk(spec, tensor, lengths, lambda _, weight, __: weight, (False,), hessian=False)
        states: tuple[Floats, ...] = (original("embed")[np.concatenate(self._texts)],)
        for layer in range(spec.num_layers):
            states = walk.run(layer, states)
        return rms_norm(states[0], original("final_norm"), spec.norm_eps)


class _Bench:
    """Makes all forms within budgets and measures them, uniform ones once for all budgets."""

    def __init__(self, forms: Forms, judge: _Judge) -> None:
        self._forms, self._judge = forms, judge
        self._uniform: dict[tuple[QuantScheme, str], ComparisonRow] = {}

    def outcomes(self, bits: float, methods: Sequence[str]) -> Iterator[ComparisonRow]:
        """Every form within so many bits per expert weight."""
        forms = self._forms
        budget = forms.model.budget(bits)
        for method in methods:
            tried = [self._of_one_scheme(bits, scheme, method) for scheme in forms.model.fitting(budget)]
            if tried:
                yield min(tried, key=_kl)
        schemes, seconds = forms.allocate(budget)
        for method in methods:
            yield self._measure(bits, "per expert", forms.round(schemes, method, seconds), method)
        for form, weighted in (("spectral", False), ("spectral weighted", True)):
            try:
                made = forms.spectral(budget, weighted=weighted)
            except BudgetError as error:
                _log.info("%s at %g bits: %s", form, bits, error.message)
            else:
                yield self._measure(bits, form, made)

    def _of_one_scheme(self, bits: float, scheme: QuantScheme, method: str) -> ComparisonRow:
        key = scheme, method
        if key not in self._uniform:
            made = self._forms.round(self._forms.model.uniform(scheme), method, 0.0)
            self._uniform[key] = self._measure(bits, "uniform", made, method, scheme)
        return replace(self._uniform[key], allowed_bits=bits)

    def _measure(
        self, bits: float, form: str, made: Made, method: str | None = None, scheme: QuantScheme | None = None
    ) -> ComparisonRow:
        kl, same = self._judge.divergence(made.weights)
        stored, error = made.nbytes * 8 / self._forms.model.weights, float(kl.std()) / math.sqrt(len(kl))
        seconds = made.allocation, made.rounding
        outcome = ComparisonRow(bits, form, method, scheme, stored, float(kl.mean()), error, 100 * same, *seconds)
        _log.info("%s", _line(outcome))
        return outcome


def _kl(outcome: ComparisonRow) -> float:
    return outcome.kl


_COLUMNS = (
    "| bits allowed | form | method | scheme | bits stored | KL, nats | same next | allocation, s | rounding, s |"
)


def table(comparison: ExpertComparison) -> str:
    """A comparison as Markdown: how much experts differ, then what each form came to."""
    seen, validation = comparison.tokens
    lines = [
        f"{comparison.expert_weights} expert weights, {seen} tokens to calibrate with and {validation} to measure on; "
        f"{comparison.probing_seconds:.1f} s of every allocation are probing.",
        "",
        "| experts | energy | spectral energy | usage |",
        "|---|---|---|---|",
    ]
    for group in comparison.groups:
        found = group.differs
        lines.append(f"| {group.name} | {found.energy:.3f} | {found.spectrum:.3f} | {found.usage:.3f} |")
    lines += ["", _COLUMNS, "|---" * 9 + "|", *map(_line, comparison.outcomes)]
    return "\n".join(lines) + "\n"


def _line(outcome: ComparisonRow) -> str:
    scheme, allocation = outcome.scheme, outcome.allocation_seconds
    cells = (
        f"{outcome.allowed_bits:g}",
        outcome.form,
        outcome.method or "",
        "" if scheme is None else f"{scheme.bits}/{scheme.block_size}{'' if scheme.symmetric else ' + zero'}",
        f"{outcome.stored_bits:.3f}",
        f"{outcome.kl:.5f} ± {outcome.kl_error:.5f}",
        f"{outcome.same_next:.2f}%",
        "" if allocation is None else f"{allocation:.1f}",
        f"{outcome.rounding_seconds:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    parser = argparse.ArgumentParser(
        "python -m tests.tools.research.expert_comparison", description=__doc__.splitlines()[0]
    )
    parser.add_argument("checkpoint", type=Path, help="of a model with a mixture of experts")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8")
    default = ComparisonSettings()
    parser.add_argument("--bits", type=_numbers, default=default.bits, help="per expert weight, separated by commas")
    help_ = f"to calibrate with, and as many to measure on (default: {default.tokens})"
    parser.add_argument("--tokens", "--calibration-tokens", type=int, default=default.tokens, metavar="N", help=help_)
    parser.add_argument("--methods", type=_names, default=default.methods, help="separated by commas")
    parser.add_argument("--shared-space", type=int, metavar="DIRECTIONS", help="leave the experts one space to share")
    parser.add_argument("--json", type=Path, metavar="OUT", help="file to write all figures to")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        # Refused now rather than when all is done.
        if args.json is not None and not args.json.parent.is_dir():
            raise StorageError(f"Cannot write {args.json}: its folder does not exist.", "Make the folder first.")
        settings = ComparisonSettings(args.bits, args.tokens, args.methods, args.shared_space)
        comparison = compare(args.checkpoint, args.text, settings)
        if args.json is not None:
            _write(args.json, comparison)
    except EdgeInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(table(comparison))
    return 0


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _write(path: Path, comparison: ExpertComparison) -> None:
    try:
        path.write_text(json.dumps(asdict(comparison), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise StorageError(
            f"Cannot write {path}: {error.strerror}.", "Check the folder and its permissions."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
